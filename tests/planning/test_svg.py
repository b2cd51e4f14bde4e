"""Live buffers and the drawings of a plan, against figures by hand."""

import collections
import csv
import itertools
import pathlib
import re
import xml.etree.ElementTree

import pytest

from maxbench.config.run import AXES
from maxbench.cost_model import buffer_liveness, hlo, memory
from maxbench.cost_model.costs import Costs
from maxbench.cost_model.meaning import Meaning
from maxbench.cost_model.memory import Memory
from maxbench.cost_model.simulate import Timeline, TraceEvent
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.pipeline.schedule import build_schedule
from maxbench.planning import drawings, program_names, scaling, search, svg
from maxbench.planning.planner import Plan
from tests.conftest import resolve

# A loop writes 4 rows of 1 KiB, each from a temporary of 2 KiB; then a sum of 4 KiB.
PROGRAM = """HloModule m, is_scheduled=true

%put (a: f32[4,256], b: s32[], c: f32[512]) -> f32[4,256] {
  %a = f32[4,256]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %c = f32[512]{0} parameter(2)
  %part = f32[1,256]{1,0} slice(%c), slice={[0:256]}
  ROOT %u = f32[4,256]{1,0} dynamic-update-slice(%a, %part, %b, %b)
}

%body (state: (s32[], f32[4,256])) -> (s32[], f32[4,256]) {
  %state = (s32[], f32[4,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = f32[4,256]{1,0} get-tuple-element(%state), index=1
  %wide = f32[512]{0} broadcast(%i), metadata={op_name="jit/jvp(x)/Block/mlp/up/mul"}
  %filled = f32[4,256]{1,0} fusion(%stack, %i, %wide), kind=kLoop, calls=%put
  %next = s32[] add(%i, %i)
  ROOT %out = (s32[], f32[4,256]{1,0}) tuple(%next, %filled)
}

%more (state: (s32[], f32[4,256])) -> pred[] {
  %state = (s32[], f32[4,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%i, %i), direction=LT
}

ENTRY %main (w: f32[1024], m: f32[2048]) -> f32[1024] {
  %w = f32[1024]{0} parameter(0), metadata={op_name="state['params']['w']"}
  %m = f32[2048]{0} parameter(1), metadata={op_name="state['opt'][1].mu['w']"}
  %zero = s32[] constant(0)
  %empty = f32[4,256]{1,0} broadcast(%zero), metadata={op_name="jit/broadcast"}
  %start = (s32[], f32[4,256]{1,0}) tuple(%zero, %empty)
  %loop = (s32[], f32[4,256]{1,0}) while(%start), condition=%more, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
  %kept = f32[4,256]{1,0} get-tuple-element(%loop), index=1
  %flat = f32[1024]{0} bitcast(%kept)
  ROOT %sum = f32[1024]{0} add(%w, %flat)
}
"""


def live_buffers() -> buffer_liveness.Liveness:
    return buffer_liveness.liveness(
        hlo.parse(PROGRAM),
        Costs(GPU_TYPES["h100"], dict.fromkeys(AXES, 1)),
        Meaning(label=program_names.module_of, arguments=program_names.ARGUMENTS),
    )


def test_buffers_live_from_the_first_write_to_the_last_read():
    """The stack keeps its buffer in the loop, and the result reuses that of the weights."""
    found = live_buffers()
    at, names = found.peak()
    assert names == {"optimizer": 8192, "weights": 4096, "forward mlp/up": 4096 + 2048}
    assert max(found.total()) - sum(names.values()) in range(0, 8)  # the counter
    assert found.total()[0] == found.total()[-1] - 4096 == 8192 + 4096
    assert len(found.seconds) == len(found.total()) > at


def test_the_drawing_of_memory_names_live_buffers_at_the_peak():
    picture = svg.memory(live_buffers(), "toy", 18 << 10, 1 << 15)
    texts = [node.text for node in xml.etree.ElementTree.fromstring(picture) if node.text]
    assert any("forward mlp/up" in text for text in texts)
    assert any("optimizer" in text for text in texts)


@pytest.mark.parametrize(("pp", "vp", "micro"), [(4, 2, 8), (2, 1, 2), (8, 1, 64)])
def test_the_shaded_part_of_a_schedule_is_its_bubble(pp, vp, micro):
    s = build_schedule("1f1b", pp, vp, micro)
    picture = svg.schedule(s, "toy")
    drawn = re.findall(r'd="M[\d. ]+h([\d.]+)v26[^"]*" fill="(#\w+)"', picture)
    widths = lambda *colors: sum(float(w) for w, color in drawn if color in colors)
    whole = widths(svg.IDLE, *svg.COLORS[:2])
    if s.ticks <= svg.MAX_TICKS:
        assert widths(svg.IDLE) / whole == pytest.approx(s.bubble(), abs=0.01)
    else:
        assert "ticks left out" in picture


EVENTS = [  # a loop of five iterations of 2 s, two of which are recorded, and the optimizer
    TraceEvent("compute", "gemm", "gemm", 0.0, 1.5),
    TraceEvent("communication", "all-gather over dp", "all-gather", 0.5, 1.0),
    TraceEvent("compute", "wait for all-gather", "wait", 1.5, 0.5),
    TraceEvent("compute", "gemm", "gemm", 2.0, 1.5),
    TraceEvent("communication", "all-gather over dp", "all-gather", 2.5, 1.0),
    TraceEvent("compute", "wait for all-gather", "wait", 3.5, 0.5),
    TraceEvent("compute", "3 more iterations of while.1", "loop", 4.0, 6.0),
    TraceEvent("compute", "optimizer", "memory", 10.0, 1.0),
]


