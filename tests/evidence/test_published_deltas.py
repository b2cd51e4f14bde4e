"""Deltas to published programs, of steps computed by hand."""

import collections
import dataclasses

import pytest

from maxbench.config import command_line
from maxbench.config.run import AXES
from maxbench.cost_model import hlo, remat, simulate
from maxbench.cost_model.costs import Costs, Link
from maxbench.evidence import published, published_deltas
from maxbench.evidence.published import Comparison
from maxbench.hardware.gpus import GPU_TYPES
from maxbench.planning import planner

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
# 32 microbatches: an all-gather over tp, and two layers that slice a weight out of a stack.
TEXT = """HloModule m, is_scheduled=true

%layer (s: (s32[], bf16[2,1024,4096], bf16[8,4096])) -> (s32[]) {
  %s = (s32[], bf16[2,1024,4096], bf16[8,4096]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %w = bf16[2,1024,4096] get-tuple-element(%s), index=1
  %x = bf16[8,4096] get-tuple-element(%s), index=2
  %mine = bf16[1,1024,4096] dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={1,1024,4096}
  %y = bf16[8,4096] negate(%x)
  ROOT %t = (s32[], bf16[2,1024,4096], bf16[8,4096]) tuple(%i, %w, %y)
}

%micro (s: (s32[], bf16[2,1024,4096], s32[32,8])) -> (s32[]) {
  %s = (s32[], bf16[2,1024,4096], s32[32,8]) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %w = bf16[2,1024,4096] get-tuple-element(%s), index=1
  %all = s32[32,8] get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  %ids = s32[1,8] dynamic-slice(%all, %n, %n), dynamic_slice_sizes={1,8}
  %x = bf16[8,4096] exponential(%ids)
  %a = bf16[8,4096] all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}
  %in = (s32[], bf16[2,1024,4096], bf16[8,4096]) tuple(%n, %w, %a)
  %out = (s32[], bf16[2,1024,4096], bf16[8,4096]) while(%in), condition=%c, body=%layer, \
backend_config={"known_trip_count":{"n":"2"}}
  ROOT %t = (s32[], bf16[2,1024,4096], s32[32,8]) tuple(%next, %w, %all)
}

ENTRY %main (w: bf16[2,1024,4096]) -> bf16[2,1024,4096] {
  %w = bf16[2,1024,4096] parameter(0)
  %zero = s32[] constant(0)
  %ids = s32[32,8] iota(), iota_dimension=0
  %in = (s32[], bf16[2,1024,4096], s32[32,8]) tuple(%zero, %w, %ids)
  %out = (s32[], bf16[2,1024,4096], s32[32,8]) while(%in), condition=%c, \
body=%micro, backend_config={"known_trip_count":{"n":"32"}}
  ROOT %g = bf16[2,1024,4096] get-tuple-element(%out), index=1
}
"""
WEIGHT = 1024 * 4096  # elements per layer


def run_of(arguments: str):
    return command_line.run_of(f"--config configs/{arguments}".split())


def timeline_of(**degrees) -> tuple[simulate.Timeline, Costs]:
    costs = Costs(GPU_TYPES["h100"], dict.fromkeys(AXES, 1) | degrees)
    return simulate.simulate(hlo.parse(TEXT), costs), costs


NEMO, MAXTEXT = "25.02.01", "24.12.09"  # releases


def row_of(run, release: str, remat: str = "none", mbs: int = 0) -> published.Published:
    """A published row, with the run's microbatch size by default."""
    columns = {"release": release, "remat": remat, "mbs": mbs or run.layout.mbs}
    return dataclasses.replace(published.rows()[0], **columns)


def deltas_of(run, release: str, remat: str = "none") -> dict[str, float]:
    row = row_of(run, release, remat)
    timeline, costs = timeline_of(tp=8)
    return published_deltas.deltas(run, timeline, row, costs)


