"""A run on a terminal, and the summary at its end."""

import io
import re
import sys

import pytest

from maxbench.metrics import step_stats
from maxbench.run import log_writer, terminal
from maxbench.run.process_stats import MemoryUse
from maxbench.run.result import Evaluation, RunResult
from maxbench.run_logs import folders
from tests.conftest import resolve

NAME = "pretrain_llama31_8b_bf16_gpus8_tp1_pp1_cp2_vp1_mbs1_gbs128"
H100 = step_stats.Devices("gpu", "NVIDIA H100 80GB HBM3", 8, "h100")
OUT = {"loss": 11.7634, "grad_norm": 1.5, "lr": 3e-7}


class Tty(io.StringIO):
    def isatty(self):
        return True


def show_run(
    monkeypatch, tmp_path, columns: int, devices=H100, times=(9.4, 9.4, 19.0)
) -> tuple[str, str]:
    """Shows a run; returns the terminal's text without colours, and the log."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", Tty())
    run = resolve("llama31_8b", gpus=8, steps=3, output_dir=str(tmp_path))
    screen = terminal.on_screen()
    folder = folders.run_folder(run, folders.make_folder(run))
    result = RunResult.of_run(run, devices, ["x"], processes=1)
    log = log_writer.Log(run, devices, 0, folder, result, screen)
    log.line("compiled in 4.0 s")
    log.phase("compile")
    log.phase("steps", 0, 3)
    for i, step_s in enumerate(times):
        log.step(i, step_s, OUT | {"loss": 11.7634 - i}, MemoryUse(60 << 30, 50 << 30))
    log.evaluation(Evaluation(2, 10.5, 1 << 20, 0.5, 30.0), reached=False)
    log.close("done")
    (file,) = tmp_path.rglob("log-*.out")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", sys.stdout.getvalue())
    return shown.replace("\r", "\n"), file.read_text()


@pytest.mark.parametrize("columns", [80, 160])
def test_terminal_has_a_line_per_step_and_the_log_has_two(monkeypatch, tmp_path, columns):
    screen, log = show_run(monkeypatch, tmp_path, columns)
    headers = ["step", "loss", "grad norm", "s/step", "tokens/s/GPU", "TFLOP/s", "MFU", "GiB"]
    headers += ["lr"] * (columns == 160)
    assert re.search("^ *" + " +".join(headers) + "$", screen, re.M)
    line = r"^ +2 +9\.7634 +1\.500 +19\.000 +6,899 +[\d.]+ +[\d.]+% +60\.0"
    assert re.search(line, screen, re.M)
    assert "completed step" not in screen
    assert "compiled in 4.0 s" in screen
    for text in ("completed step: 2, seconds: 19.000", "train_step_timing in s: 19.0"):
        assert text in log
    floor = "11.7618, the entropy of its data"  # ln 128,256
    for text in ("11.7634 at step 0, 9.7634 at step 2", floor, "MFU against the bf16 peak"):
        assert text in screen
        assert text in log
    assert screen.index("\nmeasured") < screen.index("\nhow it compares")
    summary = screen[screen.index("\nmeasured") : screen.index("results: ")]
    assert max(map(len, summary.splitlines())) <= columns
    assert {"start", "compile", "steps"} <= set(re.findall(r"\b(?:start|compile|steps)\b", screen))


def test_cpu_has_no_rates_per_gpu(monkeypatch, tmp_path):
    screen, log = show_run(monkeypatch, tmp_path, 80, step_stats.Devices("cpu", "cpu", 8, None))
    for text in ("TFLOP/s per GPU", "MFU", "days to", "  GiB", "/GPU"):
        assert text not in screen
        assert text not in log.partition("measured\n")[2]
    assert re.search(r"^ +1 +10\.7634 +1\.500 +9\.400 +111,551", screen, re.M)


def test_a_long_run_ends_with_a_chart_of_its_losses(monkeypatch, tmp_path):
    screen, log = show_run(monkeypatch, tmp_path, 80, times=[9.4] * 24)
    assert "evaluation after step 2: loss 10.5000, 1,048,576 tokens, 30.0 s since step 0" in log
    chart = screen[screen.index("\n   loss\n") : screen.index("o: held-out data")]
    assert (chart.count("o") - 1, chart.count(" step ")) == (1, 1)
    assert chart.count(".") - 3 >= 20  # of the numbers beside it
    assert max(map(len, chart.splitlines())) <= 80
    assert " |." not in log
    assert " |." not in show_run(monkeypatch, tmp_path / "short", 80)[0]


def test_no_screen_without_a_terminal(capsys):
    assert terminal.on_screen() is None


def test_summary_of_a_run_without_steps():
    result = {"device": vars(H100), "name": NAME, "status": "failed", "reason": "no room"}
    summary = terminal.summary(terminal.summary_parts(result))
    assert re.search(r"^status +failed no room$", summary, re.M)
    assert re.search(r"^published +no step was measured$", summary, re.M)


def test_long_names_are_broken_after_underscores():
    for width in (20, 33, 60):
        lines = terminal.folded(NAME, width)
        assert "".join(lines) == NAME
        assert max(map(len, lines)) <= width
        assert all(line.endswith("_") for line in lines[:-1])
    assert terminal.folded("two words", 6) == ["two", "words"]
    assert terminal.folded("x" * 9, 4) == ["xxxx", "xxxx", "x"]
