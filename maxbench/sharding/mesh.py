"""The device mesh, and the sequences and token positions of each GPU."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from maxbench.config.errors import UserError
from maxbench.config.run import AXES, Layout
from maxbench.sharding.collectives import axis_index, axis_size

DATA_AXES = ("dp", "fsdp", "ep_nodes", "ep")  # axes that split the batch


def make_mesh(layout: Layout, devices: list | None = None) -> Mesh:
    """The mesh of a layout over devices (default: jax.devices()), slowest axis first.

    Raises:
      UserError: fewer devices than the layout needs.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < layout.gpus:
        raise UserError(
            f"{layout.describe()}: {layout.gpus} devices are needed and {len(devices)} are present "
            f"({devices[0].device_kind}); use --cpu_devices {layout.gpus} for virtual ones with "
            "the presets :tiny and :rehearse, or maxbench plan, which needs no devices"
        )
    # Not jax.make_mesh: it refuses devices with several values of slice_index, and the GPUs of each
    # NVLink domain have another (xla/pjrt/distributed/topology_util.cc).
    grid = np.array(devices[: layout.gpus]).reshape([*layout.mesh_shape.values()])
    auto = (AxisType.Auto,) * len(AXES)  # the default, Explicit, would put shardings into types
    return Mesh(grid, AXES, axis_types=auto)


def token_positions(seq: int) -> np.ndarray | jax.Array:
    """Positions of this GPU's tokens, [seq / cp]: chunks i and 2 cp - 1 - i of 2 cp equal chunks.

    Megatron's load balancing for context parallelism: under a causal mask later queries attend to
    more keys, and each such pair of chunks has the same work.
    """
    n = axis_size("cp")
    if n == 1:
        return np.arange(seq)
    size, i = seq // (2 * n), axis_index("cp")
    offset = jnp.arange(size)
    return jnp.concatenate([offset + i * size, offset + (2 * n - 1 - i) * size])
