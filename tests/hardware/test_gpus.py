"""GPU types of a user's file (--hardware): where they apply, and how bad entries are refused."""

import json
import pathlib

import pytest

from maxbench.config import command_line, gpu_files, number_formats
from maxbench.config.errors import UserError
from maxbench.config.resolve import resolve
from maxbench.config.run import AXES, RunConfig
from maxbench.cost_model import absent_gpus, compile_cache
from maxbench.cost_model.costs import Costs
from maxbench.hardware import gpus
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.hardware.networks import networks
from maxbench.reporting import compare
from maxbench.run_logs.record import Origin, RunRecord
from maxbench.step import xla_options
from tests.conftest import train_command

LLAMA = ["--config", "configs/llama2_70b.py", "--gpus", "64"]
H300 = """
[h300]
like = "h100"
bf16_tflops = 2000
xla_options = { xla_gpu_enable_command_buffer = "FUSION" }
[h300.chip]
name = "NVIDIA H300"
cores = 144
"""


@pytest.fixture
def hardware_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(H300)
    return path


def test_new_type_is_used_by_recipe_compiler_and_cost_model(hardware_file):
    flags = [*LLAMA, "--hardware", str(hardware_file), "--gpu_type", "h300"]
    code, out, _ = train_command(*flags, "--json")
    assert code == 0
    config = json.loads(out)["config"]
    assert config["layout"]["gpu_type"] == "h300"
    h300, h100 = command_line.run_of(flags), command_line.run_of(LLAMA)
    assert h300.layout.fsdp == 64  # h100's row
    assert h300.gpu.efficiency == h100.gpu.efficiency
    assert h300.gpu.chip.capability == (9, 0)
    assert compile_cache.key(h300) != compile_cache.key(h100)
    options = xla_options.xla_options("gpu", h300)
    assert options["xla_gpu_enable_command_buffer"] == "FUSION"
    gemm = lambda run: Costs(run.gpu, dict.fromkeys(AXES, 1)).gemm(8192, 8192, 8192)
    assert gemm(h300) == pytest.approx(gemm(h100) * 989 / 2000, rel=0.1)
    assert h300.hardware.type_of("NVIDIA H300") == "h300"
    assert h300.hardware.type_of("runs/h300/log.out") == "h300"
    asked = RunConfig.from_dict(config)
    assert resolve(asked, h300.hardware) == h300
    with pytest.raises(UserError, match="gpu_type='h300' is not one of"):
        resolve(asked, GPU_TYPES)


def test_known_type_is_replaced_in_that_run_alone(tmp_path):
    path, h100 = tmp_path / "mine.toml", command_line.run_of(LLAMA)
    program = compile_cache.key(h100)
    path.write_text('[h100]\nlike = "h100"\n[h100.efficiency]\nmemory = 0.5\n')
    run = command_line.run_of([*LLAMA, "--hardware", str(path)])
    assert (h100.gpu.efficiency.memory, run.gpu.efficiency.memory) == (0.88, 0.5)
    assert run != h100  # plans of the two differ
    assert run.asdict() == h100.asdict()
    assert compile_cache.key(run) == program  # efficiency is no part of the compiler's target
    path.write_text('[h100]\nlike = "h100"\n[h100.chip]\nl2_bytes = 1\n')
    assert compile_cache.key(command_line.run_of([*LLAMA, "--hardware", str(path)])) != program


def test_report_uses_the_types_of_its_hardware_file(hardware_file):
    steps = dict.fromkeys(range(50), 10.0)
    record = RunRecord(
        path=hardware_file, name="log-h300.out", source="nemo", status="done", total_steps=50,
        step_s=steps,
    )  # fmt: skip
    settings = {"dtype": "bf16", "gpu_type": "h300", "gpus": 8, "gbs": 128, "seq": 8192}
    record.learn(Origin.LOG, model="llama31", size="8b", **settings)
    assert compare.summarize(record, compare.ReportOptions()).mfu is None
    options = compare.ReportOptions(gpu_types=gpu_files.read(hardware_file))
    summary = compare.summarize(record, options)
    assert summary.mfu["full"] == pytest.approx(summary.tflops["mean"] / 2000)
    assert summary.why == "nothing published for llama31 8b bf16 on h300"


def test_gpu_types_are_immutable_and_hashable():
    slower = gpu_files.override(GPU_TYPES, "h100", {"network_gbytes_per_s": 25})
    assert (slower["h100"].network_gbytes_per_s, GPU_TYPES["h100"].network_gbytes_per_s) == (25, 50)
    assert (
        len({GPU_TYPES, slower, gpu_files.override(slower, "h100", {"network_gbytes_per_s": 50})})
        == 2
    )
    with pytest.raises(TypeError):
        GPU_TYPES["h100"] = slower["h100"]
    with pytest.raises(TypeError):
        GPU_TYPES["h100"].environment["A"] = "1"


