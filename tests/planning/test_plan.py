"""Plans without a compiler: the choice of remat policy, published runs, bad input."""

import errno
import pathlib
import types

import pytest

from maxbench.cli import entry
from maxbench.cost_model import memory, remat
from maxbench.cost_model.memory import GIB, Memory
from maxbench.evidence import published
from maxbench.evidence.error_band import ErrorBand
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.planning import drawings, plan_text, planner, run_result
from maxbench.planning.planner import Plan
from tests.planning.plans import run_of

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
ROOT = pathlib.Path(__file__).parents[2]


def test_best_remat_recomputes_as_few_layers_as_memory_allows(monkeypatch):
    """Also where activations take more than the estimate."""
    run, tried = run_of("--config llama2_70b --gpus 128"), []

    def plan(run) -> Plan:
        tried.append(run)
        activations = int(1.3 * memory.activation_bytes(run))
        sizes = Memory(15 * GIB, 0, 0, activations, 0, capacity=75 * GIB)
        return Plan(run=run, compiled=None, memory=sizes, timeline=None, published=None)

    monkeypatch.setattr(planner, "plan", plan)
    best = planner.best_remat(run)
    assert best.fits
    assert len(tried) <= 6
    policy, layers = best.run.train.remat, best.run.train.remat_layers
    assert 5 < layers < 80
    assert not plan(remat.with_remat(run, policy, layers=layers - 5)).fits


