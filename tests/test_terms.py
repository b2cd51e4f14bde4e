"""What a published program does otherwise, on steps computed by hand."""

import collections
import dataclasses

import pytest

from maxbench import cli, hlo, memory, plan, published, simulate, terms
from maxbench.artifact import Compiled
from maxbench.config import AXES
from maxbench.costs import Costs
from maxbench.hardware import PHYSICS

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
# Two layers of one weight, read and quantised in each of 32 microbatches.
TEXT = """HloModule m, is_scheduled=true

%layer (s: (s32[], bf16[2,1024,4096], bf16[8,4096])) -> (s32[]) {
  %s = (s32[], bf16[2,1024,4096], bf16[8,4096]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %w = bf16[2,1024,4096] get-tuple-element(%s), index=1
  %x = bf16[8,4096] get-tuple-element(%s), index=2
  %mine = bf16[1,1024,4096] dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={1,1024,4096}
  %q = f8e4m3fn[1,1024,4096] divide(%mine, %mine)
  %y = bf16[8,4096] negate(%x)
  ROOT %t = (s32[], bf16[2,1024,4096], bf16[8,4096]) tuple(%i, %w, %y)
}

%micro (s: (s32[], bf16[2,1024,4096], bf16[2,1024,4096], s32[32,8])) -> (s32[]) {
  %s = (s32[], bf16[2,1024,4096], bf16[2,1024,4096], s32[32,8]) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %w = bf16[2,1024,4096] get-tuple-element(%s), index=1
  %g = bf16[2,1024,4096] get-tuple-element(%s), index=2
  %all = s32[32,8] get-tuple-element(%s), index=3
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  %ids = s32[1,8] dynamic-slice(%all, %n, %n), dynamic_slice_sizes={1,8}
  %x = bf16[8,4096] exponential(%ids)
  %a = bf16[8,4096] all-gather(%x), replica_groups=[1,8]<=[8], dimensions={0}
  %in = (s32[], bf16[2,1024,4096], bf16[8,4096]) tuple(%n, %w, %a)
  %out = (s32[], bf16[2,1024,4096], bf16[8,4096]) while(%in), condition=%c, body=%layer, \
backend_config={"known_trip_count":{"n":"2"}}
  %y = bf16[8,4096] get-tuple-element(%out), index=2
  %sum = bf16[2,1024,4096] add(%g, %y)
  ROOT %t = (s32[], bf16[2,1024,4096], bf16[2,1024,4096], s32[32,8]) tuple(%next, %w, %sum, %all)
}

ENTRY %main (w: bf16[2,1024,4096]) -> bf16[2,1024,4096] {
  %w = bf16[2,1024,4096] parameter(0)
  %zero = s32[] constant(0)
  %ids = s32[32,8] iota(), iota_dimension=0
  %in = (s32[], bf16[2,1024,4096], bf16[2,1024,4096], s32[32,8]) tuple(%zero, %w, %w, %ids)
  %out = (s32[], bf16[2,1024,4096], bf16[2,1024,4096], s32[32,8]) while(%in), condition=%c, \
body=%micro, backend_config={"known_trip_count":{"n":"32"}}
  ROOT %g = bf16[2,1024,4096] get-tuple-element(%out), index=2
}
"""
WEIGHT = 1024 * 4096  # elements of a layer's
COMPILED = Compiled(TEXT, 0, 0, 0, 0, 0, 0, ((2, 1024, 4096),), "cudnn", 0, 0, 0)


def run_of(arguments: str):
    fv = plan.flags.FlagValues()
    cli.define(fv, [])
    return cli.parse(fv, f"x --config configs/{arguments}".split())


def terms_of(run, source: str, remat: str = "none") -> dict[str, float]:
    row = dataclasses.replace(published.rows()[0], source=source, remat=remat)
    program = hlo.parse(TEXT)
    degrees = dict.fromkeys(AXES, 1) | {"tp": 8}
    timeline = simulate.play(program, Costs("h100", degrees))
    return terms.terms(run, COMPILED, program, timeline, row)


def test_what_is_the_same_in_every_microbatch():
    program = hlo.parse(TEXT)
    loop = program.entry.by_name["out"]
    same = {op.name for op in hlo.unchanging(program, program.entry, loop)}
    assert {"w", "mine", "q"} <= same
    assert not {"ids", "x", "a", "y", "sum", "g"} & same


def test_terms_of_nemo():
    run = run_of("llama31_8b.py --gpus 8")
    assert run.layout.microbatches == 32
    found = terms_of(run, "nemo")
    one = Costs("h100", dict.fromkeys(AXES, 1) | {"tp": 8})
    assert found["copies"] == pytest.approx(32 * 2 * one.memory(2 * 2 * WEIGHT), rel=1e-3)
    assert found["weights again"] == pytest.approx(31 * 2 * one.memory((2 + 2 + 1) * WEIGHT))
    sums = one.memory(2 * 2 * 2 * WEIGHT + 2 * 8 * 4096)
    assert found["gradient sums"] == pytest.approx(31 * sums)
    gather = one.collective("all-gather", one.axis_link("tp"), 0, 2 * 8 * 4096)
    beside = 1 + PHYSICS["h100"].contention
    assert found["exposed tp"] == pytest.approx(32 * gather / beside)
    assert set(found) == {"copies", "weights again", "gradient sums", "exposed tp"}
    experts = terms_of(run_of("grok1_314b.py --gpus 32"), "nemo")
    assert "exposed tp" not in experts


def test_maxtext_is_the_same_compiler():
    assert terms_of(run_of("llama31_8b.py --gpus 8"), "MaxText") == {}


def test_recomputation_is_what_a_policy_computes_again():
    """All of a layer's forward FLOPs but those of the last product, which nobody reads again."""
    run = run_of("llama31_8b.py --gpus 8")
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, remat="full"))
    attention, mlp = 4096 * (2 * 4096 + 2 * 1024 + 8192), 4096 * 14336
    share = (attention + 2 * mlp) / (attention + 3 * mlp)
    assert memory.recomputed(run, "full") == pytest.approx(share)
    assert memory.recomputed(run, "none") == 0
    t = simulate.Timeline(compute=collections.Counter(gemm=7.0, attention=1.0))
    row = dataclasses.replace(published.rows()[0], source="MaxText", remat="none")
    found = terms.terms(run, COMPILED, hlo.parse(TEXT), t, row)
    assert found == {"recomputation": pytest.approx(8 * share / (3 + share))}
