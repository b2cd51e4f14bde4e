"""GEMMs compiled for a Blackwell GPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbench.cost_model import absent_gpus
from maxbench.hardware.gpus import GPU_TYPES

BLOCK_SCALED_GEMM = 'custom_call_target="__cudnn$blockScaledDot"'


def compiled(function: Callable, axis: str, shapes: list, gpu_type: str) -> str:
    """Compiled text of a function of bf16 arrays in a shard_map on four GPUs, over one mesh axis.

    Args:
      shapes: (shape, PartitionSpec) of each argument; results are sharded along their first dim.
    """
    topology = jax.experimental.topologies.get_topology_desc(
        platform="cuda",
        target_config=absent_gpus.target(GPU_TYPES[gpu_type].chip),
        topology="1x1x4",
    )
    mesh = jax.experimental.topologies.make_mesh(topology, (4,), (axis,))
    in_specs = tuple(spec for _, spec in shapes)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=P(axis), check_vma=False
    )
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in shapes
    ]
    options = {"xla_gpu_enable_triton_gemm": False} | absent_gpus.PROGRAM_ONLY
    return jax.jit(mapped).lower(*arrays).compile(compiler_options=options).as_text()


def compiled_gemms(products: Callable, gpu_type: str) -> str:
    """compiled() of products(x, w, dy) -> y, dx, dw."""

    def share(x, w, dy):
        y, dx, dw = products(x, w, dy)
        return y, dx, dw[None]

    rows = P("fsdp")
    shapes = [((8192, 1024), rows), ((1024, 512), P()), ((8192, 512), rows)]
    return compiled(share, "fsdp", shapes, gpu_type)
