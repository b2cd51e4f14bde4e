"""GEMMs compiled for a Blackwell GPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbench.cost_model import absent_gpus
from maxbench.hardware.gpus import GPU_TYPES

BLOCK_SCALED_GEMM = 'custom_call_target="__cudnn$blockScaledDot"'


def compiled_gemms(products: Callable, gpu_type: str) -> str:
    """Compiled text of products(x, w, dy) -> y, dx, dw in a shard_map on four GPUs."""
    topology = jax.experimental.topologies.get_topology_desc(
        platform="cuda",
        target_config=absent_gpus.target(GPU_TYPES[gpu_type].chip),
        topology="1x1x4",
    )
    mesh = jax.experimental.topologies.make_mesh(topology, (4,), ("fsdp",))

    def share(x, w, dy):
        y, dx, dw = products(x, w, dy)
        return y, dx, dw[None]

    rows = P("fsdp")
    specs = dict(in_specs=(rows, P(), rows), out_specs=rows, check_vma=False)
    array = lambda shape, spec: jax.ShapeDtypeStruct(
        shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)
    )
    shapes = array((8192, 1024), rows), array((1024, 512), P()), array((8192, 512), rows)
    lowered = jax.jit(jax.shard_map(share, mesh=mesh, **specs)).lower(*shapes)
    options = {"xla_gpu_enable_triton_gemm": False} | absent_gpus.PROGRAM_ONLY
    return lowered.compile(compiler_options=options).as_text()
