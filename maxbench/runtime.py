"""All that must happen before the first device call: environment, processes, versions.

prepare() runs before jax is imported, connect() right after. XLA's options are given to the
compiler with the program, not through XLA_FLAGS, where an unknown one would end the process.
"""

import contextlib
import os
import platform
import subprocess
from importlib import metadata

from maxbench.config import Run
from maxbench.hardware import GPUS

# Compiler options for GPUs: NVIDIA's recipe for Llama 2 on JAX, as far as today's XLA knows them.
XLA_OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_command_buffer": "",
    "xla_gpu_enable_highest_priority_async_stream": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 2 << 30,
    "xla_gpu_all_gather_combine_threshold_bytes": 2 << 30,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 32 << 20,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    "xla_disable_hlo_passes": "rematerialization",
    # The scheduler hides no communication once it thinks that memory is short, and it counts a
    # pipeline's buffers several times. Whether a step fits is for the buffer assignment to say.
    "xla_gpu_memory_limit_slop_factor": 300,
}
JAX_PROCESSES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ml-collections")


# Bytes at which collectives are combined: all-reduce, all-gather, reduce-scatter; of NVIDIA's
# MaxText recipes for Llama 2 (others take these too) and Llama 3.
COMBINE = {
    ("llama31", "fp8"): (2 << 30, 2 << 30, 64 << 20),
    ("llama31", "bf16"): (2 << 30, 2 << 30, 32 << 20),
    ("", "fp8"): (1 << 30, 512 << 20, 8 << 20),
    ("", "bf16"): (2 << 30, 2 << 30, 32 << 20),
}
MANY_NODES = 64  # from here on the recipes halve the reduce-scatter threshold


def xla_options(platform_name: str, run: Run) -> dict:
    """Compiler options for a platform as jax names it ('gpu', 'cpu'), by GPU type and workload."""
    if platform_name not in ("gpu", "cuda"):
        return {}
    options, gpu = dict(XLA_OPTIONS), run.layout.gpu_type
    # Where weights are gathered layer by layer: gather the next layer's early, while the last
    # one's gradients are still reduced. Elsewhere XLA would pipeline the sequence's all-gathers
    # over microbatches, and run the forward pass twice to do so.
    gathers = run.layout.fsdp > 1
    options["xla_gpu_enable_pipelined_all_gather"] = gathers
    # Saves copies from one iteration to the next, 3 to 7 % of Grok-1's and Nemotron's steps; where
    # a microbatch's code is long it saves nothing, and is compiled twice.
    long = run.layout.pp == 1 and not gathers and run.model.layers > 16
    options["xla_gpu_enable_while_loop_double_buffering"] = not long
    # Two: one layer's gradients are reduced while the next one's weights are gathered. Four: what
    # a stage sends travels beside work that has collectives of its own.
    overlap = 4 if run.layout.pp > 1 else 2 if gathers else 1
    options["xla_gpu_experimental_parallel_collective_overlap_limit"] = overlap
    dtype = "fp8" if run.precision.dtype == "fp8" else "bf16"
    own = COMBINE.get((run.model.name, dtype))
    reduce, gather, scatter = own or COMBINE["", dtype]
    if run.layout.tp > 1:
        gather = 1  # joined, a sequence's gathers would wait for the last of them
    if run.layout.gpus // GPUS[gpu].gpus_per_node >= MANY_NODES:
        scatter //= 2
    for name, size in (("all_reduce", reduce), ("all_gather", gather), ("reduce_scatter", scatter)):
        options[f"xla_gpu_{name}_combine_threshold_bytes"] = size
    if gpu in ("b200", "gb200", "gb300"):
        options["xla_gpu_enable_command_buffer"] = "FUSION,CUSTOM_CALL"
    if run.layout.tp > 1 and not run.runtime.tp_overlap:
        options["xla_gpu_disable_async_collectives"] = "ALLGATHER,REDUCESCATTER"
    return options


def prepare(run: Run) -> None:
    """Sets the environment that jax reads at import, and makes sure that results can be written.

    Raises:
      OSError: output_dir cannot be written.
    """
    if run.runtime.cpu_devices:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(run.runtime.cpu_devices)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    folder = os.path.join(run.output.dir, "experiments")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as e:
        raise OSError(f"output_dir={run.output.dir!r} cannot be written: {e.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise OSError(f"output_dir={run.output.dir!r} cannot be written: permission denied")


def prepare_compiler() -> None:
    """Sets the environment for compiling for GPUs that are not here."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the plugin would look for a driver
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def connect(run: Run) -> None:
    """Joins the other processes of the run, if there are any.

    They are found from flags, from JAX's environment (JAX_PROCESSES), or from Slurm's.

    Raises:
      ValueError: mock_gpus where there is no GPU.
    """
    import jax

    r, env = run.runtime, os.environ
    if r.mock_gpus:
        node = GPUS[run.layout.gpu_type].gpus_per_node
        jax.config.update("jax_mock_gpu_topology", f"1x{-(-r.mock_gpus // node)}x{node}")
    if r.coordinator:
        jax.distributed.initialize(r.coordinator, r.processes, r.process)
    elif set(JAX_PROCESSES) <= set(env):
        address, processes, process = (env[name] for name in JAX_PROCESSES)
        jax.distributed.initialize(address, int(processes), int(process))
    elif int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0]
        node = GPUS[run.layout.gpu_type].gpus_per_node
        # Left alone, jax gives a process one GPU, which is right for one process per GPU only.
        whole_node = list(range(node)) if per_node == "1" and not r.cpu_devices else None
        jax.distributed.initialize(local_device_ids=whole_node)
    if r.mock_gpus and jax.default_backend() != "gpu":
        raise ValueError(f"mock_gpus={r.mock_gpus} needs one real GPU, and jax found none here")


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        found[name] = metadata.version(name)
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["transformer-engine"] = metadata.version("transformer-engine")
    return found


def git_revision() -> str:
    """The revision of the code, with '-dirty' when it was changed; '' outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def environment() -> dict[str, str]:
    """Variables that change what is measured."""
    prefixes = ("XLA_", "JAX_", "NCCL_", "NVTE_", "CUDA_", "TF_CPP_")
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)}
