"""A layer of Transformer Engine, as a user's file; test_te_programs.py plans it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import transformer_engine.jax as te
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformer_engine.common import recipe
from transformer_engine.jax.flax import DenseGeneral, DotProductAttention, LayerNormMLP

HEADS, SIZE, EMBED, MLP, SEQ = 32, 128, 4096, 14336, 4096


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = lambda name, features, axis=-1: DenseGeneral(features, axis=axis, name=name)
        qkv = dense("qkv", (3, HEADS, SIZE))(x)
        attention = DotProductAttention(
            SIZE, HEADS, HEADS, attn_mask_type="causal", qkv_layout="bs3hd",
            transpose_batch_sequence=False,
        )  # fmt: skip
        y = attention(qkv, None, None, deterministic=True)
        x += dense("out", EMBED, (-2, -1))(y)
        mlp = LayerNormMLP(MLP, activations=("silu", "linear"), use_bias=False, name="mlp")
        return x + mlp(x, deterministic=True)[0]


def factory(devices, found):
    mesh, model = Mesh(np.array(devices), ("dp",)), Layer()
    on = lambda spec: (
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    )
    x = on(P("dp"))(jax.ShapeDtypeStruct((len(devices), SEQ, EMBED), jnp.bfloat16))
    loss = lambda variables, x: model.apply(variables, x).astype(jnp.float32).mean()
    resource = te.MeshResource(dp_resource="dp")
    with jax.set_mesh(mesh), te.autocast(enabled=True, recipe=found, mesh_resource=resource):
        variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x), x)
        yield jax.jit(jax.value_and_grad(loss)), (jax.tree.map(on(P()), variables), x)


def delayed(devices):
    return factory(devices, recipe.DelayedScaling())


def current(devices):
    return factory(devices, recipe.Float8CurrentScaling())


def mxfp8(devices):
    return factory(devices, recipe.MXFP8BlockScaling())
