"""Every test runs on eight virtual CPU devices."""

import importlib
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Toy programs are compiled for seconds and run for milliseconds: spend less on compiling.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=1"


from maxbench.spec import recipes
from maxbench.spec.run import Run

WORKLOADS = (
    "llama2_70b",
    "llama31_8b",
    "llama31_70b",
    "llama31_405b",
    "nemotron4_340b",
    "grok1_314b",
)


def config(name: str, presets: str = ""):
    """The ConfigDict of a workload file."""
    return importlib.import_module(f"configs.{name}").get_config(presets)


def resolve(name: str, presets: str = "", overrides: dict | None = None, **flags) -> Run:
    """The Run of a workload, as the command line would build it."""
    first = {k: flags.pop(k) for k in ("gpus", "strong_scaling") if k in flags}
    return recipes.resolve(config(name, presets), flags=flags, overrides=overrides, **first)
