"""All that must happen before the first device call: environment, processes, versions.

prepare() runs before jax is imported, connect() right after.
"""

import contextlib
import os
import platform
import subprocess
from importlib import metadata

from maxbench.spec.errors import UserError
from maxbench.spec.run import Run

JAX_PROCESSES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ml-collections")
PACKAGES += ("transformer-engine",)


def prepare(run: Run) -> None:
    """Sets the environment that jax reads at import, and makes sure that results can be written.

    Raises:
      UserError: output_dir cannot be written.
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
        raise UserError(f"output_dir={run.output.dir!r} cannot be written: {e.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"output_dir={run.output.dir!r} cannot be written: permission denied")


def prepare_compiler() -> None:
    """Sets the environment for compiling for GPUs that are not here."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the plugin would look for a driver
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def connect(run: Run) -> None:
    """Joins the other processes of the run, if there are any.

    They are found from flags, from JAX's environment (JAX_PROCESSES), or from Slurm's.

    Raises:
      UserError: mock_gpus where there is no GPU.
    """
    import jax

    r, env = run.runtime, os.environ
    if r.mock_gpus:
        node = run.layout.gpu.gpus_per_node
        jax.config.update("jax_mock_gpu_topology", f"1x{-(-r.mock_gpus // node)}x{node}")
    if r.coordinator:
        jax.distributed.initialize(r.coordinator, r.processes, r.process)
    elif set(JAX_PROCESSES) <= set(env):
        address, processes, process = (env[name] for name in JAX_PROCESSES)
        jax.distributed.initialize(address, int(processes), int(process))
    elif int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0]
        node = run.layout.gpu.gpus_per_node
        # Left alone, jax gives a process one GPU, which is right for one process per GPU only.
        whole_node = list(range(node)) if per_node == "1" and not r.cpu_devices else None
        jax.distributed.initialize(local_device_ids=whole_node)
    if r.mock_gpus and jax.default_backend() != "gpu":
        raise UserError(f"mock_gpus={r.mock_gpus} needs one real GPU, and jax found none here")


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    return {name: text for name, text in found.items() if text}


def version(package: str) -> str:
    """Of an installed package; '' for one that is not."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


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
