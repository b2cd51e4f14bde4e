"""Rates and constants from the kernels of profiles, whose truth is known."""

import json
import pathlib
import tomllib

import pytest

from maxbench.calibration import from_device, from_traces
from maxbench.cli import entry
from maxbench.config import gpu_files, options
from maxbench.config.errors import UserError
from maxbench.config.run import AXES
from maxbench.cost_model.costs import Costs
from maxbench.hardware.gpus import GPU_TYPES
from tests.traces import made

GEMM_MS, IMPLAUSIBLE_MS, COPY_MS = 0.1, 0.01, (0.8, 0.8, 0.88)
FLOPS = 2 * 8192 * 1024 * 4096


@pytest.fixture
def profile(tmp_path) -> pathlib.Path:
    """Eleven GEMMs, one of them faster than the peak, three copies of 1 GiB, one to the host, and
    two all-reduces, of which the second waits for another rank."""
    runs = [made.Run(i, i + GEMM_MS, "nvjet_tst", 7, i - 1) for i in range(10)]
    runs.append(made.Run(10, 10 + IMPLAUSIBLE_MS, "nvjet_tst", 7, 9))
    copies = [(11 + 2 * i, ms, "DtoD") for i, ms in enumerate(COPY_MS)] + [(17, 40, "DtoH")]
    runs += [made.Run(at, at + ms, f"Memcpy {way}", 7, at - 1, 1 << 30) for at, ms, way in copies]
    runs += [made.Run(60, 62, "ncclDevKernel_AllReduce", 20, 59)]
    runs += [made.Run(70, 79, "ncclDevKernel_AllReduce", 20, 69)]
    file = made.kineto(tmp_path / "a.json", runs)
    content = json.loads(file.read_text())
    noted = {
        "Collective name": "allreduce", "In msg nelems": 10**8, "Out msg nelems": 10**8,
        "Group size": 4, "dtype": "BFloat16", "Process Group Ranks": "[0, 1, 2, 3]",
    }  # fmt: skip
    kernels = (e for e in content["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy"))
    for i, event in enumerate(kernels):
        event["args"] |= noted if "nccl" in event["name"] else {"External id": i}
    content["traceEvents"] += [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5e12, "dur": 9,
         "args": {"External id": i, "Input Dims": [[8192, 4096], [4096, 1024]],
                  "Input type": ["c10::BFloat16"] * 2}}
        for i in range(11)
    ]  # fmt: skip
    file.write_text(json.dumps(content))
    return file


def rates(*paths, **kwargs) -> from_traces.TraceRates:
    asked = options.TraceOptions(paths=[str(path) for path in paths], **kwargs)
    return from_traces.rates_of(asked, GPU_TYPES)


def test_kernels_become_rates_with_their_spread(profile):
    result = rates(profile)
    found = {r.kind: r for r in result.rates}
    gemm, copy, reduced = (found[kind] for kind in ("gemm", "copy", "communication"))
    assert (result.gpu_type, gemm.runs, gemm.shape) == ("h100", 10, "bf16 8192x1024x4096")
    assert gemm.seconds == pytest.approx(GEMM_MS / 1e3)
    assert gemm.share == pytest.approx(FLOPS / 1e12 / (GEMM_MS / 1e3) / 989)
    planned = Costs(GPU_TYPES["h100"], {"": 1}).gemm(8192, 1024, 4096)
    assert gemm.planned_s == pytest.approx(planned)
    assert result.refused == {"faster than the peak": 1}
    assert (copy.runs, copy.seconds) == (3, pytest.approx(0.8e-3))
    assert copy.spread == pytest.approx(0.08)
    assert result.constants == {"memory": pytest.approx((2 << 30) / 0.8e-3 / 3350e9)}
    # The tenth percentile, between two runs.
    assert reduced.seconds == pytest.approx(2.7e-3)
    assert reduced.bytes == pytest.approx(2e8 * 2 * 3 / 4)


def test_a_plan_with_the_rates_has_the_measured_gemm(profile, tmp_path, capsys):
    file = tmp_path / "my.toml"
    assert entry.run("calibrate", ["--trace", str(profile), "--write", str(file)]) == 0
    assert "gemm: plan / measured " in capsys.readouterr().out
    written = tomllib.loads(file.read_text())["h100"]
    assert written["efficiency"]["memory"] == pytest.approx(0.8013, rel=1e-3)
    gpu = gpu_files.read(file)["h100"]
    assert Costs(gpu, {"": 1}).gemm(8192, 1024, 4096) == pytest.approx(GEMM_MS / 1e3, rel=0.01)


def test_profiles_of_several_runs_are_read_one_by_one(profile, tmp_path):
    other = tmp_path / "other" / "a.json"
    other.parent.mkdir()
    other.write_bytes(profile.read_bytes())
    gemm = next(r for r in rates(profile, other).rates if r.kind == "gemm")
    assert gemm.runs == 20


def test_what_gives_no_rates_is_refused(profile, tmp_path):
    bare = made.kineto(tmp_path / "bare.json", made.steps(2))
    with pytest.raises(UserError, match="no kernel of the profile has a shape: record PyTorch's"):
        rates(bare)
    unknown = tmp_path / "unknown.json"
    unknown.write_text(profile.read_text().replace(made.DEVICE, "NVIDIA Abacus"))
    with pytest.raises(UserError, match=r"\(NVIDIA Abacus\) are not of one known type"):
        rates(unknown)
    assert rates(unknown, gpu_type="h100").gpu_type == "h100"
    for words in (["--trace"], ["--trace", "--small", str(profile)]):
        assert entry.run("calibrate", words) == 2


def test_a_measured_gemm_above_the_peak_is_left_out():
    """XLA computes equal products once, and a repeated GEMM then takes no time."""
    text = """HloModule m, is_scheduled=true
ENTRY %e (a: f32[]) -> f32[] {
  %a = bf16[2048,2048]{1,0} parameter(0)
  %b = bf16[2048,2048]{1,0} parameter(1)
  ROOT %c = bf16[2048,2048]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""
    costs = Costs(GPU_TYPES["h100"], dict.fromkeys(AXES, 1))
    of = lambda us: from_device.gemm_row(
        from_device.Measurement("bf16 GEMM", "2048 nn", text, us / 1e6, {}), costs
    )
    assert of(30)
    assert of(10) is None  # 1,718 TFLOP/s
