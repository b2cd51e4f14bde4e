"""GPU types from a user's file: added, taken everywhere, and refused by file and key."""

import json

import pytest

from maxbench.config import command_line
from maxbench.config.run import AXES
from maxbench.cost_model import compile_cache
from maxbench.cost_model.costs import Costs
from maxbench.hardware import gpus
from maxbench.metrics.step_stats import Devices
from maxbench.step import xla_options
from tests.config.test_config import command

LLAMA = ["--config", "configs/llama2_70b.py", "--gpus", "64"]
MINE = """
[h300]
like = "h100"
bf16_tflops = 2000
xla_options = { xla_gpu_enable_command_buffer = "FUSION" }
[h300.chip]
name = "NVIDIA H300"
cores = 144
"""


@pytest.fixture(autouse=True)
def registry():
    before = dict(gpus.GPUS)
    yield
    gpus.GPUS.clear()
    gpus.GPUS.update(before)


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return path


def test_a_type_of_ones_own_is_one_record_everywhere(mine):
    flags = [*LLAMA, "--hardware", str(mine), "--gpu_type", "h300"]
    code, out, _ = command(*flags, "--json")
    assert code == 0
    assert json.loads(out)["config"]["layout"]["gpu_type"] == "h300"
    ours, theirs = command_line.run_of(flags), command_line.run_of(LLAMA)
    assert ours.layout.fsdp == 64  # h100's row
    assert ours.layout.gpu.efficiency == theirs.layout.gpu.efficiency
    assert ours.layout.gpu.chip.capability == (9, 0)
    assert compile_cache.key(ours) != compile_cache.key(theirs)
    options = xla_options.xla_options("gpu", ours)
    assert options["xla_gpu_enable_command_buffer"] == "FUSION"
    gemm = lambda name: Costs(name, dict.fromkeys(AXES, 1)).gemm(8192, 8192, 8192)
    assert gemm("h300") == pytest.approx(gemm("h100") * 989 / 2000, rel=0.1)
    assert Devices("gpu", "NVIDIA H300", 8).gpu_type == "h300"
    assert gpus.gpu_type_of("runs/h300/log.out") == "h300"


def test_a_type_that_is_there_is_replaced(tmp_path):
    path, usual = tmp_path / "mine.toml", command_line.run_of(LLAMA)
    program, reach = compile_cache.key(usual), usual.layout.gpu.efficiency.memory
    path.write_text('[h100]\nlike = "h100"\n[h100.efficiency]\nmemory = 0.5\n')
    run = command_line.run_of([*LLAMA, "--hardware", str(path)])
    assert run == usual
    assert (reach, run.layout.gpu.efficiency.memory) == (0.88, 0.5)
    assert compile_cache.key(run) == program  # what a GPU reaches of its memory changes no program
    path.write_text('[h100]\nlike = "h100"\n[h100.chip]\nl2_bytes = 1\n')
    assert compile_cache.key(command_line.run_of([*LLAMA, "--hardware", str(path)])) != program


LIKE = '[h300]\nlike = "h100"\n'
BAD = {
    "no TOML": ("h300\n= 1", ["mine.toml", "line 1"]),
    "no table": ("h300 = 1", ["'h300' must be a table"]),
    "name": ('["H 300"]', ["'H 300' must be a table named in small letters"]),
    "like": ('[h300]\nlike = "h10"', ["[h300] like='h10' is not one of h100, h200"]),
    "key": (LIKE + "memry_gb = 3", ["[h300] no key memry_gb; did you mean memory_gb?"]),
    "far key": (LIKE + "x = 3", ["no key x; there are bf16_tflops"]),
    "key of a part": (LIKE + "[h300.chip]\ncore = 3", ["no key chip.core; did you mean cores?"]),
    "part": (LIKE + "chip = 3", ["chip=3 must be a table"]),
    "missing": ("[h300]\nbf16_tflops = 3", ["chip.name is missing; give it, or like ="]),
    "missing figure": ("[h300]\n[h300.chip]", ["chip.name is missing"]),
    "type": (LIKE + 'bf16_tflops = "3"', ["bf16_tflops='3' must be a number above 0"]),
    "bool": (LIKE + "bf16_tflops = true", ["bf16_tflops=True must be a number above 0"]),
    "whole": (LIKE + "gpus_per_node = 8.5", ["gpus_per_node=8.5 must be a whole number"]),
    "text": (LIKE + "recipes = 3", ["recipes=3 must be text"]),
    "texts": (LIKE + "environment = { A = 1 }", ["environment={'A': 1} must be a table of texts"]),
    "pair": (LIKE + "[h300.chip]\ncapability = 9", ["chip.capability=9 must be as [9, 0]"]),
    "row": (
        LIKE + 'products = [["bf16", "nn", 1, 1, 1, 1, 1.0], ["bf16", 1]]',
        ['[h300] products=[\'bf16\', 1] must be as ["bf16", "nt", 4096, 4096, 4096, 1, 1.05]'],
    ),
    "size": (LIKE + 'kernels = [["plain", 0, 1.0]]', ["kernels=['plain', 0, 1.0] must be as"]),
    "negative": (LIKE + "network_gbps = -50", ["network_gbps=-50 must be a number above 0"]),
    "nan": (LIKE + "network_gbps = nan", ["network_gbps=nan must be a number above 0"]),
    "fraction": (
        LIKE + "[h300.efficiency]\nmemory = 1.2",
        ["efficiency.memory=1.2", "and up to 1"],
    ),
    "latency": (
        LIKE + "[h300.efficiency]\nhost_sync_us = -1",
        ["efficiency.host_sync_us=-1", "from 0"],
    ),
    "domain": (LIKE + "nvlink_gpus = 12", ["nvlink_gpus=12 is not a whole number of nodes", "=8"]),
    "memory": (LIKE + "memory_gb = 160", ["memory_gb=160 and chip.memory_bytes=84942979072"]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_answered_in_one_line(name, tmp_path):
    text, expected = BAD[name]
    path = tmp_path / "mine.toml"
    path.write_text(text)
    code, out, err = command(*LLAMA, "--hardware", str(path), "--gpu_type", "h300", "--json")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert f"hardware='{path}'" in err
    for words in expected:
        assert words in err


def test_a_file_that_is_not_there(tmp_path):
    code, _, err = command(*LLAMA, "--hardware", str(tmp_path / "absent.toml"))
    assert code == 2
    assert "absent.toml' cannot be read: No such file" in err
