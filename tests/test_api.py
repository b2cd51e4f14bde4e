"""The commands as functions, as docs/how-to/use_from_python.md shows them."""

import pathlib
import re
import subprocess
import sys
import types

import nbformat
import pytest

import maxbench
from benchmarks import notebook as notebook_file
from maxbench import sweep
from maxbench.config import command_line, python_api
from maxbench.config.errors import UserError
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.planning import result
from maxbench.run import subprocess_run
from tests.conftest import KEPT_FIGURES_JAX, processes, resolve


def test_the_lines_of_the_page_run(tmp_path, monkeypatch, capsys):
    page = pathlib.Path("docs/how-to/use_from_python.md").read_text()
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path.cwd()))
    for name, value in processes().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    said = capsys.readouterr().out
    run, report = names["run"], names["report"]
    assert (run.code, len(run.records()), names["verdicts"]) == (0, 8, ["-"])
    assert run.result["config"]["optim"]["lr"] == 1e-3
    assert said.count("completed step: ") == 8  # of the first alone
    assert "train_step_timing" not in said
    assert str(run).startswith("measured\n")
    assert str(run) not in said
    assert str(report) in said
    errors = [one["error"] for one in names["sweep"].records()]
    assert errors == ["", "train.steps=0 must be a whole number, at least 1"]
    assert names["sweep"].records()[0]["loss"] > 6
    assert str(names["sweep"]) in said
    for made in (run, report):
        assert made._repr_html_().count("<table>") in (1, 2)
        assert "8b-tiny" in made._repr_html_() or "8B tiny" in made._repr_html_()


