"""The commands as functions, as docs/how-to/use_from_python.md shows them."""

import dataclasses
import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import types
from importlib import metadata

import nbformat
import numpy
import pytest

import maxbench
from maxbench import api
from maxbench.config import command_line, options
from maxbench.config.errors import UserError
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.metrics import records
from maxbench.planning import run_result
from maxbench.reporting import sweep as reporting_sweep
from maxbench.run import subprocess_run
from tests.conftest import KEPT_FIGURES_JAX, processes, resolve
from tools import log_samples
from tools import notebook as notebook_file


@pytest.mark.exhaustive
def test_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    page = pathlib.Path("docs/how-to/use_from_python.md").read_text()
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path.cwd()))
    for name, value in processes().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    out = capsys.readouterr().out
    run, report = names["run"], names["report"]
    assert (run.code, len(run.records()), names["verdicts"]) == (0, 8, ["-"])
    assert run.result["config"]["optim"]["lr"] == 1e-3
    assert out.count("completed step: ") == 8  # of the run; the sweep prints a line each
    assert "train_step_timing" not in out
    assert str(run).startswith("measured\n")
    assert str(run) not in out
    assert str(report) in out
    errors = [one["error"] for one in names["sweep"].records()]
    assert errors == ["", "train.steps=0 must be a whole number, at least 1"]
    assert 0 < names["sweep"].records()[0]["loss"] < run.records()[0]["loss"]
    assert str(names["sweep"]) in out
    for shown in (run, report):
        assert shown._repr_html_().count("<table>") in (1, 2)
        assert "8b-tiny" in shown._repr_html_() or "8B tiny" in shown._repr_html_()


