"""The table of which collective waits for which GEMM, against what the executor traces."""

import collections
import re

import pytest

from maxbench.pipeline import tick_order
from maxbench.pipeline.schedule import COOLDOWN, STEADY, WARMUP
from maxbench.sharding import ordering
from maxbench.sharding.mesh import make_mesh
from maxbench.step.train_step import Step
from tests.conftest import resolve

RUNS = {
    "dense": ("llama31_405b", dict(pp=2, vp=2, cp=2, tp=2, layers=8)),
    "dense fp8": ("llama31_405b", dict(pp=2, vp=2, cp=2, tp=2, layers=8, dtype="fp8")),
    "experts": ("grok1_314b", dict(pp=2, vp=2, ep=2, tp=2, layers=8)),
    "all-to-alls": ("qwen3_235b_a22b", dict(pp=2, vp=2, ep=2, layers=8)),
    "one stage": ("llama31_8b", dict(tp=2, cp=2, layers=2)),
}


def traced(name, monkeypatch, order="auto"):
    """(events that were waited for, {event: events that it waited for}) of a traced step."""
    family, axes = RUNS[name]
    how = {"train.order": order} | ({"train.unroll_layers": 4} if name == "one stage" else {})
    run = resolve(family, "tiny", how, mbs=1, gbs=16, seq=64, **axes)
    emitted, waits = set(), collections.defaultdict(set)

    class Recorded(ordering.Tokens):
        def emit(self, event, t):
            emitted.add(event)
            super().emit(event, t)

        def of(self, event):
            found = [name for name in self.order.get(event, ()) if name in self.tokens]
            waits[event].add(tuple(found))
            return super().of(event)

    monkeypatch.setattr(ordering, "Tokens", Recorded)
    step = Step(run, make_mesh(run.layout))
    text = step.lower().as_text()
    return run, emitted, waits, text


LATE = ("experts", "dense")  # others have their events


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n in LATE)) for n in RUNS]
)
def test_the_executor_orders_as_the_table_says(name, monkeypatch):
    """Each event of the table asks for its row, and the row's events happened before, in the order
    of the table. No event asks under a name that no table has, except those that never wait."""
    run, emitted, waits, _ = traced(name, monkeypatch)
    size = 2 if name != "one stage" else run.model.layers
    for phase in (STEADY, *((WARMUP, COOLDOWN) if run.layout.pp > 1 else ())):
        for layer in range(size):
            for event, events in tick_order.tick_order(run, phase, layer).items():
                if run.layout.pp == 1 and event in (
                    "fwd.recv",
                    "fwd.recv.write",
                    "fwd.chunk_switch",
                    "bwd.chunk_switch",
                ):
                    assert event not in waits  # one stage receives nothing and switches no chunk
                    continue
                assert {*events} <= emitted, (event, events)
                assert phase != STEADY or events in waits[event], event
    named = tick_order.EXPERTS | tick_order.DENSE | tick_order.ALL_TO_ALLS
    named |= tick_order.WARMUP_ONLY | tick_order.COOLDOWN_ONLY | tick_order.COOLDOWN_DENSE
    never = {"fwd.channel.input", "fwd.channel.last.reduce_scatter"}
    never |= {"bwd.channel.input", "bwd.channel.output"}
    assert {*waits} <= {*named} | never


@pytest.mark.exhaustive
def test_order_off_leaves_no_token(monkeypatch):
    """train.order=off: nothing waits; tokens multiply by 0, and there are none of those left."""
    *_, waits, ordered = traced("dense", monkeypatch)
    assert any(any(found) for found in waits.values())
    *_, waits, free = traced("dense", monkeypatch, order="off")
    assert not any(any(found) for found in waits.values())
    assert len(free) < 0.9 * len(ordered)


def test_the_table_is_printed_with_its_differences():
    run = resolve("llama31_405b", gpus=64)
    text = tick_order.render(run)
    assert re.search(r"fwd\.mixer\.first\.all_gather +bwd\.channel\.first\.wgrad", text)
    first = next(
        line for line in text.splitlines() if line.startswith("bwd.channel.last.all_gather")
    )
    assert " ".join(first.split()[1:]) == "bwd.mixer.last.wgrad, fwd.channel.last.gemm stash.write"
    assert "cooldown" in text
    without_tp = tick_order.render(resolve("qwen3_235b_a22b", gpus=256, gpu_type="gb200"))
    assert re.search(r"bwd\.mixer\.input +fwd\.channel\.last\.gemm", without_tp)
    assert "reduce_scatter" not in without_tp.partition("warmup")[0]