def test_the_notebook_runs_and_keeps_what_it_printed(tmp_path, monkeypatch):
    """If not: python -m benchmarks.notebook. On the slowest network 0.12.0.1's program, which
    starts some gathers late, takes 12 % longer."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path.cwd()))
    for name, value in processes().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    kept, run = nbformat.read(notebook_file.NOTEBOOK, as_version=4), notebook_file.run(tmp_path)
    shape = lambda book: [[x.output_type for x in c.get("outputs", [])] for c in book.cells]
    assert shape(kept) == shape(run)
    plans = lambda book: [c for c in book.cells if "plan" in c.source and c.cell_type == "code"]
    texts = lambda book: " ".join(str(c.outputs) for c in plans(book))
    predicted = lambda book: [float(s) for s in re.findall(r"([\d.]+) s a step", texts(book))]
    assert len(predicted(kept)) == len(predicted(run)) > 2
    apart = 0.001 if KEPT_FIGURES_JAX else 0.15
    assert predicted(kept) == pytest.approx(predicted(run), rel=apart)


def test_importing_it_takes_no_time_and_rooms_stay_rooms():
    code = "import sys; before = {*sys.modules}; import maxbench; new = {*sys.modules} - before\n"
    code += "assert {n.partition('.')[0] for n in new} == {'maxbench'}, new; assert len(new) == 1\n"
    code += "from maxbench.planning import search; from maxbench import train, report\n"
    code += "assert callable(train.main) and callable(maxbench.planning) and callable(train)\n"
    code += "assert 'jax' not in sys.modules and maxbench.planning is sys.modules['maxbench.planning']\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="has no 'plans'; it has plan, report, sweep, train"):
        maxbench.__getattr__("plans")


def test_keywords_are_the_flags_of_the_command():
    given = {"config": "llama31_8b", "gpus": 8, "mbs": None, "tp_overlap": False}
    words = python_api.words(given, {"train.remat": "full", "train.window": (1, 4)})
    assert words[:3] == ["--config=llama31_8b", "--gpus=8", "--notp_overlap"]
    overrides = {"train.remat": "full", "train.window": (1, 4), "runtime.tp_overlap": False}
    assert command_line.run_of(words) == resolve("llama31_8b", "", overrides, gpus=8)


WRONG = {
    "workload": (lambda: maxbench.train("llama31_8"), "closest first, there are llama31_8b"),
    "flag": (lambda: maxbench.train("llama31_8b:tiny", stepz=3), "unknown flag 'stepz'"),
    "value": (lambda: maxbench.train("llama31_8b:tiny", steps=0), "train.steps=0"),
    "setting": (
        lambda: maxbench.train("llama31_8b:tiny", settings={"optim.lrr": 1}),
        "unknown flag 'config.optim.lrr'",
    ),
    "dry run": (lambda: maxbench.train("llama31_8b", dry_run=True), "is of the command line"),
    "plan": (lambda: maxbench.plan("llama31_8b", gpus=8, steps=3), "--steps is of train alone"),
    "kind": (lambda: maxbench.sweep("plans", "llama31_8b"), "kind='plans' is not one of"),
    "flag of a sweep": (
        lambda: maxbench.sweep("plan", "llama31_8b", layouts=[{"fdsp": 8}]),
        "unknown flag 'fdsp' of maxbench plan",
    ),
    "screen": (lambda: maxbench.plan("llama31_8b", json=True), "json is of the command line"),
    "path": (lambda: maxbench.report("nowhere"), "no such file or folder: nowhere"),
    "format": (lambda: maxbench.report("x", format="md"), r"\.text\(format\) is the same"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_said_as_the_command_says_it(name, monkeypatch):
    monkeypatch.setattr(subprocess_run.subprocess, "Popen", None)  # nothing is started
    call, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        call()


def test_a_run_that_did_not_start_raises_what_it_said(monkeypatch):
    script = "print('maxbench train: error: no GPU here'); raise SystemExit(2)"
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess_run.subprocess,
        "Popen",
        lambda _, **how: popen([sys.executable, "-c", script], **how),
    )
    with pytest.raises(UserError, match=r"^no GPU here$"):
        maxbench.train("llama31_8b:tiny")


def test_another_cluster_is_not_for_the_next_plan(monkeypatch):
    seen = []

    def ask(fv, argv):
        run, _ = result.given_run(fv, argv)
        seen.append(run.gpu.network_gbps)

    monkeypatch.setattr(result, "plan_from_flags", ask)
    maxbench.plan("llama31_8b", gpus=8, network_gbps=25)
    maxbench.plan("llama31_8b", gpus=8)
    assert seen == [25, GPU_TYPES["h100"].network_gbps]


def test_a_sweep_tries_every_choice_and_loses_none(monkeypatch, capsys):
    """Lists are choices, layouts go together, and what fails is a row with its error."""
    asked = []

    def plan(config, settings, **flags):
        asked.append((config, flags, settings))
        if flags["gpus"] == 16:
            raise UserError("no recipe") if flags["tp"] == 1 else KeyError("tp")
        found = {"step_s": 1.25, "mfu_full": None, "fits": True, "layout": "devices"}
        return types.SimpleNamespace(records=lambda: [found])

    monkeypatch.setitem(sweep.CALLS, "plan", plan)
    found = maxbench.sweep(
        "plan", ["a", "b<i>"], gpus=[8, 16], layouts=[{"tp": 1}, {"tp": 2, "mbs": 4}], dtype="fp8",
        settings={"train.remat": ["full"], "train.window": (1, 4)},
    )  # fmt: skip
    assert len(asked) == 8
    settings = {"train.remat": "full", "train.window": (1, 4)}
    assert asked[-1] == ("b<i>", {"gpus": 16, "tp": 2, "mbs": 4, "dtype": "fp8"}, settings)
    errors = [one["error"] for one in found.records()]
    assert errors == ["", "no recipe", "", "KeyError: 'tp'"] * 2
    assert found.records()[0]["layout"] == "devices"
    heads, *_, last = str(found).splitlines()
    assert heads.split() == ["config", "tp", "gpus", "mbs", "fits", "step_s", "error"]
    assert last.split() == ["b<i>", "2", "16", "4", "KeyError:", "'tp'"]
    assert "8 of 8: config=b<i> tp=2" in capsys.readouterr().out
    assert "b&lt;i&gt;" in found._repr_html_()


def test_tables_escape_and_frames_need_pandas(monkeypatch):
    assert "<b>" not in python_api.table(["<b>", ""], [["<b>", 1]])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="needs pandas: pip install pandas"):
        sweep.Sweep([{"a": 1}], [None], ["no"]).to_dataframe()
    made = types.SimpleNamespace(DataFrame=types.SimpleNamespace(from_records=list))
    monkeypatch.setitem(sys.modules, "pandas", made)
    rows = sweep.Sweep([{"a": 1}], [None], ["no"]).to_dataframe()
    assert rows == [{"a": 1, "error": "no"}]
