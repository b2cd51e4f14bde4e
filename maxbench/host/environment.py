"""The environment of this process: installed versions, code revision, host, GPUs, cache folder.

Importing this module needs no jax.
"""

import contextlib
import functools
import os
import pathlib
import platform
import subprocess
import sys

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ml-collections",
            "grain", "transformer-engine")  # fmt: skip
GPU_MEMORY_FRACTION = 0.94  # share of a GPU's memory that XLA may allocate


@functools.cache
def version(package: str) -> str:
    """Version of an installed package, or '' if it is not installed."""
    from importlib import metadata  # late: 15 ms, and most commands need no version

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that measured figures depend on."""
    installed = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    return {name: text for name, text in installed.items() if text}


def git_revision() -> str:
    """Revision of the code, with '-dirty' if it was changed; '' outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return "".join(run_lines(*command, cwd=os.path.dirname(os.path.abspath(__file__))))


def variables() -> dict[str, str]:
    """Environment variables that change what is measured, sorted by name."""
    prefixes = ("XLA_", "JAX_", "NCCL_", "NVTE_", "CUDA_", "TF_CPP_")
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)}


def cache_dir() -> pathlib.Path:
    """Folder of compiled programs: $MAXBENCH_CACHE, $STAGE_PATH/cache, or the user's cache."""
    stage, home = os.environ.get("STAGE_PATH"), os.environ.get("XDG_CACHE_HOME", "~/.cache")
    default = f"{stage}/cache" if stage else f"{home}/maxbench"
    return pathlib.Path(os.environ.get("MAXBENCH_CACHE", default)).expanduser()


def hostname() -> str:
    """Name of this host: Slurm's in a Slurm job, the kernel's elsewhere."""
    names = (os.environ.get(name) for name in ("SLURMD_NODENAME", "MB_NODE_NAME"))
    return next(filter(None, names), os.uname().nodename)


def run_lines(*command: str, cwd: str | None = None) -> list[str]:
    """Lines of a command's output; [] if it is not installed, fails, or takes over 30 s."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def query_nvidia_smi(*properties: str) -> list[dict[str, str]]:
    """Properties of each GPU of this node, by nvidia-smi's names; [] without nvidia-smi."""
    query = f"--query-gpu={','.join(properties)}"
    lines = run_lines("nvidia-smi", query, "--format=csv,noheader,nounits")
    rows = [line.strip().split(", ") for line in lines]
    return [dict(zip(properties, row, strict=True)) for row in rows if len(row) == len(properties)]


def compile_only_if_first() -> None:
    """set_for_compile_only(), also where jax is imported but has not looked for devices yet. Where
    it has, its devices stay."""
    if "jax" in sys.modules:
        import jax

        if jax.config.values["jax_platforms"] is None and not os.path.exists("/dev/nvidiactl"):
            jax.config.update("jax_platforms", "cpu")
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    else:
        set_for_compile_only()


def set_for_compile_only() -> None:
    """Sets the environment for compiling for GPUs that are absent; call before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # absent GPUs cannot load a program
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the plugin would look for a driver
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