def test_best_remat_where_nothing_fits_is_the_smallest_stash(monkeypatch):
    run = run_of("--config llama2_70b --gpus 128")

    def plan(run) -> Plan:
        sizes = Memory(90 * GIB, 0, 0, memory.activation_bytes(run), 0, capacity=75 * GIB)
        return Plan(run=run, compiled=None, memory=sizes, timeline=None, published=None)

    monkeypatch.setattr(planner, "plan", plan)
    best = planner.best_remat(run)
    assert not best.fits
    assert best.run.train.remat == "full"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--config configs/llama2_70b.py --gpus 100 --schedule", "nearest: --gpus"),
        ("--config configs/llama31_405b.py --gpus 4", "estimated to fit on 128 GPUs: --pp 16"),
        ("--config configs/llama31_405b.py --gpus 100", "estimated to fit on 112 GPUs: --pp"),
        ("--config configs/llama2_70b.py --gpus 128 --dtype fp4", "dtype='fp4' is not one of"),
        ("--config configs/llama2_70b.py --gpus 128 --gpu_type h300", "did you mean"),
        ("--config configs/llama2_70b.py --gpus 128 --timeline x.png", "must be a .json file"),
        ("--config configs/llama2_70b.py --fsdq 128", "fsdp"),
        ("--config configs/llama2_70b.py --gpus 128 --schedule", "pp=1 has none"),
        ("--config configs/llama2_70b.py --gpus 128 --compiled 0", "compiled"),
        (
            "--config configs/llama2_70b.py --gpus 128 --nvlink_gpus 4",
            "not a whole number of nodes",
        ),
        ("--config configs/llama2_70b.py --gpus 128 --memory_margin 0.95", "below 0.94"),
        ("--config configs/llama2_70b.py --gpus 64 --as_published --best_remat", "excludes"),
        (
            "--config configs/nemotron4_340b.py --gpus 128 --gpu_type gb200 --as_published",
            "nothing is published for nemotron4 340b bf16 on gb200",
        ),
    ],
)
def test_bad_input_is_refused(arguments, message, capsys):
    assert entry.run("plan", arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_a_drawing_that_cannot_be_written_is_one_line(monkeypatch, tmp_path, capsys):
    def draw(plan, path):
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(run_result, "plan_of", lambda asked: types.SimpleNamespace(best=None))
    monkeypatch.setattr(drawings, "draw", draw)
    path = tmp_path / "step.json"
    assert entry.run("plan", ["--config", "llama31_8b", "--timeline", str(path)]) == 2
    assert f"error: {path} cannot be written: No space left" in capsys.readouterr().err


def test_as_published_replaces_recomputation_and_microbatches():
    """Of every published row, and whatever the run's own policy is."""
    for row in published.step_time_rows():
        config = f"--config {ROOT}/configs/{row.model}_{row.size}.py"
        run = run_of(f"{config} --gpus {row.gpus} --dtype {row.dtype}")
        theirs = planner.as_published(run)
        assert (theirs.train.remat, theirs.config.train.remat_layers) == (row.remat, None)
        assert theirs.layout.mbs == row.mbs
        own = {
            name: getattr(run.config.train, name) for name in ("remat", "remat_layers", "offload")
        }
        assert theirs.config.changed(train=own, layout={"mbs": run.layout.mbs}) == run.config
        assert planner.as_published(remat.with_remat(run, "full")) == theirs
    other_work = run_of(f"--config {ROOT}/configs/llama31_8b.py --gpus 32 --gbs 64")
    assert planner.as_published(other_work).layout.mbs == 2  # its own


def test_policies_are_ordered_by_the_size_of_their_stash():
    names = [r.train.remat for r in remat.policies(run_of("--config llama2_70b --gpus 64"))]
    assert (names[0], names[-1]) == ("none", "full")
    assert "save_gemms_only" not in names  # in a scan over layers it is the same as none
    names = [r.train.remat for r in remat.policies(run_of("--config llama31_8b --gpus 8"))]
    assert names[:2] == ["none", "save_gemms_only"]


def test_chips_match_the_datasheets():
    for gpu in GPU_TYPES.values():
        assert gpu.chip.memory_bytes == pytest.approx(gpu.memory_gb * 1e9, rel=0.08)
        assert gpu.chip.memory_bytes_per_s == pytest.approx(gpu.memory_gbytes_per_s * 1e9, rel=0.02)


@pytest.mark.exhaustive
@pytest.mark.gpu_compile
def test_a_plan_on_sixty_columns_breaks_no_word(monkeypatch):
    run = run_of("--config llama31_8b:tiny --layers 1 --gpu_type h100 --tp 2")
    plan = planner.plan(run)
    screens = {}
    for width in (0, 60):
        monkeypatch.setattr(plan_text.console, "terminal_width", lambda width=width: width)
        ranking = plan_text.format_ranking([plan], run)
        screens[width] = f"{plan_text.format_plan(plan)}\n{ranking}"
    assert max(map(len, screens[60].splitlines())) <= 60
    words = lambda text: {word.strip(",;:") for word in text.split()} - {"--", ""}
    rules = lambda found: {word for word in found if set(word) != {"-"}}
    assert rules(words(screens[60])) <= rules(words(screens[0]))
    assert " ms a step" in screens[0]  # of a toy
    assert "0.000 ms a step" not in screens[0]


def test_a_step_as_fast_as_published_is_not_zero_percent_faster():
    """Screen of a plan with the figures that its headline reads."""
    shown = types.SimpleNamespace(
        fits=True, step_s=7.0, published=types.SimpleNamespace(refusal=""),
        memory=types.SimpleNamespace(spare=GIB), band=ErrorBand(1.0, 1.6, "x", 3, True),
        run=run_of("--config llama2_70b --gpus 128"),
    )  # fmt: skip
    f = {"tokens_per_s": 1.0, "days_to_1t_tokens": 1.0, "mfu": {"full": 0.5}}
    lines = plan_text.headline(
        shown, f | {"published": {"over_published": -1e-4, "step_s": 7.0, "release": "x"}}
    )
    assert lines[2].startswith("7.00 to 11.20 s in nine of ten")
    assert lines[3] == "as fast as published (7.0 s, x)"


def test_published_line():
    shown = types.SimpleNamespace(published=types.SimpleNamespace(refusal=""), step_s=7.0)
    row = {"step_s": 7.0, "gpus": 8, "source": "x"}
    ends = {2e-4: "as predicted", -0.07: "predicted -7.0%"}
    for over, end in ends.items():
        lines = plan_text.published_lines(shown, row | {"over_published": over})
        assert lines == [f"published: 7.0 s on 8 GPUs, x: {end}"]