@pytest.mark.exhaustive
def test_notebook_runs_with_the_stored_output(tmp_path, monkeypatch):
    """If not: python -m tools.notebook. On the slowest network 0.12.0.1's program, which
    starts some gathers late, takes 12 % longer."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path.cwd()))
    for name, value in processes().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    kept, run = nbformat.read(notebook_file.NOTEBOOK, as_version=4), notebook_file.run(tmp_path)
    # A plan that takes long prints its progress on stderr.
    outputs = lambda cell: (x for x in cell.get("outputs", []) if x.get("name") != "stderr")
    shape = lambda book: [[x.output_type for x in outputs(cell)] for cell in book.cells]
    assert shape(kept) == shape(run)
    plans = lambda book: [c for c in book.cells if "plan" in c.source and c.cell_type == "code"]
    texts = lambda book: " ".join(str(c.outputs) for c in plans(book))
    step_s = r"([\d.]+) s (?:a|per) step"
    predicted = lambda book: [float(s) for s in re.findall(step_s, texts(book))]
    assert len(predicted(kept)) == len(predicted(run)) > 2
    apart = 0.001 if KEPT_FIGURES_JAX else 0.15
    assert predicted(kept) == pytest.approx(predicted(run), rel=apart)


def test_import_is_light_and_functions_stay_functions():
    """The functions load the package at their first use, and stay functions whatever is imported,
    `python -m maxbench.plan`'s module included."""
    code = """
import sys; before = {*sys.modules}; import maxbench; new = {*sys.modules} - before
assert {n for n in new if n.startswith("maxbench")} == {"maxbench"}, new
assert {"plan", "train", "report", "sweep", "trace"} <= {*dir(maxbench)}
import maxbench.calibration.from_runs, maxbench.cli.plan, maxbench.cli.train, maxbench.cli.report
import maxbench.cli.calibrate, maxbench.planning.run_result, maxbench.reporting.build_report
import maxbench.run.subprocess_run, maxbench.plan, maxbench.train, maxbench.report, types
assert "jax" not in sys.modules
functions = [maxbench.plan, maxbench.train, maxbench.report, maxbench.sweep, maxbench.trace]
assert all(isinstance(f, types.FunctionType) for f in functions), functions
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OPTIONS = {
    "train": options.TrainOptions,
    "plan": options.PlanOptions,
    "report": options.ReportOptions,
    "trace": options.TraceOptions,
}
COMMAND_LINE_ONLY = {
    "train": {"dry_run", "json"},
    "plan": {"json", "schedule"},
    "report": {"format", "output", "diff"},
    "trace": {"json", "drawing"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_keywords_are_the_options_of_the_command(name):
    """With the types and defaults of their fields, and their help texts in the docstring."""
    function, fields = getattr(maxbench, name), dataclasses.fields(OPTIONS[name])
    parameters = inspect.signature(function).parameters
    types = {field.name: field.type for field in fields}
    assert {key: p.annotation for key, p in parameters.items()} == types
    flags = {*options.COMMANDS[name].flags()}
    assert {*parameters} - {"settings", "show", "paths"} == flags - COMMAND_LINE_ONLY[name]
    doc = inspect.getdoc(function)
    arguments = " ".join(doc.partition("Args:")[2].partition("Returns:")[0].split())
    for field in fields:
        assert f"{field.name}: {options.help_line(field)}." in arguments
    assert max(map(len, doc.splitlines())) <= 100


def test_keywords_of_a_sweep_are_those_of_plan_and_train():
    plan, train, sweep = (
        inspect.signature(f).parameters for f in (maxbench.plan, maxbench.train, maxbench.sweep)
    )
    assert {*sweep} == {*plan} | {*train} | {"kind", "layouts"}
    assert sweep["gpus"].annotation == int | None | list


@pytest.mark.exhaustive
def test_type_checkers_see_the_keywords(tmp_path):
    (tmp_path / "notebook.py").write_text(
        "import maxbench as mb\n"
        "mb.plan('llama31_8b', gpus=8, search=True).best.fits\n"
        "mb.plan('llama31_8b', gpus='8')\n"
        "mb.train('llama31_8b:tiny', stepz=8)\n"
        "mb.report(['a', 'b'], window=(1, 2)).rows\n"
        "mb.plan()\n"
        "try:\n"
        "    mb.__version__.encode()\n"
        "except mb.UserError as e:\n"
        "    e.arg\n"
    )
    words = ["-m", "mypy", "--no-error-summary", "--cache-dir", str(tmp_path / "cache")]
    words += ["--follow-imports=silent", "--config-file=pyproject.toml", "notebook.py"]
    environment = os.environ | {"MYPYPATH": str(pathlib.Path.cwd())}
    shutil.copy("pyproject.toml", tmp_path)
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert re.findall(r"notebook.py:(\d+): error: .*\[([\w-]+)\]", done.stdout) == [
        ("3", "arg-type"),
        ("4", "call-arg"),
        ("6", "call-arg"),
        ("10", "attr-defined"),
    ], done.stdout + done.stderr


def test_the_package_has_its_version_and_its_types():
    """Type checkers read the types of an installed package where it has a py.typed."""
    assert maxbench.__version__ == metadata.version("maxbench")
    assert maxbench.UserError is UserError
    data = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in data["package-data"]["maxbench"]
    assert pathlib.Path("maxbench/py.typed").exists()


def test_options_are_the_run_that_the_command_line_describes():
    """Without words in between: text, numbers and values of settings of any type."""
    asked = options.TrainOptions(
        pathlib.Path("configs/llama31_8b.py"), gpus=numpy.int64(8), mbs=None, tp_overlap=False,
        output_dir=pathlib.Path("out"),
        settings={"train.remat": "full", "train.window": [1, 4], "optim.lr": numpy.float32(0.5)},
    )  # fmt: skip
    words = ["--config=configs/llama31_8b.py", "--gpus=8", "--notp_overlap", "--output_dir=out"]
    words += ["--config.train.remat=full", "--config.train.window=1,4", "--config.optim.lr=0.5"]
    assert command_line.resolve_run(asked) == command_line.run_of(words)
    overrides = {"train.remat": "full", "train.window": (1, 4), "runtime.tp_overlap": False}
    overrides |= {"optim.lr": 0.5, "output.dir": "out"}
    assert command_line.run_of(words) == resolve("llama31_8b", "", overrides, gpus=8)


def test_no_call_is_parsed_from_words(monkeypatch, tmp_path):
    """Nor by the process that trains, whose options and outcome are files."""
    monkeypatch.setattr(command_line, "read", None)
    asked = []
    monkeypatch.setattr(run_result, "plan_of", asked.append)
    maxbench.plan("llama31_8b", gpus=8, compiled=3)
    assert asked[0].changed() == {"config": "llama31_8b", "gpus": 8, "compiled": 3}
    log = tmp_path / "log-pretrain_llama31_8b_bf16_8.out"
    log.write_text(log_samples.nemo(range(50), 50))
    (row,) = maxbench.report(log, gpu_type="h100", window=(20, 30)).rows
    assert row.window == (20, 30)


WRONG = {
    "workload": (lambda: maxbench.train("llama31_8"), "closest first, there are llama31_8b"),
    "value": (lambda: maxbench.train("llama31_8b:tiny", steps=0), "train.steps=0"),
    "setting": (
        lambda: maxbench.train("llama31_8b:tiny", settings={"optim.lrr": 1}),
        "unknown setting 'optim.lrr'; did you mean optim.lr",
    ),
    "kind": (lambda: maxbench.sweep("plans", "llama31_8b"), "kind='plans' is not one of"),
    "flag of a sweep": (
        lambda: maxbench.sweep("plan", "llama31_8b", layouts=[{"fdsp": 8}]),
        "maxbench.plan has no keyword 'fdsp'",
    ),
    "flag of the other kind": (
        lambda: maxbench.sweep("plan", "llama31_8b", steps=[3, 4]),
        "maxbench.plan has no keyword 'steps'",
    ),
    "picture": (lambda: maxbench.plan("llama31_8b", gpus=8, scaling="x"), "must be a .svg file"),
    "path": (lambda: maxbench.report("nowhere"), "no such file or folder: nowhere"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_arguments_raise_the_message_of_the_command(name, monkeypatch):
    monkeypatch.setattr(subprocess_run.subprocess, "Popen", None)  # no process starts
    call, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        call()


def test_unknown_keywords_are_type_errors():
    with pytest.raises(TypeError, match="stepz"):
        maxbench.train("llama31_8b:tiny", stepz=3)


def test_run_that_does_not_start_raises_its_reason(monkeypatch, tmp_path):
    """Which the process writes to a file: what it prints does not matter."""
    code = "import json, sys; from maxbench.cli import train\n"
    code += "def fail(run): print('results: /tmp'); raise train.UserError('no GPU here')\n"
    code += "train.runtime.set_environment = fail\n"
    code += "train.from_files(train.pathlib.Path(sys.argv[1]))"
    popen = subprocess.Popen
    start = lambda words, **how: popen([sys.executable, "-c", code, words[-1]], **how)
    monkeypatch.setattr(subprocess_run.subprocess, "Popen", start)
    with pytest.raises(UserError, match=r"^no GPU here$"):
        maxbench.train("llama31_8b:tiny", show=False)
    start = lambda words, **how: popen([sys.executable, "-c", "print('x'); exit(9)"], **how)
    monkeypatch.setattr(subprocess_run.subprocess, "Popen", start)
    with pytest.raises(UserError, match="the training process ended with exit code 9"):
        maxbench.train("llama31_8b:tiny", show=False)


def test_cluster_options_hold_for_one_plan(monkeypatch):
    seen = []
    monkeypatch.setattr(
        run_result,
        "plan_of",
        lambda asked: seen.append(run_result.run_of(asked)[0].gpu.network_gbytes_per_s),
    )
    maxbench.plan("llama31_8b", gpus=8, network_gbytes_per_s=25)
    maxbench.plan("llama31_8b", gpus=8)
    assert seen == [25, GPU_TYPES["h100"].network_gbytes_per_s]


def test_sweep_calls_every_combination_and_keeps_errors(monkeypatch, capsys):
    """Lists vary independently, layouts together, and a failure is a row with its error."""
    calls = []

    def plan(config, settings, **flags):
        calls.append((config, flags, settings))
        if flags["gpus"] == 16:
            raise UserError("no recipe") if flags["tp"] == 1 else KeyError("tp")
        figures = {"step_s": 1.25, "mfu_full": None, "fits": True, "layout": "devices"}
        return types.SimpleNamespace(records=lambda: [figures])

    monkeypatch.setattr(api, "plan", plan)
    sweep = maxbench.sweep(
        "plan", ["a", "b<i>"], gpus=[8, 16], layouts=[{"tp": 1}, {"tp": 2, "mbs": 4}], dtype="fp8",
        settings={"train.remat": ["full"], "train.window": (1, 4)},
    )  # fmt: skip
    assert len(calls) == 8
    settings = {"train.remat": "full", "train.window": (1, 4)}
    assert calls[-1] == ("b<i>", {"gpus": 16, "tp": 2, "mbs": 4, "dtype": "fp8"}, settings)
    errors = [one["error"] for one in sweep.records()]
    assert errors == ["", "no recipe", "", "KeyError: 'tp'"] * 2
    assert sweep.records()[0]["layout"] == "devices"
    heads, *_, last = str(sweep).splitlines()
    assert heads.split() == ["config", "tp", "gpus", "mbs", "fits", "step_s", "error"]
    assert last.split() == ["b<i>", "2", "16", "4", "KeyError:", "'tp'"]
    assert "8 of 8: config=b<i> tp=2" in capsys.readouterr().out
    assert "b&lt;i&gt;" in sweep._repr_html_()


def test_values_of_a_sweep_are_lists_tuples_ranges_and_arrays(monkeypatch):
    """A tuple is one value where the setting is a tuple; an array has values of Python."""
    calls = []
    monkeypatch.setattr(api, "plan", lambda **point: calls.append(point))
    values = {
        "gpus": (8, 16), "layers": range(2, 4), "tp": numpy.array([1, 2]), "mbs": numpy.int64(4)
    }  # fmt: skip
    settings = {"optim.lr": numpy.float64(0.5), "train.window": (1, 4)}
    settings["train.collective_combine_bytes"] = [(1, 2, 3), (4, 5, 6)]
    maxbench.sweep("plan", ("a", "b"), settings=settings, show=False, **values)
    assert len(calls) == 2**5
    last = {"config": "b", "gpus": 16, "layers": 3, "tp": 2, "mbs": 4}
    settings = {"optim.lr": 0.5, "train.window": (1, 4)}
    settings["train.collective_combine_bytes"] = (4, 5, 6)
    assert calls[-1] == last | {"settings": settings}
    assert {type(calls[-1][name]) for name in values} == {int}


def test_tables_escape_and_frames_need_pandas(monkeypatch):
    assert "<b>" not in records.html_table(["<b>", ""], [["<b>", 1]])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="needs pandas: pip install pandas"):
        reporting_sweep.Sweep([{"a": 1}], [None], ["no"]).to_dataframe()
    pandas = types.SimpleNamespace(DataFrame=types.SimpleNamespace(from_records=list))
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    rows = reporting_sweep.Sweep([{"a": 1}], [None], ["no"]).to_dataframe()
    assert rows == [{"a": 1, "error": "no"}]