@pytest.mark.parametrize(
    ("text", "gpu_type"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),  # the driver's names
        ("NVIDIA H100 PCIe", "h100pcie"),
        ("NVIDIA H100 NVL", "h100nvl"),
        ("NVIDIA H100", ""),  # a part with 94 GB
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200nvl"),
        ("NVIDIA H20-3e", "h20gb141"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 144G HBM3e", "gh200gb144"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100gb40"),
        ("NVIDIA A100-SXM-64GB", ""),
        ("NVIDIA A100-PCIE-40GB", "a100pciegb40"),
        ("NVIDIA A100 80GB PCIe", "a100pcie"),
        ("A100-SXM4-40GB MIG 1g.5gb", ""),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA-H100-80GB-HBM3", "h100"),  # labels of nodes
        ("NVIDIA-H100-80GB-HBM3-SHARED", ""),
        ("nvidia-h100-80gb", "h100"),
        ("nvidia-tesla-a100", "a100gb40"),
        ("nvidia_h100_pcie", "h100pcie"),  # Slurm's gres
        ("h100", "h100"),
        ("a100_1g.5gb", ""),
        ("a100_40gb", ""),  # a card or an SXM part
        ("runs/h100_64/log.out", "h100"),  # paths
        ("runs/h100x8/log.out", "h100"),
        ("runs/h100-pcie/log.out", "h100pcie"),
        ("runs/gb200/log.out", "gb200"),
    ],
)
def test_only_a_whole_device_name_is_of_a_type(text, gpu_type):
    assert GPU_TYPES.type_of(text) == gpu_type


def test_type_of_a_file_has_no_names_but_its_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[mine]\nlike = "h100"\n[other]\nlike = "h100"\nchip.name = "NVIDIA X1"\n')
    types = gpu_files.read(path)
    names = ("nvidia-h100-80gb", "NVIDIA X1", "NVIDIA H100 80GB HBM3", "runs/h100/log")
    assert [types.type_of(name) for name in names] == ["h100", "other", "mine", "h100"]


def test_network_of_a_file_sets_what_the_table_leaves_open(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[h300]\nlike = "h100"\nnetwork = "ib400rails"\nnetwork_gbytes_per_s = 40\n'
        "[h300.efficiency]\nnetwork_us = 9\n"
    )
    gpu, rails = gpu_files.read(path)["h300"], networks()["ib400rails"]
    assert (gpu.network_gbytes_per_s, gpu.efficiency.network_us) == (40, 9)
    assert gpu.efficiency.network == rails.efficiency
    assert (gpu.pod_gpus, gpu.oversubscription) == (rails.pod_gpus, rails.oversubscription)
    assert gpu.efficiency.memory == GPU_TYPES["h100"].efficiency.memory
    for name in networks():  # each is a valid GPU type
        assert gpu_files.override(GPU_TYPES, "a100", {"network": name})["a100"].network_gbytes_per_s


def test_links_between_pods_slow_down_what_crosses_them():
    def seconds(kind, axis, **figures):
        gpu = gpu_files.override(GPU_TYPES, "h100", figures)["h100"]
        costs = Costs(gpu, dict.fromkeys(AXES, 1) | {"dp": 2, "fsdp": 256})
        return costs.collective(kind, costs.axis_link(axis), 1 << 32, 1 << 32)

    pods = {"pod_gpus": 256, "oversubscription": 8}
    for kind in ("all-reduce", "all-to-all"):
        assert seconds(kind, "fsdp", **pods) == seconds(kind, "fsdp")  # inside a pod
        slower = seconds(kind, "dp", **pods) / seconds(kind, "dp")  # every message crosses
        assert slower == pytest.approx(8, rel=0.01)
    # A ring over many nodes of each pod crosses once per pod, an all-to-all with half its messages.
    smaller = pods | {"pod_gpus": 128}
    assert seconds("all-gather", "fsdp", **smaller) == seconds("all-gather", "fsdp")
    slower = seconds("all-to-all", "fsdp", **smaller) / seconds("all-to-all", "fsdp")
    assert slower == pytest.approx(8 * 0.5 / (1 - 1 / 32), rel=0.01)


def test_a_gpu_type_without_fp8_is_refused():
    assert number_formats.resolve_format("bf16", "auto", "a100").name == "bf16"
    for scaling in ("auto", "delayed"):
        with pytest.raises(UserError, match="dtype='fp8' and gpu_type='a100': only h100"):
            number_formats.resolve_format("fp8", scaling, "a100")


