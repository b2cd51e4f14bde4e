"""Constants fitted to microbenchmarks of the local devices, and to finished runs."""

import dataclasses
import datetime
import json
import os
import pathlib
import re
import tomllib

import jax
import pytest

from maxbench.calibration import fit, from_device, from_runs, microbenchmarks
from maxbench.cli import calibrate, entry
from maxbench.config import gpu_files
from maxbench.config.errors import UserError
from maxbench.config.run import AXES
from maxbench.cost_model.compile_cache import Compiled
from maxbench.cost_model.costs import Costs
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.run_logs import readers
from tests.conftest import resolve
from tests.launch.test_launch import tool

pytestmark = pytest.mark.xdist_group("calibrate")  # one worker measures
SIZES = microbenchmarks.Sizes(
    gemms=((128, 128, 128, 1), (64, 64, 64, 2)),
    attention=(64, 2, 32),
    copies=(1 << 20,),
    kernels=(1 << 16,),
    messages=(1 << 10, 1 << 17),
    repeats=4,
    min_row_s=1e-3,
)
TRUE = dict(memory=0.7, launch_us=5.0, gemm_bf16=0.5, host_sync_us=60.0)
TRUE |= dict(nvlink=0.6, nvlink_us=30.0, network=0.5, network_us=90.0)


