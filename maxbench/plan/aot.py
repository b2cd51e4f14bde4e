"""Compiles a run's step with XLA's GPU compiler for a cluster that is not here.

The same Step as training, on devices that can only be compiled for.
"""

import dataclasses
import math
import resource
import time

import jax
from jax.experimental import topologies

from maxbench.hardware.gpus import CHIPS, GPUS, Chip
from maxbench.mesh import axes, places
from maxbench.plan import artifact
from maxbench.spec.run import DTYPES, Layout, Run
from maxbench.step import compiler
from maxbench.step.step import Step

# The same for compute capability 9 and 10: limits per block and per core as CUDA documents them.
_LIMITS = """
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  fpus_per_core: 128
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_address_bits: 64
  ecc_enabled: true
  device_vendor: "NVIDIA Corporation"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  device_interconnect_info { active_links: 18 }
"""


def target(chip: Chip) -> str:
    """A GPU as the compiler wants it: a GpuTargetConfigProto in text form."""
    major, minor = chip.capability
    return f"""
gpu_device_info {{{_LIMITS}
  name: "{chip.name}"
  core_count: {chip.cores}
  clock_rate_ghz: {chip.clock_ghz}
  l2_cache_size: {chip.l2_bytes}
  device_memory_size: {chip.memory_bytes}
  memory_bandwidth: {chip.memory_bytes_per_s}
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES
  }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.name}"
"""


def devices(layout: Layout) -> list:
    """Compile-only devices for a layout, in the order of nodes."""
    node = min(layout.gpus, GPUS[layout.gpu_type].gpus_per_node)
    hosts = -(-layout.gpus // node)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=target(CHIPS[layout.gpu_type]),
        topology=f"1x{hosts}x{node}",
    )
    return topology.devices


def compile_run(run: Run) -> artifact.Compiled:
    """Compiles the run's step for its GPUs, FP8 through XLA unless it says te."""
    if run.precision.backend == "auto":
        ours = dataclasses.replace(run.precision, backend="xla")
        run = dataclasses.replace(run, precision=ours)
    step = Step(run, axes.make_mesh(run.layout, devices(run.layout)))
    start = time.perf_counter()
    lowered = step.lower()
    traced = time.perf_counter()
    options = compiler.xla_options(step.platform, run)
    compiled = lowered.compile(compiler_options=options)
    done = time.perf_counter()
    memory = compiled.memory_analysis()
    parts = {name: round(places.size_gib(tree) * 2**30) for name, tree in step.abstract.items()}
    shards, layers = compute_shards(step)
    elements = sum(map(math.prod, shards))
    width = lambda dtype: jax.numpy.dtype(DTYPES[dtype]).itemsize
    return artifact.Compiled(
        text=compiled.as_text(),
        weights=parts["params"],
        optimizer=parts["opt"],
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        copy=elements * width(run.format.compute),
        gradients=elements * width(run.precision.grads),
        layer_shapes=tuple(layers),
        attention=step.run.train.attention,
        lower_s=traced - start,
        compile_s=done - traced,
        peak_rss_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )


def compute_shards(step: Step) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Dims of every compute weight as one GPU holds it, and of the stacked ones alone."""

    def dims(place, leaf):
        degree = lambda axis: step.mesh.shape[axis] if axis else 1
        return tuple(n // degree(a) for n, a in zip(leaf.shape, place.compute, strict=True))

    shapes = jax.tree.map(dims, step.places, step.abstract["params"])
    flat = lambda tree: jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple))
    return flat(shapes), flat(shapes["layers"])
