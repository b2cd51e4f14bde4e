"""Plans of MaxText: the installed one; where there is none, a stand-in with its module, functions
and flags, so that what maxbench replaces is tested."""

import importlib.util
import json
import pathlib
import sys

import pytest

from maxbench.cli import entry
from maxbench.config.errors import UserError
from maxbench.planning import maxtext

pytestmark = [
    pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.with mesh.*:DeprecationWarning"),
    pytest.mark.gpu_compile,
    pytest.mark.xdist_group("programs"),
]
INSTALLED = importlib.util.find_spec("maxtext") is not None
STAND_IN = """
import types
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec as P

def read(argv):
    values = dict(word.split("=", 1) for word in argv[2:])
    assert values["hardware"] == "gpu" and values["dataset_type"] == "synthetic", argv
    ici, dcn = int(values["ici_fsdp_parallelism"]), int(values["dcn_fsdp_parallelism"])
    return types.SimpleNamespace(
        ici=(ici,), dcn=(dcn,), mesh_axes=("fsdp",),
        compile_xla_flags=values.get("compile_xla_flags", ""),
        devices=int(values["internal_compile_num_devices"]),
        slices=int(values["compile_topology_num_slices"]))

class maxtext_utils:
    def create_device_mesh(config, devices):
        assert (len(devices), config.slices) == (config.devices, config.dcn[0])
        return mesh_utils.create_hybrid_device_mesh(config.ici, config.dcn, devices)

class max_utils:
    def parse_libtpu_flags_to_dict(flags):
        pairs = (word.removeprefix("--").split("=") for word in flags.split())
        return {name: value == "true" for name, value in pairs}
    def print_system_information():
        raise RuntimeError("looks for present devices")

def get_topology_mesh(config):
    raise RuntimeError("needs present GPUs")

def jit_and_compile(func, args, kwargs, mesh, in_s, out_s, static, donate, config, rules):
    raise RuntimeError("compiles for present GPUs")

class rules:
    def __enter__(self): pass
    def __exit__(self, *_): pass

def main(argv):
    config = read(argv)
    mesh = get_topology_mesh(config)
    max_utils.print_system_information()
    sharding = NamedSharding(mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=sharding)
    step = lambda x, times: x @ x.T * times
    print("Jitting and compiling train step...")
    jit_and_compile(step, (x, 2), {}, mesh, (sharding,), sharding, (1,), (), config, rules())
    raise AssertionError("it goes on")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A stand-in for MaxText's train_compile, where MaxText is not installed."""
    if INSTALLED:
        pytest.skip("MaxText is installed: the stand-in is not needed")
    package = tmp_path / "maxtext"
    (package / "trainers/pre_train").mkdir(parents=True)
    (package / "configs").mkdir()
    (package / "configs/base.yml").touch()
    (package / "trainers/pre_train/train_compile.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {*sys.modules}
    yield package
    for name in {*sys.modules} - before:
        if name.startswith("maxtext"):
            del sys.modules[name]


def plan(flags: str, gpus: int, capsys) -> tuple[int, str, str]:
    words = ["--maxtext", flags, "--gpu_type", "h100", "--gpus", str(gpus), "--json"]
    code = entry.run("plan", words)
    return code, *capsys.readouterr()


def test_its_step_is_planned_on_absent_gpus(module, capsys):
    flags = "model_name=x ici_fsdp_parallelism=8 dcn_fsdp_parallelism=2"
    flags += " compile_xla_flags=--xla_gpu_enable_triton_gemm=false"
    code, out, err = plan(flags, 16, capsys)
    assert code == 0, err
    found = json.loads(out)  # what MaxText prints is not in it
    assert "Jitting and compiling" in err
    assert found["axes"] == {"fsdp": 16}
    assert found["communication"][0]["link"] == "network"
    assert found["parts_s"]["gemm"] > 0
    assert "maxtext" not in str(found.get("failures"))


def test_its_functions_are_restored(module, capsys):
    plan("model_name=x ici_fsdp_parallelism=8 dcn_fsdp_parallelism=1", 8, capsys)
    train_compile = sys.modules["maxtext.trainers.pre_train.train_compile"]
    for name in ("get_topology_mesh", "jit_and_compile"):
        with pytest.raises(RuntimeError, match="present GPUs"):
            getattr(train_compile, name)(*[None] * (1 if name == "get_topology_mesh" else 10))


def test_an_unknown_flag_is_one_line(module, capsys):
    code, _, err = plan("model_name=x", 8, capsys)
    assert code == 2
    assert err.splitlines()[-1].startswith("maxbench plan: error: maxtext with 8 devices")


@pytest.mark.skipif(INSTALLED, reason="MaxText is installed")
def test_without_maxtext_the_error_says_how_to_install_it(capsys):
    code, _, err = plan("model_name=x", 8, capsys)
    assert code == 2
    assert "MaxText is not installed in this environment: install it from" in err


@pytest.mark.skipif(not INSTALLED, reason="MaxText is not installed")
def test_the_installed_maxtext_is_planned(capsys):
    flags = "model_name=llama2-7b ici_fsdp_parallelism=8 base_num_decoder_layers=2"
    code, out, _ = plan(f"{flags} override_model_config=true max_target_length=1024", 8, capsys)
    assert code == 0
    assert json.loads(out)["parts_s"]["gemm"] > 0


def test_nothing_of_maxtext_is_a_dependency():
    assert "maxtext" not in pathlib.Path("pyproject.toml").read_text().lower()
    with pytest.raises(UserError, match="No closing quotation"):
        maxtext.words_of("model_name='x")
