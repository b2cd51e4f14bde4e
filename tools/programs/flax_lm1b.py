"""The train step of Flax's own language-model example, examples/lm1b of google/flax.

    PYTHONPATH=FLAX/examples/lm1b maxbench plan --gpu_type h100 --gpus 64 \\
      --program tools/programs/flax_lm1b.py:train_step

Its files run as they are. train.py imports TensorFlow, clu and its input pipeline for the data and
the log, which the step does not use: they are stubs here. The model is the example's, of the width
and depth of GPT-3 1.3B; its attention computes all scores.
"""

import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.linen import partitioning
from flax.training import checkpoints  # noqa: F401 (looks for TensorFlow: before the stubs)
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

for name in ("tensorflow", "clu", "input_pipeline"):
    sys.modules.setdefault(name, mock.MagicMock())

import models  # noqa: E402
import train  # noqa: E402
import utils  # noqa: E402

from configs import default  # noqa: E402

SIZE = {"num_layers": 24, "emb_dim": 2048, "qkv_dim": 2048, "mlp_dim": 8192, "num_heads": 16}
SEQ, BATCH, VOCAB = 2048, 8, 30_000  # BATCH: sequences of a GPU


def train_step(devices, tensor=1):
    """The step on a mesh of data (nodes of 8 GPUs), fsdp and tensor, and its arguments."""
    config = default.get_config()
    config.update(SIZE | {"max_target_length": SEQ, "per_device_batch_size": BATCH})
    shape = (len(devices) // 8, 8 // tensor, tensor)
    mesh = Mesh(np.array(devices).reshape(shape), config.mesh_axes)
    model_config = models.TransformerConfig(
        vocab_size=VOCAB, output_vocab_size=VOCAB, dtype=jnp.bfloat16, max_len=SEQ,
        deterministic=True, decode=False, **SIZE,
    )  # fmt: skip
    rate = train.create_learning_rate_schedule(config.learning_rate, config.warmup_steps)
    optimizer = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)
    model = models.TransformerLM(model_config)
    boxed = jax.eval_shape(
        lambda key: utils.init_train_state(model, optimizer, config, key), jax.random.key(0)
    )
    rules = config.logical_axis_rules
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        utils.unbox_logicallypartioned_trainstate(boxed), shardings,
    )  # fmt: skip
    tokens = NamedSharding(mesh, P(("data", "fsdp")))
    batch = jax.ShapeDtypeStruct((BATCH * len(devices), SEQ), jnp.int32, sharding=tokens)

    def step(state, inputs, key):
        with partitioning.axis_rules(rules):
            batch = {"inputs": inputs}
            return train.train_step(state, batch, model_config, rate, 0.0, key)

    key = jax.eval_shape(lambda: jax.random.key(0))
    jitted = jax.jit(step, out_shardings=(shardings, None), donate_argnums=0)
    return jitted, (state, batch, key)
