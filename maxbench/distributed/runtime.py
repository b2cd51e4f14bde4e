"""Start-up before the first device call: environment variables, GPUs, processes.

set_environment() runs before jax is imported, init_distributed() right after.
"""

import contextlib
import ctypes
import glob
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from typing import NamedTuple

from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.distributed import coordinator, rendezvous, slurm_env
from maxbench.distributed.peer_watch import PeerWatch
from maxbench.distributed.service_relay import ServiceRelay
from maxbench.host import environment, xla_flags

# The peer watch finds lost and frozen processes. jax's client would abort this one, without a name
# and before the result is written (tests/distributed/test_stock_jax.py).
SERVICE_HEARTBEAT_TIMEOUT_S = 7 * 24 * 3600
JAX_PROCESS_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Number of processes of another launcher -> the variable of this one's number, the launcher.
OTHER_LAUNCHERS = {
    "WORLD_SIZE": ("RANK", "torchrun"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "mpirun"),
    "PMI_SIZE": ("PMI_RANK", "mpiexec"),
    "JAX_NUM_PROCESSES": ("JAX_PROCESS_ID", "jax"),  # with one of JAX_PROCESS_VARIABLES missing
}
MIN_DRIVER = {12: 525, 13: 580}  # CUDA version of jax's wheels -> the oldest driver that runs it


def set_environment(run: Run) -> None:
    """Sets the environment that jax reads at import, and checks that results can be written.

    Raises:
      UserError: output_dir cannot be written; the run or JAX_PLATFORMS needs GPUs, and there is
        none; wandb=True, and Weights & Biases is not installed; a variable of the run's processes
        is missing or malformed.
    """
    if run.output.wandb and find_spec("wandb") is None:
        raise UserError(
            "wandb=True needs Weights & Biases, which is not installed: pip install wandb; "
            "files for TensorBoard and Prometheus are written without it"
        )
    if run.runtime.cpu_devices:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(run.runtime.cpu_devices)
    fraction = str(environment.GPU_MEMORY_FRACTION)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", fraction)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if run.runtime.mock_gpus:  # mocked processes never send the autotuning results XLA waits for
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false".strip()
    try:
        _make_writable(os.path.join(run.output.dir, "experiments"))
    except OSError as e:
        raise UserError(f"output_dir={run.output.dir!r} cannot be written: {e.strerror}") from None
    if not run.runtime.cpu_devices and (reason := why_no_gpu()):
        _require_gpu(run, reason)
        # Without a driver jax's CUDA plugin prints a page of errors, or crashes.
        platforms = (os.environ.get("JAX_PLATFORMS") or "cpu").split(",")
        if others := [name for name in platforms if name not in ("cuda", "gpu")]:
            os.environ["JAX_PLATFORMS"] = ",".join(others)
        else:
            raise UserError(
                f"JAX_PLATFORMS={','.join(platforms)} asks for a GPU on {environment.hostname()}: "
                f"{reason}; unset it, or JAX_PLATFORMS=cpu"
            )
    _enable_compilation_cache(run)


def require_flags(check: xla_flags.Check) -> None:
    """Waits for a check of XLA_FLAGS.

    Raises:
      UserError: XLA would abort this process.
    """
    if errors := check.errors():
        raise UserError(f"XLA_FLAGS: {'; '.join(errors)}")


