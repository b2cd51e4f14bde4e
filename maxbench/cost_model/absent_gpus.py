"""XLA's GPU compiler without GPUs: compile-only devices, and JAX's checks answered for them."""

import contextlib
import dataclasses
import logging
import pathlib
import string
from collections.abc import Iterator

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from maxbench.config.errors import UserError
from maxbench.cost_model import stub_libcuda
from maxbench.hardware.gpus import Chip, Gpu
from maxbench.quantization import transformer_engine
from maxbench.sharding import jax_compat

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


def devices(gpu: Gpu, gpus: int) -> list[jax.Device]:
    """Compile-only devices of a job on `gpus` GPUs, in the order of nodes."""
    topology = gpu.topology(gpus)
    return topologies.get_topology_desc(
        platform="cuda", target_config=target(gpu.chip), topology=topology
    ).devices


@contextlib.contextmanager
def absent_gpus(gpu: Gpu, gpus: int) -> Iterator[list[jax.Device]]:
    """The devices of devices(). Inside, JAX's and Transformer Engine's checks of a present GPU, of
    cuDNN and of a compute capability answer for them, so that kernels are chosen as they would be
    there."""
    found = devices(gpu, gpus)
    prepare_transformer_engine(gpu)
    with no_persistent_cache(), jax_compat.checks_answered_for(found, gpu.chip.capability):
        yield found


def prepare_transformer_engine(gpu: Gpu) -> None:
    """Makes Transformer Engine, where it is installed, import without a driver and compile for a
    GPU type. Where it does not load, a warning says so: most programs do not call it."""
    if transformer_engine.is_installed():
        try:
            stub_libcuda.install(gpu.chip)
        except UserError as error:
            logging.warning("a program that calls Transformer Engine cannot be planned: %s", error)


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
