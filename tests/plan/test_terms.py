"""What a published program does otherwise, on steps computed by hand."""

import collections
import dataclasses

import pytest

from maxbench.hardware import published
from maxbench.hardware.gpus import GPUS
from maxbench.plan import hlo, memory, simulate, terms
from maxbench.plan.costs import Costs
from maxbench.spec import cli
from maxbench.spec.run import AXES

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
# Two layers of one weight, taken out of a stack in each of 32 microbatches, and a gather over tp.
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
WEIGHT = 1024 * 4096  # elements of a layer's


def run_of(arguments: str):
    return cli.run_of(f"--config configs/{arguments}".split())


def terms_of(run, source: str, remat: str = "none") -> dict[str, float]:
    row = dataclasses.replace(published.rows()[0], source=source, remat=remat)
    program = hlo.parse(TEXT)
    degrees = dict.fromkeys(AXES, 1) | {"tp": 8}
    timeline = simulate.play(program, Costs("h100", degrees))
    return terms.terms(run, timeline, row)


def test_terms_of_nemo():
    run = run_of("llama31_8b.py --gpus 8")
    assert run.layout.microbatches == 32
    found = terms_of(run, "nemo")
    one = Costs("h100", dict.fromkeys(AXES, 1) | {"tp": 8})
    assert found["copies"] == pytest.approx(32 * 2 * one.memory(2 * 2 * WEIGHT), rel=1e-3)
    gather = one.collective("all-gather", one.axis_link("tp"), 0, 2 * 8 * 4096)
    beside = 1 + GPUS["h100"].physics.contention
    assert found["exposed tp"] == pytest.approx(32 * gather / beside)
    assert set(found) == {"copies", "exposed tp"}
    experts = terms_of(run_of("grok1_314b.py --gpus 32"), "nemo")
    assert "exposed tp" not in experts


def test_maxtext_is_the_same_compiler():
    assert terms_of(run_of("llama31_8b.py --gpus 8"), "MaxText") == {}


def test_maxtext_quantises_weights_where_they_are_used():
    """68.5 G weights of 80 layers, read and written as FP8, forward and backward."""
    found = terms_of(
        run_of("llama2_70b.py --gpus 128 --dtype fp8"), "MaxText", "save_dot_except_mlp"
    )
    moved = 2 * 80 * (2 + 1) * (8192 * 128 * (64 + 8 + 8 + 64) + 3 * 8192 * 28672)
    rate = 3352.32e9 * GPUS["h100"].physics.memory
    assert found == {"weights to FP8": pytest.approx(-moved / rate, rel=1e-3)}


def test_recomputation_is_what_a_policy_computes_again():
    """All of a layer's forward FLOPs but those of the last product, which nobody reads again."""
    run = run_of("llama31_8b.py --gpus 8")
    run = memory.with_remat(run, "full")
    attention, mlp = 4096 * (2 * 4096 + 2 * 1024 + 8192), 4096 * 14336
    share = (attention + 2 * mlp) / (attention + 3 * mlp)
    assert memory.recomputed(run) == pytest.approx(share)
    assert memory.recomputed(memory.with_remat(run, "none")) == 0
    t = simulate.Timeline(compute=collections.Counter(gemm=7.0, attention=1.0))
    row = dataclasses.replace(published.rows()[0], source="MaxText", remat="none")
    found = terms.terms(run, t, row)
    assert found == {"recomputation": pytest.approx(8 * share / (3 + share))}
