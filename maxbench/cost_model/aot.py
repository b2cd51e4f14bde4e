"""Ahead-of-time compilation of a run's step by XLA's GPU compiler, without GPUs.

The Step is that of training, on compile-only devices.
"""

import contextlib
import dataclasses
import pathlib
import resource
import string
from collections.abc import Iterator

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from maxbench.config.number_formats import FORMATS
from maxbench.config.run import Run
from maxbench.cost_model import compile_cache, memory, stub_libcuda
from maxbench.hardware.gpus import Chip
from maxbench.sharding import mesh, rules
from maxbench.step.train_step import Step

# Only the scheduled HLO is read, so code generation, more than half of a compile, is cut short: no
# LLVM optimization, an assembler that writes nothing (cuda/bin/ptxas), and no fusion autotuner (it
# has no GPU to run candidates on). tests/planning/test_plan.py checks that the HLO is the same.
PROGRAM_ONLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
    "xla_gpu_cuda_data_dir": str(pathlib.Path(__file__).with_name("cuda")),
}


def target(chip: Chip) -> str:
    """A GPU's GpuTargetConfigProto, in text form."""
    text = pathlib.Path(__file__).with_name("target.pbtxt").read_text()
    major, minor = chip.capability
    values = dataclasses.asdict(chip) | {"major": major, "minor": minor}
    values["features"] = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    values["shared_memory_per_block"] = chip.shared_memory_per_core - 1024  # 1 KB is CUDA's own
    return string.Template(text).substitute(values)


def devices(run: Run) -> list:
    """Compile-only devices of a run, in the order of nodes."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=target(run.gpu.chip),
        topology=run.gpu.topology(run.layout.gpus),
    )
    return topology.devices


@contextlib.contextmanager
def no_persistent_cache() -> Iterator[None]:
    """Without JAX's compilation cache: it cannot load the program of an absent GPU, and warns."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


def compile_run(run: Run) -> compile_cache.Compiled:
    """Compiles the run's step for its GPUs.

    Raises:
      UserError: Transformer Engine is needed and does not load.
    """
    if run.precision.backend == "te":
        stub_libcuda.install(run.gpu.chip.capability)
    step = Step(run, mesh.make_mesh(run.layout, devices(run)))
    with no_persistent_cache():
        compiled, lower_s, compile_s = step.compile(**PROGRAM_ONLY)
    text, sizes = compiled.as_text(), compiled.memory_analysis()
    assert text is not None  # XLA's compilers have both
    assert sizes is not None
    parts = {name: round(rules.size_gib(tree) * 2**30) for name, tree in step.abstract.items()}

    def local_shape(weight, leaf):  # of a compute weight on one GPU
        sharding = jax.sharding.NamedSharding(
            step.mesh, jax.sharding.PartitionSpec(*weight.compute_axes)
        )
        return jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)

    weights = jax.tree.map(local_shape, step.shardings, step.abstract["params"])
    count = lambda tree: sum(w.size for w in jax.tree.leaves(tree))
    elements, layers = count(weights), count(weights["layers"])
    return compile_cache.Compiled(
        text=text,
        weights=parts["params"],
        optimizer=parts["opt"],
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        host=sizes.host_temp_size_in_bytes,
        copy=int(memory.compute_weight_bytes(run, layers, elements - layers)),
        gradients=elements * FORMATS[run.precision.grads].bytes,
        attention=step.run.train.attention,
        lower_s=lower_s,
        compile_s=compile_s,
        peak_rss_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
