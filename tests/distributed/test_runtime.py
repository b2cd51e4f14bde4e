"""Start-up before jax: whether there is a GPU, the compilation cache, the processes of the run."""

import ctypes
import glob
import os
import re
import subprocess
import sys
import types
from unittest import mock

import jax
import pytest

from maxbench.config.errors import UserError
from maxbench.distributed import rendezvous, runtime
from maxbench.host import environment
from tests.conftest import processes, resolve


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Simulates a host: device files, the driver's CUDA version (0: no driver), the CUDA version
    of jax's wheels (0: no plugin), environment variables."""

    def simulate(files=("/dev/nvidia0",), driver_cuda=13000, wheels=13, **env):
        def load(name):
            if not driver_cuda:
                raise OSError(f"{name}: cannot open shared object file")
            set_version = lambda pointer: setattr(pointer._obj, "value", driver_cuda)
            return types.SimpleNamespace(cuDriverGetVersion=set_version)

        plugin = f"jax-cuda{wheels}-plugin"
        monkeypatch.setattr(glob, "glob", lambda pattern: list(files) * ("nvidia" in pattern))
        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(runtime, "find_spec", lambda name: wheels or None)
        monkeypatch.setattr(environment, "version", lambda name: "0.10.2" * (name == plugin))
        monkeypatch.setattr(os, "environ", {"MAXBENCH_CACHE": str(tmp_path / "cache")} | env)

    return simulate