@pytest.fixture(scope="module")
def measured():
    """Measurements of two NVLink domains with two devices each."""
    collectives = {"all-gather": microbenchmarks.COLLECTIVES["all-gather"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(microbenchmarks, "COLLECTIVES", collectives)
        return [*microbenchmarks.all_microbenchmarks(SIZES, jax.devices()[:4], 2)]


def test_every_kind_is_measured(measured):
    kinds = {m.kind for m in measured}
    assert kinds - {"kernel"} == {kind for kinds in from_device.KINDS_OF.values() for kind in kinds}
    assert all(m.seconds > 0 for m in measured)
    links = [m for m in measured if m.kind == "network"]
    assert {(m.degrees["dp"], m.degrees["tp"]) for m in links} == {(2, 2)}


def test_fit_recovers_the_constants_of_simulated_times(measured):
    rates = dict(
        bf16_tflops=0.5, memory_gbytes_per_s=5, nvlink_gbytes_per_s=4, network_gbytes_per_s=0.5
    )
    slow = dataclasses.replace(GPU_TYPES["h100"], nvlink_gpus=2, gpus_per_node=2, **rates)
    true = dataclasses.replace(slow.efficiency, **TRUE)
    seconds = lambda m: from_device.observation(m, slow).predict(true)
    simulated = [dataclasses.replace(m, seconds=seconds(m)) for m in measured]
    result = from_device.fit_device(simulated, slow)
    assert {*TRUE} <= {*result.names}
    for name, value in TRUE.items():
        assert getattr(result.efficiency, name) == pytest.approx(value, rel=0.05), name
    observations = [o for some in result.observations.values() for o in some]
    assert fit.median_error(observations, result.efficiency) < 0.01


def test_unknown_device_becomes_a_gpu_type(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(microbenchmarks, "all_microbenchmarks", lambda *_: measured)
    text, table = calibrate.measure("abacus", small=True)
    assert "copy, 1 MiB" in table
    file = tmp_path / "mine.toml"
    file.write_text(text)
    new = from_device.new_gpu(measured, "cpu", 1, 1 << 30, 2)
    gpu_types = gpu_files.read(file)
    read = gpu_types["abacus"]
    assert gpu_types.type_of("cpu") == "abacus"  # as the driver reports it
    assert read.bf16_tflops == pytest.approx(new.bf16_tflops, rel=1e-3)
    assert 0.1 < read.efficiency.gemm_bf16 <= 1  # of the best measured rate
    products = [tuple(row[:6]) for row in read.products]
    assert {row for row in products if row[0] == "f32"} == {
        ("f32", layout, *sizes) for layout in ("nn", "nt", "tn") for sizes in SIZES.gemms
    }
    assert {row[0] for row in products} <= {
        "f32",
        "bf16",
    }  # bf16 in later jax
    assert [row[0] for row in read.kernels] == [*microbenchmarks.KERNELS]
    gemm = next(m for m in measured if m.name == "128 x 128 x 128 x 1 nt" and "f32" in m.kind)
    # The error is that of the program's other kernels.
    assert abs(from_device.observation(gemm, read).error(read.efficiency)) < 0.15
    source = f"measured {datetime.date.today()}, {jax.device_count()} x cpu, jax {jax.__version__}"
    values = [line for line in text.splitlines() if " = " in line]
    assert [line for line in values if source not in line] == ['like = "h100"']


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--write mine.txt", "must be a .toml file"),
        ("--gpu_type H100", "small letters and digits"),
        ("--cpu_devices many", "cpu_devices=many must be a whole number"),
        ("--tp 4", "--tp is a flag of maxbench train"),
        ("no_such_run", "no such file or folder: no_such_run"),
        ("experiments --small", "--small is for a measurement of the local devices"),
        ("experiments --cpu_devices 4", "--cpu_devices is for a measurement"),
    ],
)
def test_bad_input_is_refused(words, message, capsys):
    assert entry.run("calibrate", words.split()) == 2
    assert message in capsys.readouterr().err


def test_the_former_flag_of_plan_names_the_command(capsys):
    assert entry.run("plan", ["--calibrate", "experiments"]) == 2
    assert "maxbench calibrate RUN ... --write FILE" in capsys.readouterr().err


@pytest.fixture
def table():
    """Costs of an H100 with three measured GEMMs and two measured kernels, and without them."""
    products = (["bf16", "nn", 4096, 4096, 4096, 1, 1.5], ["bf16", "nn", 4096, 4096, 1024, 1, 3.0])
    products += (["bf16", "nt", 4096, 4096, 4096, 1, 2.0],)
    kernels = (["plain", 1 << 16, 4.0], ["plain", 1 << 24, 1.0])
    h100 = GPU_TYPES["h100"]
    measured = dataclasses.replace(h100, products=products, kernels=kernels)
    return [Costs(gpu, dict.fromkeys(AXES, 1)) for gpu in (measured, h100)]


def test_measured_ratios_are_interpolated(table):
    measured, model = table
    ratio = lambda *x: measured.gemm(*x) / model.gemm(*x)
    assert ratio(4096, 4096, 4096) == pytest.approx(1.5)
    assert ratio(4096, 4096, 4096, 1, "bf16", "nt") == pytest.approx(2.0)
    assert 1.5 < ratio(4096, 4096, 3000) < 2.25 < ratio(4096, 4096, 1400) < 3.0
    assert ratio(4096, 4096, 4096, 1, "f8e4m3fn", "nt") == 1.0
    assert measured.kernel(1 << 20, "plain") / measured.memory(1 << 20) == pytest.approx(2.0)
    assert measured.kernel(1 << 20, "transposed") == measured.memory(1 << 20)


def test_clocks_under_load(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool(tmp_path, "nvidia-smi", "echo '[N/A], [N/A]'")
    assert calibrate.under_load(calibrate.power_and_clocks()) == ""
    tool(tmp_path, "nvidia-smi", "echo '120.55, 1980'; echo '690.10, 1740'")
    monkeypatch.setattr(microbenchmarks, "WARMUP_S", 0.0)
    load = microbenchmarks.sample_under_load(SIZES, calibrate.power_and_clocks)
    assert calibrate.under_load(load) == "1740 MHz and 690 W under its longest GEMM"


# Runs.


def program(wide: int, numbers: int) -> str:
    """HLO of a step with a GEMM and a memory-bound kernel."""
    return (
        "HloModule m, is_scheduled=true\n\nENTRY %main (x: f32[]) -> f32[] {\n"
        f"  %a = bf16[{wide},{wide}]{{1,0}} parameter(0)\n"
        f"  %b = bf16[{numbers}]{{0}} parameter(1)\n"
        f"  %d = bf16[{wide},{wide}]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}\n"
        f"  ROOT %c = bf16[{numbers}]{{0}} negate(%b)\n}}\n"
    )


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Writes result.json of runs with the step times that other constants predict."""
    texts = {2: program(8192, 1 << 20), 4: program(4096, 1 << 30), 8: program(8192, 1 << 29)}
    texts[16] = program(4096, 1 << 28)

    sizes = {f.name: 0 for f in dataclasses.fields(Compiled)}
    compiled = lambda run: (Compiled(**(sizes | {"text": texts[run.layout.dp]})), True)
    monkeypatch.setattr(from_runs.planner, "compile_program", compiled)
    true = dataclasses.replace(GPU_TYPES["h100"].efficiency, gemm_bf16=0.5, memory=0.7)

    def write(dp: int, **changed) -> str:
        run = resolve("llama31_8b", dp=dp, layers=1, seq=16, gbs=2 * dp)  # few FLOPs
        seconds = from_runs.observation(run, 1.0).predict(true)
        result = {"status": "done", "mocked": False, "device": {"gpu_type": "h100", "kind": "H100"}}
        result |= {"step_s": {"median": seconds}, "config": run.config.asdict()} | changed
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "result.json").write_text(json.dumps(result))
        return str(folder)

    return write


def test_runs_determine_the_constants_they_depend_on(ran, tmp_path, capsys):
    file = tmp_path / "fitted.toml"
    runs = [ran(dp) for dp in (2, 4, 8, 16, 2)]
    assert entry.run("calibrate", [*runs, "--write", str(file)]) == 0
    found = tomllib.loads(file.read_text())["h100"]["efficiency"]
    assert found == {"gemm_bf16": pytest.approx(0.5, rel=0.02), "memory": pytest.approx(0.7, 0.02)}
    shown = capsys.readouterr().out
    assert "5 runs of 4 programs on h100" in shown
    assert re.search(r"median error \d\d\.\d% -> 0\.\d%; of a program left out 0\.\d%", shown)


def test_two_programs_determine_one_constant(ran):
    result = from_runs.fit_runs([ran(2), ran(8)])
    assert len(result.names) == 1
    assert "4 programs settle" in from_runs.table(result)


def test_a_fit_that_does_not_generalize_writes_nothing(ran, tmp_path, capsys):
    """Two programs that ask for opposite constants."""
    file = tmp_path / "fitted.toml"
    seconds = [from_runs.finished_run(r, GPU_TYPES)[1] for r in readers.read([ran(2), ran(8)])]
    runs = [ran(2, step_s={"median": 3 * seconds[0]}), ran(8, step_s={"median": 0.9 * seconds[1]})]
    assert entry.run("calibrate", [*runs, "--write", str(file)]) == 0
    assert "nothing is written" in capsys.readouterr().out
    assert not file.exists()


def test_a_truncated_result_is_refused(ran):
    folder = ran(2)
    path = pathlib.Path(folder, "result.json")
    path.write_text(path.read_text()[:200])
    with pytest.raises(UserError, match=r"result\.json is damaged; leave the run out"):
        from_runs.fit_runs([folder, ran(4)])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "1 run of 1 program; 2 programs that differ .* settle one constant, 4 two"),
        ({"step_s": {"median": -1.0}}, r"step_s.median=-1.0 is no time; leave the run out"),
        ({"step_s": {"median": 0.0}}, "step_s.median=0.0 is no time"),
        ({"step_s": {"median": float("nan")}}, "step_s.median=nan is no time"),
        ({"step_s": {"median": 1e-6}}, r"is below \d\.\d+ s, its FLOPs at the peak of 2 h100"),
        ({"status": "failed"}, "is 'failed'; give runs that are 'done'"),
        ({"mocked": True}, "with its network mocked"),
        (
            {"device": {"gpu_type": None, "kind": "cpu"}},
            "on cpu, a plan would be for h100",
        ),
        ({"config": {"model": {}}}, "is of another version"),
    ],
)
def test_unusable_runs_are_refused(ran, changed, message):
    with pytest.raises(UserError, match=message):
        from_runs.fit_runs([ran(2, **changed)])