def test_compile_target_has_the_limits_of_the_chip():
    a100, h100 = (absent_gpus.target(GPU_TYPES[gpu].chip) for gpu in ("a100", "h100"))
    for text in ("major: 8", "NONE", "per_core: 167936", "optin: 166912", "active_links: 12"):
        assert text in a100
    for text in ("major: 9", "ACCELERATED_FEATURES", "optin: 232448", "fpus_per_core: 128"):
        assert text in h100


def test_built_in_types_are_valid():
    """They are read without checks."""
    path = pathlib.Path(gpus.__file__).with_name("gpus.toml")
    assert gpu_files.read(path, gpus.GpuTypes({})) == GPU_TYPES


LIKE = '[h300]\nlike = "h100"\n'
BAD_FILES = {
    "no TOML": ("h300\n= 1", ["mine.toml", "line 1"]),
    "no table": ("h300 = 1", ["'h300' must be a table"]),
    "name": ('["H 300"]', ["'H 300' must be a table named in small letters"]),
    "network": (LIKE + 'network = "ib40"', ["network='ib40' is not one of ib200, ib400"]),
    "pods": (
        LIKE + "oversubscription = 0.5",
        ["oversubscription=0.5 must be a finite number, at least 1"],
    ),
    "band": (LIKE + "band = [1.1, 0.9]", ["band=[1.1, 0.9] must be two numbers above 0"]),
    "like": ('[h300]\nlike = "h10"', ["[h300] like='h10' is not one of h100, h200"]),
    "key": (
        LIKE + "memry_gb = 3",
        ["[h300] a field='memry_gb' is not one of", "; did you mean 'memory_gb'?"],
    ),
    "far key": (LIKE + "x = 3", ["a field='x' is not one of bf16_tflops, "]),
    "key of a part": (
        LIKE + "[h300.chip]\ncore = 3",
        ["chip: a field='core' is not one of name, ", "did you mean 'cores'?"],
    ),
    "part": (LIKE + "chip = 3", ["chip=3 must be a table"]),
    "missing": (
        "[h300]\nbf16_tflops = 3",
        ["chip has no name, capability, ", "; add them, or like ="],
    ),
    "missing figure": ("[h300]\n[h300.chip]", ["chip has no name, "]),
    "type": (LIKE + 'bf16_tflops = "fast"', ["bf16_tflops=fast must be a finite number, above 0"]),
    "bool": (LIKE + "bf16_tflops = true", ["bf16_tflops=True must be a finite number, above 0"]),
    "whole": (LIKE + "gpus_per_node = 8.5", ["gpus_per_node=8.5 must be a whole number"]),
    "text": (LIKE + "recipes = 3", ["recipes=3 must be text"]),
    "texts": (LIKE + "environment = { A = 1 }", ["environment={'A': 1} must be a table of texts"]),
    "pair": (LIKE + "[h300.chip]\ncapability = 9", ["chip.capability=9 must be as [9, 0]"]),
    "row": (
        LIKE + 'products = [["bf16", "nn", 1, 1, 1, 1, 1.0], ["bf16", 1]]',
        ['[h300] products=[\'bf16\', 1] must be as ["bf16", "nt", 4096, 4096, 4096, 1, 1.05]'],
    ),
    "size": (LIKE + 'kernels = [["plain", 0, 1.0]]', ["kernels=['plain', 0, 1.0] must be as"]),
    "negative": (
        LIKE + "network_gbytes_per_s = -50",
        ["network_gbytes_per_s=-50 must be a finite number, above 0"],
    ),
    "nan": (
        LIKE + "network_gbytes_per_s = nan",
        ["network_gbytes_per_s=nan must be a finite number, above 0"],
    ),
    "fraction": (
        LIKE + "[h300.efficiency]\nmemory = 1.2",
        ["efficiency.memory=1.2", "at most 1"],
    ),
    "latency": (
        LIKE + "[h300.efficiency]\nhost_sync_us = -1",
        ["efficiency.host_sync_us=-1", "at least 0"],
    ),
    "domain": (LIKE + "nvlink_gpus = 12", ["nvlink_gpus=12 is not a whole number of nodes", "=8"]),
    "memory": (LIKE + "memory_gb = 160", ["memory_gb=160 and chip.memory_bytes=84942979072"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_refused_in_one_line(name, tmp_path):
    text, expected = BAD_FILES[name]
    path = tmp_path / "mine.toml"
    path.write_text(text)
    code, out, err = train_command(*LLAMA, "--hardware", str(path), "--gpu_type", "h300", "--json")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert f"hardware='{path}'" in err
    for words in expected:
        assert words in err


def test_missing_file_is_refused(tmp_path):
    code, _, err = train_command(*LLAMA, "--hardware", str(tmp_path / "absent.toml"))
    assert code == 2
    assert "absent.toml' cannot be read: No such file" in err