NO_GPU = {
    "device file": (dict(files=()), "no device file /dev/nvidia*: ask Slurm (--gres=gpu:8)"),
    "driver": (dict(driver_cuda=0), "no driver (libcuda.so.1): install it"),
    "new driver": (
        dict(driver_cuda=12080),
        "supports CUDA up to 12, and jax's wheels are for CUDA 13: install driver 580 or later, or "
        "older wheels (jax[cuda12])",
    ),
    "old wheels": (dict(driver_cuda=11080, wheels=12), "for CUDA 12: install driver 525 or later"),
    "plugin": (dict(wheels=0), "plugin is not installed: pip install 'maxbench[gpu]'"),
    "visible": (dict(CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES='' hides them: unset it"),
    "NoDevFiles": (dict(CUDA_VISIBLE_DEVICES="NoDevFiles"), "or ask Slurm (--gres=gpu:8)"),
    "platforms": (dict(JAX_PLATFORMS="cpu"), "JAX_PLATFORMS=cpu"),
}


@pytest.mark.parametrize("name", NO_GPU)
def test_run_that_needs_gpus_is_refused_without_one(host, tmp_path, name):
    properties, reason = NO_GPU[name]
    host(**properties, SLURMD_NODENAME="n7")
    run = resolve("llama2_70b", gpus=64, output_dir=str(tmp_path))
    with pytest.raises(UserError) as error:
        runtime.set_environment(run)
    message = str(error.value)
    assert message.startswith("no GPU on n7: ")
    for part in (reason, "a run on 64 devices, fsdp 64", "needs GPUs: --cpu_devices N"):
        assert part in message
    assert len(message) < 400
    assert "JAX_PLATFORMS" not in {*os.environ} - {*properties}


@pytest.mark.parametrize("name", NO_GPU)
def test_toy_run_uses_the_cpu_without_a_gpu(host, tmp_path, name):
    """Otherwise jax would load a CUDA plugin that cannot work."""
    host(**NO_GPU[name][0])
    runtime.set_environment(resolve("llama2_70b", "tiny", output_dir=str(tmp_path)))
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("env", [{}, {"JAX_PLATFORMS": "cuda,cpu"}, {"CUDA_VISIBLE_DEVICES": "3"}])
@pytest.mark.parametrize(
    "properties",
    [{}, {"driver_cuda": 12020, "wheels": 12}, {"driver_cuda": 13020, "wheels": 12}],
)
def test_platform_is_left_to_jax_on_a_host_with_gpus(host, tmp_path, properties, env):
    host(**properties, **env)
    assert runtime.why_no_gpu() == ""
    runtime.set_environment(resolve("llama2_70b", gpus=64, output_dir=str(tmp_path)))
    assert os.environ.get("JAX_PLATFORMS") == env.get("JAX_PLATFORMS")
    assert "XLA_FLAGS" not in os.environ


def test_mocked_gpus_do_not_shard_autotuning(host, tmp_path):
    host()
    runtime.set_environment(resolve("llama2_70b", gpus=64, mock_gpus=64, output_dir=str(tmp_path)))
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_shard_autotuning=false"


def test_run_is_refused_if_jax_finds_no_gpu_in_spite_of_a_driver(host):
    """As with another user's device files, or a broken plugin."""
    host()
    with pytest.raises(UserError, match="jax found none, see above; a Slurm job may lack --gres"):
        runtime.init_distributed(resolve("llama2_70b", gpus=64))
    runtime.init_distributed(resolve("llama2_70b", gpus=64, cpu_devices=64))
    runtime.init_distributed(resolve("llama2_70b", "tiny"))


@pytest.mark.parametrize("command", ["train", "preflight"])
def test_missing_gpu_is_reported_before_jax_is_imported(tmp_path, command):
    words = [sys.executable, "-X", "importtime", "-m", f"maxbench.{command}", "--gpus", "8"]
    words += ["--config", "configs/llama31_8b.py", "--output_dir", str(tmp_path)]
    done = subprocess.run(words, env=processes(), capture_output=True, text=True)
    assert done.returncode == 2
    assert f"maxbench {command}: error: no GPU on " in done.stderr
    assert "| jax\n" not in done.stderr


def test_compilation_cache_is_in_a_writable_folder(host, tmp_path, capsys):
    folder = lambda: os.environ.get("JAX_COMPILATION_CACHE_DIR")
    toy = resolve("llama2_70b", "tiny", output_dir=str(tmp_path))
    host()
    runtime.set_environment(toy)
    assert folder() == f"{tmp_path}/cache/jax"
    host(STAGE_PATH=str(tmp_path / "stage"))
    del os.environ["MAXBENCH_CACHE"]
    runtime.set_environment(toy)
    assert folder() == f"{tmp_path}/stage/cache/jax"
    assert os.path.isdir(folder())
    assert "JAX_ENABLE_COMPILATION_CACHE" not in os.environ
    assert not capsys.readouterr().err
    (tmp_path / "file").touch()
    host(MAXBENCH_CACHE=str(tmp_path / "file"))
    runtime.set_environment(toy)
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    error = capsys.readouterr().err
    assert f"no compilation cache in {tmp_path}/file/jax: Not a directory" in error


def test_several_processes_cache_in_a_folder_of_their_job_alone(host, tmp_path):
    """All of them must find a program, or none."""
    folder = lambda: os.environ.get("JAX_COMPILATION_CACHE_DIR")
    toy = resolve("llama2_70b", "tiny", output_dir=str(tmp_path))
    names = dict(zip(runtime.JAX_PROCESS_VARIABLES, ("node1:1", "2", "0"), strict=True))
    host(**names)
    runtime.set_environment(toy)
    assert folder() is None
    host(**names, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "job"))
    runtime.set_environment(toy)
    assert folder() == f"{tmp_path}/job"
    assert "JAX_ENABLE_COMPILATION_CACHE" not in os.environ


def test_process_uses_the_gpus_of_the_run_on_its_node(monkeypatch):
    """A run on 8 GPUs of 2 nodes takes 4 of each, whatever the GPU type has."""
    calls = []
    record = lambda *arguments, **_: calls.append(arguments) or mock.Mock()
    monkeypatch.setattr(rendezvous, "rendezvous", record)
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *arguments, **options: calls.append(options)
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x2)")
    monkeypatch.setenv("SLURM_PROCID", "1")
    runtime.init_distributed(resolve("llama31_8b", gpus=8))
    (address, _, member, *_, expected_hosts), options = calls
    assert (address, member.process, expected_hosts) == ("n1:61468", 1, ["n1", "n2"])
    assert options["local_device_ids"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"WORLD_SIZE": "8", "RANK": "3"}, "WORLD_SIZE=8 is torchrun's, whose processes do not"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "--processes 2 --process N, or set JAX_COORDINATOR_ADDRESS",
        ),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "--processes 2 --process 1, "),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES=2 is jax's"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_processes_of_another_launcher_do_not_run_alone(env, text, monkeypatch):
    """Each would be a run of one process, and all would succeed."""
    run = resolve("llama31_8b", presets="tiny")
    monkeypatch.setattr(os, "environ", env)
    with pytest.raises(UserError, match=re.escape(text)) as error:
        runtime.init_distributed(run)
    assert "malformed" not in str(error.value)


