"""Profiled steps: windows of Nsight Systems and of XPlane."""

import json

import pytest

import maxbench as mb
from maxbench.config.errors import UserError
from maxbench.config.run import Profile
from maxbench.run import profile
from tests.drills import kills


def test_xplane_profile_of_chosen_steps_is_written(tmp_path):
    flags = [*kills.FLAGS, "--steps", "6", "--output_dir", str(tmp_path)]
    flags += ["--profile", "xplane", "--config.profile.start=2", "--config.profile.stop=4"]
    process = kills.start_process(flags, str(tmp_path / "printed"))
    process.join()
    assert process.exitcode == 0, (tmp_path / "printed").read_text()
    (file,) = tmp_path.rglob("*.xplane.pb")
    run_name = file.relative_to(tmp_path / "experiments").parts[1]
    assert "_xplane_" in run_name
    (result,) = tmp_path.rglob("result.json")
    assert json.loads(result.read_text())["steps_done"] == 6
    found = mb.trace(result.parent)
    (rank,) = found.ranks
    assert len(rank.accounts) == 2
    assert any(k.tflops and k.shape for k in found.kernels)  # by the program beside the trace
    assert found.plan is None
    assert any("the run was on cpu" in note for note in found.notes)


def test_nsys_without_cuda_is_refused(monkeypatch):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(profile.ctypes, "CDLL", absent)
    window = profile.Window(Profile(tool="nsys", start=0, stop=1), 0, None, str)
    with pytest.raises(UserError, match="profile=xplane does not"):
        window.before_step(0)


def test_profiler_range_covers_chosen_steps_on_chosen_ranks(monkeypatch):
    events = []
    monkeypatch.setattr(profile, "_call_cuda_profiler", events.append)
    for rank in (0, 1):
        window = profile.Window(Profile(tool="nsys", start=2, stop=4, ranks="1"), rank, None, str)
        for step in range(6):
            window.before_step(step)
            events.append(step)
        window.close()
    of_rank_0 = list(range(6))
    assert events == [*of_rank_0, 0, 1, "cudaProfilerStart", 2, 3, "cudaProfilerStop", 4, 5]