def test_iterations_that_are_not_recorded_are_as_the_one_before_them():
    recording = drawings.Recording(EVENTS)
    kind = lambda stream, time: getattr(recording.event(stream, time), "kind", "")
    assert [kind("compute", t) for t in (4.1, 5.6, 8.1, 9.9, 10.5)] == [
        "gemm", "wait", "gemm", "wait", "memory"
    ]  # fmt: skip
    assert [kind("communication", t) for t in (4.1, 4.6, 9.4, 9.6)] == [
        "", "all-gather", "all-gather", ""
    ]  # fmt: skip
    assert [*recording.windows()] == [(0.0, 11.0), (2.0, 4.0)]


def test_the_drawing_of_a_step_has_its_iterations_at_scale():
    """No block stands for them: the area of each kind is its share of the step."""
    picture = drawings.streams({"toy": EVENTS})
    root = xml.etree.ElementTree.fromstring(picture)
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert "toy: 11.000 s" in picture
    assert "one iteration of its longest loop, outlined above: 2.000 s" in picture
    area = collections.Counter()
    for path in root:
        for y, width, height in re.findall(r"M[\d.]+ ([\d.]+)h(1)v([\d.]+)", path.get("d", "")):
            if float(y) < 60:  # of the compute stream of the first panel
                area[path.get("fill")] += float(width) * float(height)
    share = {kind: area[color] / area.total() for kind, color in drawings.COLORS.items()}
    expect = {"gemm": 7.5 / 11, "wait": 2.5 / 11, "memory": 1 / 11}
    assert {k: s for k, s in share.items() if s} == pytest.approx(expect, abs=0.01)


def test_a_colour_of_a_drawing_has_one_meaning():
    parts = {"forward": {f"part {i}": 1.0 for i in range(20)}}
    parts["forward"] |= {"exposed communication of mlp": 1.0, "others": 0.5}
    root = xml.etree.ElementTree.fromstring(svg.bars_and_roofline("toy", parts, [], 1000, 3000))
    keys = [(p.get("fill"), p[0].text) for p in root if "h14.00v14.00" in p.get("d", "")]
    assert len(keys) == len({color for color, _ in keys}) == len(svg.COLORS) + 2
    assert (svg.IDLE, svg.WAITING) in keys
    assert not {svg.IDLE, svg.GREY} & {*svg.COLORS}


def test_scaling_has_the_plan_and_estimates_of_its_axes(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "SIZES", [1, 8, 16, 4096, 65536])
    monkeypatch.setattr(scaling, "SEARCHED", 16)
    run = resolve("llama31_8b", gpus=8)
    timeline = Timeline(seconds=2 * search.estimate_step_s(run))
    needed = search.estimate_bytes(run) + memory.activation_bytes(run)
    sizes = Memory(needed + memory.GIB, 0, 0, 0, 0, capacity=memory.capacity(run.gpu))
    plan = Plan(run=run, compiled=None, memory=sizes, timeline=timeline, published=None)
    found = scaling.scaling(plan)
    for curve in found.values():
        assert curve[8] == (run, plan.step_s, scaling.COMPILED)
    own = lambda run: (run.layout.pp, run.layout.vp, run.layout.ep, run.layout.cp, run.layout.tp)
    for point in found["weak"].values():
        assert own(point.run) == own(run)
        assert point.run.train.remat == run.train.remat
        assert point.step_s == pytest.approx(2 * search.estimate_step_s(point.run))
    # 32,768 do not divide the dims of weights: the optimizer would not be sharded.
    assert [*found["weak"]] == [8, 16, 4096]
    assert found["weak"][4096].run.layout.gbs == 128 * 4096 // 8
    assert max(found["strong"]) < 4096  # 128 sequences are too few for so many
    assert {point.run.layout.gbs for point in found["strong"].values()} == {128}
    text = scaling.table(found)
    assert "no layout is legal and fits on 1, 65536 GPUs\n" in text
    assert text.count(f"{plan.step_s:.3f}") >= 2
    scaling.draw(plan, found, tmp_path / "x.svg")
    root = xml.etree.ElementTree.fromstring((tmp_path / "x.svg").read_text())
    texts = [node.text for node in root if node.tag.endswith("text")]
    assert {"GPUs", "tokens/s", "100 k", "1 M"} <= {*texts}
    assert not [text for text in texts if "e+" in text]


@pytest.mark.exhaustive
def test_the_error_of_scaling_is_that_of_compiled_programs():
    """Errors over pairs of rows of docs/plan.csv with the same axes but dp and fsdp."""
    ratios = collections.defaultdict(list)
    with pathlib.Path("docs/plan.csv").open(newline="") as f:
        for line in (line for line in csv.DictReader(f) if line["step_s"]):
            row = {name: line[name] for name in ("gpu_type", "dtype")}
            strong = line["scaling"] == "strong"
            run = resolve(line["workload"], gpus=int(line["gpus"]), strong_scaling=strong, **row)
            a = run.layout
            axes = (a.pp, a.ep, a.cp, a.tp, a.fsdp > 1)
            ratio = float(line["step_s"]) / search.estimate_step_s(run)
            ratios[line["workload"], *row.values(), run.model.layers, axes].append(ratio)
    pairs = [pair for found in ratios.values() for pair in itertools.permutations(found, 2)]
    within = sum(abs(one / other - 1) <= scaling.ERROR for one, other in pairs)
    assert len(pairs) > 400
    assert 0.9 <= within / len(pairs) < 0.95
