"""What is found on this machine before jax starts: GPUs, or why there are none."""

import ctypes
import glob
import os
import subprocess
import sys
import types

import jax
import pytest

from maxbench.config import environment
from maxbench.config.errors import UserError
from maxbench.distributed import runtime
from maxbench.run import loop
from tests.conftest import keeping, processes, resolve


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes a machine: a device file or none, what its driver knows of CUDA (0 = no driver), the
    CUDA of jax's wheels, variables."""

    def make(files=("/dev/nvidia0",), knows=13000, wheels=13, **env):
        def load(name):
            if not knows:
                raise OSError(f"{name}: cannot open shared object file")
            answer = lambda number: setattr(number._obj, "value", knows)
            return types.SimpleNamespace(cuDriverGetVersion=answer)

        plugin = f"jax-cuda{wheels}-plugin"
        monkeypatch.setattr(glob, "glob", lambda pattern: list(files) * ("nvidia" in pattern))
        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(runtime, "find_spec", lambda name: wheels or None)
        monkeypatch.setattr(environment, "version", lambda name: "0.10.2" * (name == plugin))
        monkeypatch.setattr(os, "environ", {"MAXBENCH_CACHE": str(tmp_path / "kept")} | env)

    return make


MISSING = {
    "device file": (dict(files=()), "no device file /dev/nvidia*: ask Slurm (--gres=gpu:8)"),
    "driver": (dict(knows=0), "no driver (libcuda.so.1): install it"),
    "new driver": (
        dict(knows=12080),
        "knows CUDA up to 12, and jax's wheels are for CUDA 13: install driver 580 or later, or "
        "wheels for an older one (jax[cuda12])",
    ),
    "old wheels": (dict(knows=11080, wheels=12), "for CUDA 12: install driver 525 or later"),
    "plugin": (dict(wheels=0), "plugin is not installed: pip install 'maxbench[gpu]'"),
    "visible": (dict(CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES='' hides them: unset it"),
    "NoDevFiles": (dict(CUDA_VISIBLE_DEVICES="NoDevFiles"), "or ask Slurm (--gres=gpu:8)"),
    "platforms": (dict(JAX_PLATFORMS="cpu"), "JAX_PLATFORMS=cpu"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_run_for_gpus_refuses_a_machine_without(machine, tmp_path, name):
    lacks, text = MISSING[name]
    machine(**lacks, SLURMD_NODENAME="n7")
    run = resolve("llama2_70b", gpus=64, output_dir=str(tmp_path))
    with pytest.raises(UserError) as error:
        runtime.set_environment(run)
    said = str(error.value)
    assert said.startswith("no GPU on n7: ")
    for part in (text, "a run on 64 devices, fsdp 64", "is for GPUs: --cpu_devices N"):
        assert part in said
    assert len(said) < 400
    assert "JAX_PLATFORMS" not in {*os.environ} - {*lacks}
    # A toy takes what is there, and leaves a CUDA plugin that cannot work alone.
    runtime.set_environment(resolve("llama2_70b", "tiny", output_dir=str(tmp_path)))
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("env", [{}, {"JAX_PLATFORMS": "cuda,cpu"}, {"CUDA_VISIBLE_DEVICES": "3"}])
@pytest.mark.parametrize(
    "has", [{}, {"knows": 12020, "wheels": 12}, {"knows": 13020, "wheels": 12}]
)
def test_a_machine_with_gpus_is_left_to_jax(machine, tmp_path, has, env):
    machine(**has, **env)
    assert runtime.no_gpu() == ""
    runtime.set_environment(resolve("llama2_70b", gpus=64, output_dir=str(tmp_path)))
    assert os.environ.get("JAX_PLATFORMS") == env.get("JAX_PLATFORMS")
    assert "XLA_FLAGS" not in os.environ
    runtime.set_environment(resolve("llama2_70b", gpus=64, mock_gpus=64, output_dir=str(tmp_path)))
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_shard_autotuning=false"


def test_a_cpu_where_jax_should_have_found_gpus_is_refused(machine):
    machine()  # and yet jax runs on a CPU: another's device files, a broken plugin
    with pytest.raises(UserError, match="jax found none, see above; in a Slurm job --gres=gpu:8"):
        runtime.init_distributed(resolve("llama2_70b", gpus=64))
    runtime.init_distributed(resolve("llama2_70b", gpus=64, cpu_devices=64))
    runtime.init_distributed(resolve("llama2_70b", "tiny"))


@pytest.mark.parametrize("door", ["train", "preflight"])
def test_a_recipe_without_a_gpu_is_answered_before_jax_starts(tmp_path, door):
    command = [sys.executable, "-X", "importtime", "-m", f"maxbench.{door}", "--gpus", "8"]
    command += ["--config", "configs/llama31_8b.py", "--output_dir", str(tmp_path)]
    done = subprocess.run(command, env=processes(), capture_output=True, text=True)
    assert done.returncode == 2
    assert f"maxbench {door}: error: no GPU on " in done.stderr
    assert "| jax\n" not in done.stderr


def test_programs_are_kept_where_one_may_write(machine, tmp_path, capsys):
    folder = lambda: os.environ.get("JAX_COMPILATION_CACHE_DIR")
    toy = resolve("llama2_70b", "tiny", output_dir=str(tmp_path))
    machine()
    runtime.set_environment(toy)
    assert folder() == f"{tmp_path}/kept/jax"
    machine(STAGE_PATH=str(tmp_path / "stage"))
    del os.environ["MAXBENCH_CACHE"]
    runtime.set_environment(toy)
    assert folder() == f"{tmp_path}/stage/cache/jax"
    assert os.path.isdir(folder())
    # Several processes find all the same, in a folder that is their job's own; or keep nothing.
    machine(JAX_NUM_PROCESSES="2")
    runtime.set_environment(toy)
    assert folder() is None
    machine(JAX_NUM_PROCESSES="2", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "job"))
    runtime.set_environment(toy)
    assert folder() == f"{tmp_path}/job"
    assert "JAX_ENABLE_COMPILATION_CACHE" not in os.environ
    assert not capsys.readouterr().err
    (tmp_path / "file").touch()
    machine(MAXBENCH_CACHE=str(tmp_path / "file"))
    runtime.set_environment(toy)
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    assert f"no program is kept, {tmp_path}/file/jax: Not a directory" in capsys.readouterr().err


@pytest.fixture
def kept(tmp_path):
    """A folder where this process keeps its programs, for a test."""
    with keeping(tmp_path):
        yield tmp_path


def test_the_log_says_whether_the_step_was_found(kept):
    said, result = [], {}
    log = types.SimpleNamespace(line=said.append, result=result, phase=str)
    step = types.SimpleNamespace(run=resolve("llama2_70b", "tiny"), abstract={})
    step.compile = lambda: (jax.jit(lambda x: x * 3).lower(1.0).compile(), 0.0, 0.0)
    loop.compile_step(step, log)
    assert said[1:] == [f"compilation cache miss: {kept}"]
    loop.compile_step(step, log)
    assert said[3:] == [f"compilation cache hit: {kept}"]
    assert result["compilation_cache"] == "hit"
    for file in kept.glob("jit*-cache"):
        file.write_bytes(b"cut short")
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        loop.compile_step(step, log)
    assert result["compilation_cache"] == "miss"