def test_nemo_has_no_copies_and_hides_tp():
    run = run_of("llama31_8b.py --gpus 8 --mbs 1")
    assert run.layout.microbatches == 32
    found = deltas_of(run, NEMO)
    _, one = timeline_of(tp=8)
    assert found["copies"] == pytest.approx(32 * 2 * one.memory(2 * 2 * WEIGHT), rel=1e-3)
    gather = one.collective("all-gather", one.axis_link("tp"), 0, 2 * 8 * 4096)
    assert found["exposed tp"] == pytest.approx(published_deltas.HIDDEN * 32 * gather)
    assert set(found) == {"copies", "exposed tp"}


def test_expert_collectives_are_exposed_in_nemo():
    """An all-gather that is half hidden here is exposed there."""
    run = run_of("grok1_314b.py --gpus 32 --mbs 1")
    t, costs = timeline_of(tp=8)
    (gather,) = t.traffic.values()
    gather.exposed_s /= 2
    row = row_of(run, "dev")
    assert "expert collectives" not in published_deltas.deltas(
        run, t, row, costs
    )  # too few to be per microbatch
    gather.count = run.layout.microbatches
    found = published_deltas.deltas(run, t, row, costs)
    assert found["expert collectives"] == pytest.approx(-gather.busy_s / 2)


def traffic(kind: str, axes: str, exposed: float, count: float) -> simulate.CollectiveStats:
    link = Link(axes, 8, 1, 8)
    return simulate.CollectiveStats(kind, link, count=count, busy_s=2 * exposed, exposed_s=exposed)


def test_nemo_hides_p2p_and_exposes_gradients():
    run = run_of("llama31_70b.py --gpus 64")
    t = simulate.Timeline(seconds=10.0, compute=collections.Counter(gemm=3.0))
    several = [("reduce-scatter", "dp+cp", 1.5), ("permute", "pp", 0.5), ("permute", "cp", 0.25)]
    t.traffic = {(kind, axes): traffic(kind, axes, s, 1) for kind, axes, s in several}
    row = row_of(run, NEMO)
    found = published_deltas.deltas(run, t, row, Costs(GPU_TYPES["h100"], dict.fromkeys(AXES, 1)))
    del found["loss on one stage"]
    assert found == {"exposed pp and cp": pytest.approx(0.75), "ZeRO overlap": pytest.approx(-1.5)}


def test_nemo_has_the_loss_on_one_stage():
    """Three GEMMs of the LM head with 6 x vocab x embed FLOPs per token, here 1/4 on each stage; a
    GEMM of few rows is slightly less efficient."""
    run = run_of("llama31_70b.py --gpus 64")
    a, row = run.layout, row_of(run, NEMO)
    costs = planner.costs_of(run)
    found = published_deltas.deltas(run, simulate.Timeline(), row, costs)
    head = 6 * 128256 * 8192 / a.tp * a.mbs * 8192 / a.cp * a.microbatches / costs.rate("bf16")
    assert set(found) == {"loss on one stage"}
    assert found["loss on one stage"] == pytest.approx(-head * 3 / 4, rel=0.1)


def test_nemo_fp8_synchronizes_amaxes_and_dispatches_in_bf16():
    run = run_of("grok1_314b.py --gpus 128 --dtype fp8 --mbs 1")
    a = run.layout
    t = simulate.Timeline(seconds=16.0, compute=collections.Counter(attention=1.0, amax=0.1))
    row = row_of(run, "dev")
    costs = planner.costs_of(run)
    found = published_deltas.deltas(run, t, row, costs)
    waits = costs.straggler_s(16.0, 2 * a.microbatches * a.vp, a.dp * a.cp * a.ep)
    slots = 8192 // a.cp * 2 * 6144  # tokens, of two experts each, of a group of tp
    gather = lambda width: costs.collective("all-gather", costs.axis_link("tp"), 0, slots * width)
    part = slots // a.tp
    send = lambda width: costs.collective("all-to-all", costs.axis_link("ep"), part * width, 0)
    layers = 2 * a.microbatches * run.model.layers / a.pp
    del found["loss on one stage"]
    assert found == {
        "FlashAttention 2": pytest.approx(-(1 / 0.62 - 1)),
        "amax synchronization": pytest.approx(-waits),
        "experts in bf16": pytest.approx(layers * (gather(1) + send(1) - gather(2) - send(2))),
    }


