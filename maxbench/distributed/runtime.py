"""All that must happen before the first device call: environment, processes, versions.

prepare() runs before jax is imported, connect() right after.
"""

import contextlib
import ctypes
import glob
import os
import stat
import sys
import tempfile
from importlib.util import find_spec

from maxbench.config import environment
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.distributed import rendezvous, slurm_env

JAX_PROCESSES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
DRIVERS = {12: 525, 13: 580}  # CUDA of jax's wheels -> the first driver that runs it


def set_environment(run: Run) -> None:
    """Sets the environment that jax reads at import, and makes sure that results can be written.

    Raises:
      UserError: output_dir cannot be written; the run is for GPUs, and there is none; what takes
        metrics is not installed.
    """
    if run.output.wandb and find_spec("wandb") is None:
        raise UserError(
            "wandb=True needs Weights & Biases, which is not installed: pip install wandb; "
            "files for TensorBoard and Prometheus are written without it"
        )
    if run.runtime.cpu_devices:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(run.runtime.cpu_devices)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(environment.GPU_MEMORY_FRACTION))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if run.runtime.mock_gpus:  # else the compiler waits for what mocked processes have tuned
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false".strip()
    try:
        _make(os.path.join(run.output.dir, "experiments"))
    except OSError as e:
        raise UserError(f"output_dir={run.output.dir!r} cannot be written: {e.strerror}") from None
    if not run.runtime.cpu_devices and (why := no_gpu()):
        _refuse(run, why)
        # Without a driver jax's CUDA plugin complains for a page, or crashes.
        os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS") or "cpu"
    _keep_programs(run)


def _make(folder: str) -> None:
    """Makes a folder; raises OSError where it cannot be written."""
    os.makedirs(folder, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def _keep_programs(run: Run) -> None:
    """Has jax keep what it compiles, and XLA what it tunes, where that can be written."""
    env, own = os.environ, os.environ.get("JAX_COMPILATION_CACHE_DIR")
    counts = (env.get(name, "1") for name in ("JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS"))
    if not own and max(run.runtime.processes, *map(int, counts)) > 1:
        return  # they tune together, so all must find a program, or none: not in any folder
    folder = env["JAX_COMPILATION_CACHE_DIR"] = own or str(environment.cache_dir() / "jax")
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    try:
        _make(folder)
    except OSError as e:
        env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        print(f"maxbench: no program is kept, {folder}: {e.strerror}", file=sys.stderr)


def no_gpu() -> str:
    """Why jax can find no GPU on this host, and what to do; '' where it may find one.

    Touches neither jax nor a GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides them: unset it, or ask Slurm (--gres=gpu:8)"
    if not glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg"):  # dxg: Windows' GPUs in Linux
        return "there is no device file /dev/nvidia*: ask Slurm (--gres=gpu:8), docker (--gpus all)"
    try:
        driver, known = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return "there is no driver (libcuda.so.1): install it, or start the container with GPUs"
    driver.cuDriverGetVersion(ctypes.byref(known))  # of CUDA, as 13020
    if find_spec("jax_plugins") is None:
        return "jax's CUDA plugin is not installed: pip install 'maxbench[gpu]'"
    for cuda, first in DRIVERS.items():
        if environment.version(f"jax-cuda{cuda}-plugin") and known.value // 1000 < cuda:
            return (
                f"the driver knows CUDA up to {known.value // 1000}, and jax's wheels are for CUDA "
                f"{cuda}: install driver {first} or later, or wheels for an older one (jax[cuda12])"
            )
    platforms = os.environ.get("JAX_PLATFORMS") or "cuda"
    return "" if {"cuda", "gpu"} & {*platforms.split(",")} else f"JAX_PLATFORMS={platforms}"


def _refuse(run: Run, why: str) -> None:
    """Raises UserError unless the run may do without a GPU."""
    if run.runtime.mock_gpus or not (run.runtime.cpu_devices or run.runtime.any_device):
        raise UserError(
            f"no GPU on {environment.hostname()}: {why}; a run on {run.layout.describe()} is for GPUs: "
            "--cpu_devices N says that a CPU is wanted, :tiny takes whatever is there"
        )


def log_path() -> str:
    """Where what this process prints can be read; '' where that is not known."""
    if log := os.environ.get("MB_LOG"):  # of all tasks, each line with its number
        return f"lines {os.environ.get('SLURM_PROCID', '0')}: of {log}"
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            return os.readlink("/proc/self/fd/2")
    return ""


def init_distributed(run: Run) -> rendezvous.PeerWatch | None:
    """Joins the other processes of the run, and returns them, if there are any.

    They are found from flags, from JAX's environment (JAX_PROCESSES), or from Slurm's.

    Raises:
      UserError: some did not come; the run is for GPUs, and jax found none.
    """
    import jax

    r, found = run.runtime, None
    if r.mock_gpus:
        jax.config.update("jax_mock_gpu_topology", run.gpu.topology(r.mock_gpus, 1))
    address, count, process, devices = _place(run)
    if count > 1:
        wait = r.rendezvous_timeout_s or rendezvous.seconds(count)
        found = rendezvous.rendezvous(
            address, count, process, wait, environment.hostname(), log_path(), slurm_env.places()
        )
        jax.distributed.initialize(
            address,
            count,
            process,
            local_device_ids=devices,
            initialization_timeout=round(wait),
            heartbeat_timeout_seconds=50,  # of a process that lives and does nothing
        )
    if jax.default_backend() != "gpu":
        seen = "jax found none, see above; in a Slurm job --gres=gpu:8 may be missing"
        _refuse(run, no_gpu() or seen)
    return found


def _place(run: Run) -> tuple[str, int, int, list[int] | None]:
    """The coordinator's address, how many processes there are, which this is, and its GPUs, where
    jax needs to be told."""
    r, env = run.runtime, os.environ
    address = env.get(JAX_PROCESSES[0], "")
    if r.coordinator:
        return r.coordinator, r.processes, r.process, None
    try:
        if set(JAX_PROCESSES) <= set(env):
            return address, *(int(env[name]) for name in JAX_PROCESSES[1:]), None
        if (count := int(env.get("SLURM_STEP_NUM_TASKS", "1"))) > 1:
            per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0]
            node = -(-run.layout.gpus // count)  # GPUS_PER_NODE may be less than a node has
            # Left alone, jax gives a process one GPU: right for one process per GPU only.
            whole = list(range(node)) if per_node == "1" and not r.cpu_devices else None
            return address or slurm_env.address(), count, int(env["SLURM_PROCID"]), whole
    except (ValueError, KeyError, IndexError) as e:
        raise UserError(f"{', '.join(JAX_PROCESSES)} or Slurm's variables: {e!r}") from None
    return "", 1, 0, None


def processes() -> int:
    """How many processes the run has. Of a mocked network jax counts those that are not there."""
    import jax

    return 1 if jax.config.read("jax_mock_gpu_topology") else jax.process_count()
