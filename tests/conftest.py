"""Every test runs on virtual CPU devices; what one compiles for a GPU, no other compiles again."""

import contextlib
import gc
import io
import os
import pathlib
import shutil
from collections.abc import Mapping
from importlib import metadata
from typing import NoReturn

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "32"
# Toy programs are compiled for seconds and run for milliseconds: spend less on compiling.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=1"
FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
# As step/xla_options.py, for programs that a test compiles itself: XLA:CPU deadlocks without.
FLAGS += " --xla_cpu_enable_concurrency_optimized_scheduler=false"
os.environ["XLA_FLAGS"] = FLAGS
if metadata.version("jaxlib") < "0.11":  # a quarter of the time; later ones do not know it
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# What a trace leaves are objects by the million that live on: look for cycles seldom.
gc.set_threshold(50_000, 20, 50)
# Plans, and what started processes compile, are kept for all workers and for the next run, under
# keys that know the sources, the options and the versions.
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "maxbench/tests"
os.environ["MAXBENCH_CACHE"] = str(CACHE / "plan")
KEPT = 1 << 30  # bytes; with a limit, what jax keeps is locked too
# Kept figures are of this one; others' programs are a little slower.
KEPT_FIGURES_JAX = metadata.version("jax") == "0.10.2"


import jax  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from maxbench.cli import entry  # noqa: E402
from maxbench.config import precedence, recipes  # noqa: E402
from maxbench.config import resolve as resolving  # noqa: E402
from maxbench.config.run import Device, Layout, LayoutConfig, Run  # noqa: E402
from maxbench.hardware.gpus import GPU_TYPES  # noqa: E402
from maxbench.host import environment  # noqa: E402

WORKLOADS = (
    "llama2_70b",
    "llama31_8b",
    "llama31_70b",
    "llama31_405b",
    "nemotron4_340b",
    "grok1_314b",
    "mixtral_8x7b",
    "qwen3_30b_a3b",
    "qwen3_235b_a22b",
    "gpt_oss_20b",
    "gpt_oss_120b",
    "deepseek_v3",
    "kimi_k2",
    "nemotron_3_nano",
    "nemotron_3_super",
    "nemotron_3_ultra",
    "nemotron_h_56b",
)


def needs(*programs: str) -> str:
    """Path of the first of these programs that is installed; without one, the test is skipped.

    To be called in a test or a fixture. With MAXBENCH_REQUIRE_ALL=1, which .ci/run sets, the test
    fails instead: the gate installs every program, and a skip there would hide an untested part.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where Debian has daemons
    if found := next(filter(None, (shutil.which(name, path=path) for name in programs)), None):
        return found
    return unavailable(f"{' or '.join(programs)} is not installed")


def unavailable(reason: str) -> NoReturn:
    """Skips the test; with MAXBENCH_REQUIRE_ALL=1, fails it."""
    if os.environ.get("MAXBENCH_REQUIRE_ALL") == "1":
        pytest.fail(f"MAXBENCH_REQUIRE_ALL=1, but {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_addoption(parser):
    parser.addoption(
        "--update", action="store_true", help="rewrite stored figures of the tests that run; -n 0"
    )


def pytest_configure(config):
    if config.getoption("--update") and config.getoption("numprocesses", 0):
        raise pytest.UsageError("--update rewrites one file, so it needs -n 0")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu_compile") and not environment.version("jax-cuda13-plugin"):
        unavailable("XLA's GPU compiler is not installed: pip install '.[plan]'")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items):
    """Tests of a family share references, so one worker takes them all."""
    for item in items:
        if family := getattr(item, "callspec", None) and item.callspec.params.get("family"):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {family}"))


def processes(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of processes that a test starts: they choose their devices themselves, and
    use the persistent compilation cache of the tests."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(CACHE / "jax"),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(KEPT),
    }
    return {k: v for k, v in env.items() if k != "JAX_NUM_CPU_DEVICES"} | cache


@contextlib.contextmanager
def persistent_cache(folder: pathlib.Path | None = CACHE / "jax", seconds: float = 0):
    """JAX's persistent compilation cache in a folder, of programs that took longer to compile; no
    cache with None."""
    values = {
        "jax_compilation_cache_dir": folder and str(folder),
        "jax_compilation_cache_max_size": KEPT,
        "jax_persistent_cache_min_compile_time_secs": seconds,
    }
    before = {name: jax.config.values[name] for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Compiled programs are cached for the next run of the tests, which take half of their time to
    compile; not those for GPUs, as JAX cannot load the program of an absent one. A hook, so that
    fixtures of modules compile inside of it too."""
    for_gpu = item.get_closest_marker("gpu_compile")
    with persistent_cache(None if for_gpu else CACHE / "jax", 0.5):
        return (yield)


def config(name: str, presets: str = ""):
    """The ConfigDict of a workload file."""
    return recipes.load_workload(f"{name}:{presets}")


CPU = Device("cpu")


def resolve(
    name: str,
    presets: str = "",
    overrides: dict | None = None,
    device: Device | None = None,
    **flags,
) -> Run:
    """The Run of a workload, as the command line would resolve it: for this CPU if it may run on
    any device, for a GPU otherwise."""
    first = {k: flags.pop(k) for k in ("gpus", "strong_scaling") if k in flags}
    asked = precedence.build_config(
        config(name, presets), flags=flags, overrides=overrides, **first
    )
    on_cpu = asked.runtime.any_device or asked.runtime.cpu_devices
    return resolving.resolve(asked, GPU_TYPES, device or (CPU if on_cpu else None))


def layout(**degrees: int) -> Layout:
    """A layout without a model."""
    asked = LayoutConfig(**degrees)
    given = {name: getattr(asked, name) for name in asked.__dataclass_fields__}
    gbs = asked.gbs or asked.mbs * asked.shards
    resolved = {"ep_nodes": asked.ep_nodes or 1, "gbs": gbs, "parts": (1,) * asked.pp * asked.vp}
    return Layout(**given | resolved)


def train_command(*args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `maxbench train` in this process, for runs that stop before
    jax is needed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = entry.run("train", args)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True, scope="session")
def auto_backend_is_xla():
    """precision.backend=auto is XLA in this process, also where Transformer Engine is installed:
    figures and kernels in tests are XLA's."""
    gemm_backend = resolving.gemm_backend
    with pytest.MonkeyPatch.context() as patch:
        only_xla = lambda given, fmt, platform: gemm_backend(given, fmt, "cpu")
        patch.setattr(resolving, "gemm_backend", only_xla)
        yield gemm_backend