def _make_writable(folder: str) -> None:
    """Creates a folder if it is missing.

    Raises:
      OSError: it cannot be created, or not written.
    """
    os.makedirs(folder, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def _enable_compilation_cache(run: Run) -> None:
    """Has jax cache compiled programs, and XLA its autotuning results, if the folder is writable.

    Several processes autotune together, so all must find a program in the cache, or none: they
    cache only in a folder of their own job, which JAX_COMPILATION_CACHE_DIR names.
    """
    env, configured = os.environ, os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not configured and _process_group(run).processes > 1:
        return
    folder = configured or str(environment.cache_dir() / "jax")
    env["JAX_COMPILATION_CACHE_DIR"] = folder
    env.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    try:
        _make_writable(folder)
    except OSError as e:
        env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        print(f"maxbench: no compilation cache in {folder}: {e.strerror}", file=sys.stderr)


def why_no_gpu() -> str:
    """Why jax can find no GPU on this host, and what to do; '' if it may find one.

    Calls neither jax nor a GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides them: unset it, or ask Slurm (--gres=gpu:8)"
    if not glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dxg"):  # dxg: in Linux on Windows
        return "there is no device file /dev/nvidia*: ask Slurm (--gres=gpu:8), docker (--gpus all)"
    try:
        driver, cuda_version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return "there is no driver (libcuda.so.1): install it, or start the container with GPUs"
    driver.cuDriverGetVersion(ctypes.byref(cuda_version))  # as 13020 for CUDA 13.2
    if find_spec("jax_plugins") is None:
        return "jax's CUDA plugin is not installed: pip install 'maxbench[gpu]'"
    supported = cuda_version.value // 1000
    for cuda, driver_version in MIN_DRIVER.items():
        if environment.version(f"jax-cuda{cuda}-plugin") and supported < cuda:
            return (
                f"the driver supports CUDA up to {supported}, and jax's wheels are for CUDA {cuda}"
                f": install driver {driver_version} or later, or older wheels (jax[cuda12])"
            )
    platforms = os.environ.get("JAX_PLATFORMS") or "cuda"
    return "" if {"cuda", "gpu"} & {*platforms.split(",")} else f"JAX_PLATFORMS={platforms}"


def _require_gpu(run: Run, reason: str) -> None:
    """Raises UserError, with the reason why there is no GPU, unless the run may use a CPU."""
    if run.runtime.mock_gpus or not (run.runtime.cpu_devices or run.runtime.any_device):
        raise UserError(
            f"no GPU on {environment.hostname()}: {reason}; a run on {run.layout.describe()} needs "
            "GPUs: --cpu_devices N runs it on a CPU, the preset :tiny on any device"
        )


def log_path() -> str:
    """File that this process prints to, or ''; of a log of all tasks, the prefix of its lines."""
    if shared_log := os.environ.get("MB_LOG"):  # srun --label puts the task's number first
        number = os.environ.get("SLURM_PROCID") or os.environ.get("MB_PROCESS", "0")
        return f"lines {number}: of {shared_log}"
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(2).st_mode):
            return os.readlink("/proc/self/fd/2")
    return ""


def init_distributed(run: Run) -> PeerWatch | None:
    """Connects the processes of the run, and initializes jax; returns None for a single process.

    Addresses and numbers come from flags, from JAX_PROCESS_VARIABLES, or from Slurm's variables.

    Raises:
      UserError: the processes cannot be connected; the run needs GPUs, and jax found none; jax has
        no device of JAX_PLATFORMS.
    """
    import jax

    if run.runtime.mock_gpus:
        topology = run.gpu.topology(run.runtime.mock_gpus, 1)
        jax.config.update("jax_mock_gpu_topology", topology)
    peers, group = None, _process_group(run)
    if group.processes > 1:
        configured_s = run.runtime.rendezvous_timeout_s
        timeout_s = configured_s or rendezvous.default_timeout_s(group.processes)
        member = rendezvous.Member(group.process, environment.hostname(), log_path())
        hosts = slurm_env.process_hosts()
        # Several nodes of Slurm may be one machine, whose own name is then none of theirs.
        own_machines = os.uname().nodename.partition(".")[0] in {h.partition(".")[0] for h in hosts}
        coordinator.check_loopback(group.coordinator, member, hosts if own_machines else ())
        peers = rendezvous.rendezvous(
            group.coordinator,
            group.processes,
            member,
            timeout_s,
            hosts,
            wait_for_name=configured_s > 0,
        )
        peers.watch_hangs(run.runtime.hang_timeout_s, run.runtime.on_hang)
        service_address = group.coordinator
        if group.process:
            host, port = coordinator.split_address(group.coordinator)
            service_address = ServiceRelay(host, port, timeout_s).address
        # The service's handler would take a SIGTERM that comes before run/endings.py has its own.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            service_address,
            group.processes,
            group.process,
            local_device_ids=group.local_gpus,
            initialization_timeout=round(timeout_s),
            heartbeat_timeout_seconds=SERVICE_HEARTBEAT_TIMEOUT_S,
        )
    try:
        backend = jax.default_backend()
    except RuntimeError as e:
        platforms = os.environ.get("JAX_PLATFORMS")
        raise UserError(
            f"JAX_PLATFORMS={platforms or ''}: jax has no such device on {environment.hostname()}: "
            f"{str(e).splitlines()[0].partition(' (set')[0]}; unset it, or JAX_PLATFORMS=cpu"
        ) from None
    if backend != "gpu":
        reason = "jax found none, see above; a Slurm job may lack --gres=gpu:8"
        _require_gpu(run, why_no_gpu() or reason)
    return peers


class ProcessGroup(NamedTuple):
    """The processes of a run, and this one among them."""

    coordinator: str = ""  # host:port
    processes: int = 1
    process: int = 0
    local_gpus: list[int] | None = None  # GPUs of this process; None: jax's choice


def _process_group(run: Run) -> ProcessGroup:
    """Finds the processes of the run in flags, jax's variables, or Slurm's.

    Raises:
      UserError: a variable is missing or malformed.
    """
    options, env = run.runtime, os.environ
    if options.coordinator:
        return ProcessGroup(options.coordinator, options.processes, options.process)
    address, processes, process = (env.get(name) for name in JAX_PROCESS_VARIABLES)
    try:
        if address and processes and process:
            if not 0 <= int(process) < int(processes):
                raise UserError(
                    f"JAX_PROCESS_ID={process} must be below JAX_NUM_PROCESSES={processes}, and at "
                    "least 0"
                )
            return ProcessGroup(address, int(processes), int(process))
        count = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
        if count == 1:
            _check_other_launchers(env)
            return ProcessGroup()
        tasks_per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "1").split("(")[0]
        local_gpus = None
        if tasks_per_node == "1" and not options.cpu_devices:
            # By itself jax takes one GPU per task. The run may use fewer than a node has.
            local_gpus = list(range(-(-run.layout.gpus // count)))
        address = address or slurm_env.coordinator_address()
        return ProcessGroup(address, count, int(env["SLURM_PROCID"]), local_gpus)
    except UserError:  # a ValueError too
        raise
    except (ValueError, KeyError, IndexError) as e:
        names = ", ".join(JAX_PROCESS_VARIABLES)
        raise UserError(f"{names} or Slurm's variables are malformed: {e!r}") from None


def _check_other_launchers(env: Mapping[str, str]) -> None:
    """Raises UserError if another launcher started several processes: each would run alone."""
    for size, (rank, launcher) in OTHER_LAUNCHERS.items():
        if (count := env.get(size, "1")) not in ("", "0", "1"):
            raise UserError(
                f"{size}={count} is {launcher}'s, whose processes do not find each other: give "
                f"each --coordinator HOST:PORT --processes {count} --process {env.get(rank, 'N')}, "
                f"or set {', '.join(JAX_PROCESS_VARIABLES)}; for a run of one process unset {size}"
            )


def process_count() -> int:
    """Processes of the run. With a mocked network jax counts those that do not exist, too."""
    import jax

    return 1 if jax.config.read("jax_mock_gpu_topology") else jax.process_count()
