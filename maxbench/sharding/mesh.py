"""The mesh: its devices, and which sequences and tokens each of them works on."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from maxbench.config.errors import UserError
from maxbench.config.run import AXES, Layout
from maxbench.sharding.collectives import axis_index, axis_size

DATA_AXES = ("dp", "fsdp", "ep")  # axes that split the batch


def make_mesh(layout: Layout, devices: list | None = None) -> Mesh:
    """The mesh of a layout over devices (default: all that JAX sees), slowest axis first.

    Raises:
      UserError: fewer devices than the layout needs.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < layout.gpus:
        raise UserError(
            f"{layout.describe()}: {layout.gpus} are needed and {len(devices)} present "
            f"({devices[0].device_kind}); --cpu_devices {layout.gpus} makes virtual ones, and the "
            "presets :tiny and :rehearse fit a laptop; maxbench plan needs no devices at all"
        )
    degrees = [getattr(layout, axis) for axis in AXES]
    auto = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(degrees, AXES, axis_types=auto, devices=devices[: layout.gpus])


def token_positions(seq: int) -> np.ndarray | jax.Array:
    """Positions of this GPU's tokens over cp: chunk i and chunk 2 cp - 1 - i of 2 cp.

    A causal mask gives late tokens more work than early ones; the pair is the same for all.
    """
    n = axis_size("cp")
    if n == 1:
        return np.arange(seq)
    size, i = seq // (2 * n), axis_index("cp")
    first = jnp.arange(size)
    return jnp.concatenate([first + i * size, first + (2 * n - 1 - i) * size])


def sequence_ids(layout: Layout, micro: jax.Array | int) -> jax.Array:
    """Numbers, within the global batch, of this GPU's sequences in a microbatch."""
    shard = 0
    for axis in DATA_AXES:
        shard = shard * axis_size(axis) + axis_index(axis)
    return (micro * layout.shards + shard) * layout.mbs + jnp.arange(layout.mbs)
