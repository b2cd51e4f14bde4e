"""Verdict on a suite: one PASS or FAIL, in every format and as the exit code."""

import json
import os
import pathlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxbench.cli import entry
from maxbench.config.errors import UserError
from maxbench.reporting import suite
from maxbench.run_logs import suite_file
from tests.reporting.test_report import ours

PUBLISHED = 9.33  # seconds a step, Llama 3.1 8B in FP8 on 8 H100


def suite_list(place: pathlib.Path, *runs: tuple[pathlib.Path | None, dict]) -> pathlib.Path:
    """The list that maxbench launch --suite writes."""
    entries = []
    for folder, expect in runs:
        entries.append({"run": "pretrain_x", "expect": expect})
        if folder:
            entries[-1]["folder"] = str(folder.relative_to(place / "experiments"))
    file = place / "experiments" / "suite_try_1.json"
    file.write_text(json.dumps({"suite": "try", "runs": entries}))
    return file


def report_text(capsys, *words: str, code: int) -> str:
    assert entry.run("report", words) == code
    return capsys.readouterr().out


def test_suite_whose_runs_reach_the_expectations_passes_in_every_format(tmp_path, capsys):
    expected = {"published": 0.95, "loss": 2.0, "step_s": 9.5, "share": 0.95, "baseline_s": 9.3}
    ours(tmp_path, step_s=99.0, stamp=9)  # not of the suite
    file = suite_list(tmp_path, *((ours(tmp_path, step_s=9.4, stamp=i), expected) for i in (1, 2)))
    title = "Suite try: PASS, 2 of 2 runs reached what was expected"
    text = report_text(capsys, "--suite", str(file), code=0)
    assert text.splitlines()[-1] == title
    shares = "99.3% of published 9.33 s (25.02.01), 98.9% of the baseline of 9.3 s"
    assert text.count(f"{shares}, 9.4 s a step, loss 2\n") == 2
    assert "Success experiments: 2" in text
    for form in ("csv", "md", "html"):
        assert title in report_text(capsys, f"--suite={file}", f"--format={form}", code=0)
    verdict = json.loads(report_text(capsys, f"--suite={file}", "--format=json", code=0))["suite"]
    assert verdict["ok"]
    assert [one["verdict"] for one in verdict["runs"]] == ["PASS", "PASS"]


def loss_of(folder: pathlib.Path, value: str) -> pathlib.Path:
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace('"loss": 2.0', f'"loss": {value}'))
    return folder


@pytest.mark.parametrize(
    ("make", "expect", "why"),
    [
        (lambda p: ours(p, step_s=10.0), {"published": 0.95},
         "FAIL  pretrain_llama31_8b_fp8_gpus8_tp1_pp1_cp2_vp1_mbs1_gbs128_1: 93.3% of published "
         "9.33 s (25.02.01), 10 s a step, loss 2; expected at least 95% of published"),
        (lambda p: ours(p, gpus=16, gbs=256, stamp=3, step_s=10.0),
         {"share": 0.95, "baseline_s": 9.33, "baseline": "published for 8 GPUs in 25.02.01"},
         "93.3% of the baseline of 9.33 s (published for 8 GPUs in 25.02.01), 10 s a step, loss 2; "
         "expected at least 95% of the baseline of 9.33 s"),
        (lambda p: ours(p, step_s=9.4), {"step_s": 9.0}, "expected at most 9 s a step"),
        (lambda p: ours(p, step_s=9.4), {"loss": 1.9}, "loss 2; expected loss at most 1.9"),
        (lambda p: loss_of(ours(p), "NaN"), {"published": 0.1}, "loss is nan at step 0"),
        (lambda p: ours(p, status="died", reason="no memory"), {"loss": 3}, "no memory, step 49"),
        (lambda p: ours(p, gbs=64), {"published": 0.1}, "not comparable: GBS 64, published 128"),
        (lambda p: ours(p, steps=1), {"loss": 3}, "not all of its steps are in its log, step 0"),
        (lambda p: None, {"loss": 3}, "FAIL  pretrain_x: was not submitted"),
    ],
)  # fmt: skip
def test_suite_fails_if_one_run_misses_its_expectation(tmp_path, capsys, make, expect, why):
    good = ours(tmp_path, gpus=16, gbs=256, step_s=9.4)
    file = suite_list(tmp_path, (good, {"published": 0.95}), (make(tmp_path), expect))
    text = report_text(capsys, "--suite", str(file), code=1)
    assert why in text
    title = "Suite try: FAIL, 1 of 2 runs did not reach what was expected"
    assert text.splitlines()[-1] == title


def test_unfinished_runs_are_pending_and_a_requeued_job_counts_by_its_last_start(tmp_path, capsys):
    first, again = ours(tmp_path, stamp=1, steps=3), ours(tmp_path, stamp=5)
    for name, text in {"job_id": "7", "../.job_7": "1\n5\n"}.items():
        (first / name).write_text(text)
    waiting = first.with_name(f"{first.parent.name}_8")
    waiting.mkdir()
    running = ours(tmp_path, gpus=16, gbs=256, steps=3, status="running")
    expected = {"published": 0.95}
    file = suite_list(tmp_path, (first, expected), (waiting, expected), (running, expected))
    text = report_text(capsys, "--suite", str(file), code=1)
    assert f"PASS  {again.name}: " in text
    assert "-     pretrain_x: has not started" in text
    assert f"-     {running.name}: still running, step 2" in text
    assert text.splitlines()[-1] == "Suite try: FAIL, 2 of 3 runs have not ended"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["run", "folder", "expect", "loss", "published"]), inner, max_size=3
        )
    ),
    max_leaves=10,
)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(JSON, JSON)
def test_any_json_is_read_or_refused(tmp_path, name, runs):
    file = tmp_path / "s.json"
    file.write_text(json.dumps({"suite": name, "runs": runs}))
    message = ""
    try:
        suite.folders(suite_file.read(str(file))[1])
    except UserError as e:
        message = str(e)
    assert "is not a list of runs" in message or not suite.judge(str(file), []).ok


def test_invalid_lists_are_refused(tmp_path, capsys):
    def refused(*words: str) -> str:
        assert entry.run("report", words) == 2
        return capsys.readouterr().err

    assert "is not a file" in refused("--suite", str(tmp_path / "no.json"))
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refused("--suite", str(tmp_path / "pipe"))
    for text in ("", "[]", "{}", '{"suite": 1, "runs": [{}]}', '{"suite": "a", "runs": 5}',
                 '{"suite": "a", "runs": [{"run": "r", "expect": {"share": 1}}]}'):  # fmt: skip
        (tmp_path / "s.json").write_text(text)
        assert "is not a list of runs as maxbench launch" in refused(
            "--suite", f"{tmp_path}/s.json"
        )
    (tmp_path / "s.json").write_text('{"suite": "a", "runs": []}')
    assert "FAIL, 0 of 0 runs" in report_text(capsys, f"--suite={tmp_path}/s.json", code=1)
    assert "--suite names its runs: leave" in refused("--suite", f"{tmp_path}/s.json", "x")
