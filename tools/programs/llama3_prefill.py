"""The prefill of Llama 3.1 70B of jax-ml/jax-llm-examples: a forward pass of 8 prompts.

    PYTHONPATH=EXAMPLES/llama3 maxbench plan --gpu_type h100 --gpus 8 \\
      --program tools/programs/llama3_prefill.py:prefill

Its model.py runs as it is: weights in bf16, its own attention in XLA, tensor parallelism over the
node.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from llama3_jax import model

PROMPTS, SEQ = 8, 2048


def prefill(devices):
    """The jitted forward pass, and abstract prompts and weights."""
    axes = ("x", "y", "z")
    types = (AxisType.Explicit,) * 3
    mesh = Mesh(np.array(devices).reshape(1, len(devices), 1), axes, axis_types=types)
    config = model.Config(
        embed=8192, ffw_size=28672, q_heads=64, kv_heads=8, num_layers=80, head_dim=128,
        vocab_size=128256, max_seq_len=SEQ, causal=True, use_prefill_attn_kernel=False,
        use_decode_attn_kernel=False, mesh=mesh, quant_layer=False, quant_cache=False,
    )  # fmt: skip
    abstract, shardings = model.Weights.abstract(config), model.Weights.shardings(config)
    is_leaf = lambda x: isinstance(x, model.ArrayInfo)
    struct = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    weights = jax.tree.map(struct, abstract, shardings, is_leaf=is_leaf)
    tokens = NamedSharding(mesh, P("x", None))
    prompts = jax.ShapeDtypeStruct((PROMPTS, SEQ), jnp.int32, sharding=tokens)

    def forward(prompts, segments, weights):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return model.forward(prompts, segments, weights, config)[0]

    return jax.jit(forward), (prompts, prompts, weights)