def test_maxtext_has_no_deltas():
    assert deltas_of(run_of("llama31_8b.py --gpus 8"), MAXTEXT) == {}


def test_smaller_microbatches_fill_expert_gemms_less():
    """Grok-1 with one expert per GPU and two slots per token of the tp group: 32 microbatches of 4
    sequences here, 128 of one there."""
    run = run_of("grok1_314b.py --gpus 32")
    assert (run.layout.mbs, run.layout.microbatches, run.layout.ep) == (4, 32, 8)
    costs = planner.costs_of(run)
    ways = lambda rows, k, n: ((rows, n, k), (rows, k, n), (k, n, rows))
    attn, mlp = ((6144, 2048), (1536, 6144)), ((6144, 16384), (8192, 6144))

    def layer(rows):
        each = [ways(rows, *w) for w in attn] + [ways(2 * rows, *w) for w in mlp]
        return sum(costs.gemm(*g) for some in each for g in some)

    longer = 4 * (128 * layer(4096) - 32 * layer(16384))  # of four layers
    found = published_deltas.deltas(run, simulate.Timeline(), row_of(run, MAXTEXT, mbs=1), costs)
    assert found == {"larger microbatches": pytest.approx(-longer)}


def test_smaller_microbatches_fill_gemms_less_and_launch_more_kernels():
    """Llama 3.1 8B: 16 microbatches of 2 sequences here, 32 of one there."""
    run, t = run_of("llama31_8b.py --gpus 32"), simulate.Timeline()
    assert (run.layout.mbs, run.layout.microbatches) == (2, 16)
    costs = planner.costs_of(run)
    ways = lambda rows, k, n: ((rows, n, k), (rows, k, n), (k, n, rows))
    weights = (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)
    layer = lambda rows: sum(costs.gemm(*g) for w in weights for g in ways(rows, *w))
    longer = 32 * (32 * layer(4096) - 16 * layer(8192))
    t.compute["launch"] = 0.5
    found = published_deltas.deltas(run, t, row_of(run, MAXTEXT, mbs=1), costs)
    assert found == {"larger microbatches": pytest.approx(-longer - 0.5)}
    assert longer > 0.1


def test_recomputation_is_of_the_forward_flops_that_are_not_saved():
    """All of a layer's forward FLOPs but those of the last GEMM, whose output is not read again."""
    run = run_of("llama31_8b.py --gpus 8")
    run = remat.with_remat(run, "full")
    attention, mlp = 4096 * (2 * 4096 + 2 * 1024 + 8192), 4096 * 14336
    share = (attention + 2 * mlp) / (attention + 3 * mlp)
    assert remat.recomputed_fraction(run) == pytest.approx(share)
    assert remat.recomputed_fraction(remat.with_remat(run, "none")) == 0
    assert remat.recomputed_fraction(remat.with_remat(run, "full", layers=8)) == pytest.approx(
        share / 4
    )
    t = simulate.Timeline(compute=collections.Counter(gemm=7.0, attention=1.0))
    row = row_of(run, MAXTEXT)
    found = published_deltas.deltas(run, t, row, planner.costs_of(run))
    assert found == {"recomputation": pytest.approx(8 * share / (3 + share))}


def test_deltas_apply_to_their_releases_in_the_same_layout_alone():
    fitted = next(r for r in published.fitted_rows() if r.model == "llama31")
    newer = next(r for r in published.rows() if r not in published.fitted_rows())
    apply = published_deltas.apply_to
    assert apply(Comparison(fitted, []))
    assert not apply(Comparison(fitted, [], ("pp 2, published 4",)))
    assert not apply(Comparison(fitted, ["GBS 64, published 128"]))
    assert not apply(Comparison(newer, []))
    assert not apply(Comparison(None, ["nothing published"]))
