"""Synthetic tokens, made on the device from (seed, step, row): never the same batch twice."""

import jax
import jax.numpy as jnp

from maxbench import mesh
from maxbench.config import Run


def batch(run: Run, step: jax.Array, micro: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """tokens_bt and targets_bt of this GPU for one microbatch.

    A row of the global batch depends on (seed, step, row) alone, so every mesh trains on the same
    tokens. Over cp each GPU keeps its part of the row, in the order of mesh.chunks.
    """
    key = jax.random.fold_in(jax.random.key(run.train.seed), step)
    draw = lambda row: jax.random.randint(
        jax.random.fold_in(key, row), (run.train.seq + 1,), 0, run.model.vocab
    )
    tokens_bt = jax.vmap(draw)(mesh.rows(run.layout, micro))
    here = jnp.asarray(mesh.chunks(run.train.seq))
    return tokens_bt[:, here], tokens_bt[:, here + 1]