def test_one_process_of_another_launcher_runs(monkeypatch):
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1"})
    assert runtime.init_distributed(resolve("llama31_8b", presets="tiny")) is None


@pytest.mark.parametrize(
    ("platforms", "expected"), [("cuda,cpu", "cpu"), ("", "cpu"), (None, "cpu")]
)
def test_run_on_any_device_leaves_out_a_gpu_that_is_missing(host, tmp_path, platforms, expected):
    host(files=(), **({} if platforms is None else {"JAX_PLATFORMS": platforms}))
    runtime.set_environment(resolve("llama31_8b", "tiny", {"output.dir": str(tmp_path)}))
    assert os.environ["JAX_PLATFORMS"] == expected


@pytest.mark.parametrize("platforms", ["gpu", "cuda"])
def test_platform_without_its_device_is_refused_before_jax(host, tmp_path, platforms):
    host(files=(), JAX_PLATFORMS=platforms)
    with pytest.raises(
        UserError, match=f"JAX_PLATFORMS={platforms} asks for a GPU on .*; unset it"
    ):
        runtime.set_environment(resolve("llama31_8b", "tiny", {"output.dir": str(tmp_path)}))


NO_PLATFORM = "jax has no such device on .*; unset it, or JAX_PLATFORMS=cpu"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("JAX_PLATFORMS", "rocm", NO_PLATFORM),
        ("JAX_PLATFORMS", "CPU", NO_PLATFORM),
        ("JAX_ENABLE_X64", "maybe", "jax takes no such value; unset it"),
        ("JAX_NUM_CPU_DEVICES", "two", "jax takes no such value; unset it"),
    ],
)
def test_variable_that_jax_refuses_is_named_in_one_line(tmp_path, name, value, message):
    command = [sys.executable, "-m", "maxbench", "train", "--config", "llama31_8b:tiny"]
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path)],
        env=os.environ | {name: value}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    error = done.stderr.splitlines()[-1]
    assert re.fullmatch(f"maxbench train: error: {name}={value}: {message}", error)


@pytest.mark.parametrize(
    ("processes", "process", "text"),
    [
        ("two", "0", "are malformed: ValueError"),
        ("2", "2", "JAX_PROCESS_ID=2 must be below JAX_NUM_PROCESSES=2"),
        ("-2", "0", "JAX_PROCESS_ID=0 must be below JAX_NUM_PROCESSES=-2"),
    ],
)
def test_malformed_number_of_processes_is_refused(host, tmp_path, processes, process, text):
    names = zip(runtime.JAX_PROCESS_VARIABLES, ("node1:1", processes, process), strict=True)
    host(**dict(names))
    with pytest.raises(UserError, match=text):
        runtime.set_environment(resolve("llama31_8b", "tiny", {"output.dir": str(tmp_path)}))


def test_empty_variables_of_processes_are_no_variables(host, tmp_path):
    host(**dict.fromkeys(runtime.JAX_PROCESS_VARIABLES, ""))
    runtime.set_environment(resolve("llama31_8b", "tiny", {"output.dir": str(tmp_path)}))
    assert "JAX_COMPILATION_CACHE_DIR" in os.environ
