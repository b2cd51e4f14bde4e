"""Differences between our program and a published run's, as seconds of our predicted step.

A delta is the time by which the predicted step would be shorter with the published program, from
the simulated timeline; negative where that program takes longer. Predicted as published = predicted
- sum of the deltas. They describe two programs, the same way for every workload.

  recomputation      recomputed FLOPs of the backward pass, ours less theirs (an estimate)
  larger microbatches  than theirs: GEMMs fill their last waves better, and there are fewer launches

For runs of NeMo (Megatron-LM and Transformer Engine):

  copies             kernels that only move data: our pipeline copies activations to and from the
                     stash, and a loop over layers copies what it stacks
  host-side branches  NeMo's host never waits for a predicate on the GPU
  exposed tp         all-gathers and reduce-scatters over tp overlap GEMMs (tp_comm_overlap), which
                     hides the fraction HIDDEN of the wait. Dense layers only
  exposed pp and cp  p2p over pp (overlap_p2p_comm), the ring over cp, and small all-reduces
  ZeRO overlap       a pipeline's all-gather and reduce-scatter over dp run at the start and end of
                     the step; ours overlap the warm-up and the cool-down
  loss on one stage  the last stage computes the LM head of all tokens; ours shards it over stages
  expert collectives  tp and ep collectives of experts are exposed; ours overlap in part
  experts in bf16    the dispatcher sends tokens over ep and tp in bf16 and quantizes at the expert;
                     ours sends FP8
  FlashAttention 2   selected by NVTE_FUSED_ATTN=0; slower than cuDNN's
  amax synchronization  all data-parallel GPUs reduce amaxes after each forward and backward pass of
                     a chunk (Transformer Engine's delayed scaling), and wait for the slowest

Not modelled, because other deltas include them: bf16 Adam state and master weights (Nemotron4 in
BF16), experts in sequence. Not modelled, because workloads that are left out of the fit are not
predicted better with them: gradients and weights that overlap a microbatch (overlap_grad_reduce,
overlap_param_gather), and scales that need no pass over a tensor.
"""

import math

from maxbench.config.run import Run
from maxbench.config.sublayers import RULES
from maxbench.cost_model import remat
from maxbench.cost_model.costs import Costs
from maxbench.cost_model.simulate import Timeline
from maxbench.evidence import published
from maxbench.evidence.published import Comparison, Published
from maxbench.pipeline.schedule import schedule_for

HIDDEN = 0.889  # fitted to published steps by tools/fit_constants.py
# Rate of FlashAttention 2 over cuDNN's: arXiv:2407.08608, figures 5 and 6, head_dim 128, length 4k.
FLASH_2 = 0.62
REPLICAS = {"dp", "cp", "ep"}  # mesh axes that shard only the optimizer state of a weight
UNFUSED = ("24.09", "dev")  # releases of NeMo that set NVTE_FUSED_ATTN=0


def apply_to(comparison: Comparison) -> bool:
    """Whether the deltas describe the published program of a comparison.

    They describe the releases whose rows were fitted to, and programs with the layout of the run.
    """
    row = comparison.row
    return row in published.fitted_rows() and not comparison.refusal and not comparison.notes


def deltas(
    run: Run, t: Timeline, row: Published, costs: Costs, hidden: float = HIDDEN
) -> dict[str, float]:
    """Name -> seconds of each delta that is not 0.

    Args:
      t: the predicted step.
      row: the published run.
      hidden: replaces HIDDEN.
    """
    theirs = remat.with_remat(run, row.remat)
    fraction, their_fraction = map(remat.recomputed_fraction, (run, theirs))
    gemms = t.compute["gemm"] + t.compute["attention"]
    found = {"recomputation": gemms * (fraction - their_fraction) / (3 + fraction)}
    found["larger microbatches"] = -_smaller_microbatches(run, t, run.layout.mbs / row.mbs, costs)
    if row.framework == "nemo":
        found |= {"copies": t.compute["copy"], "host-side branches": t.compute["host"]}
        found |= _nemo_communication(run, t, hidden)
        found["loss on one stage"] = -_loss_on_one_stage(run, costs)
        if row.release in UNFUSED:
            found["FlashAttention 2"] = -t.compute["attention"] * (1 / FLASH_2 - 1)
        if run.format.quantized:
            found |= _nemo_fp8(run, t, costs, row)
    return {name: seconds for name, seconds in found.items() if seconds}


def _smaller_microbatches(run: Run, t: Timeline, times: float, costs: Costs) -> float:
    """Seconds that `times` as many microbatches of the same tokens take longer."""
    a, m, rows = run.layout, run.model, run.layout.mbs * run.train.seq // run.layout.cp
    layer = m.per_layer[-1]
    gemms = [w for _, part in layer.parts() for w in part.weights.values() if w.is_gemm]
    weights: list[tuple[int, int, float, int]] = []  # both dims, share of rows, experts of a GPU
    for w in filter(lambda w: not w.plain, gemms):
        batch, *sides = w.sides
        experts = w.owner.experts // a.ep or 1 if batch else 1
        share = w.owner.rows(a.ep) / experts if batch else 1
        split = [a.tp if any("tp" in RULES[x] for x in side) else 1 for side in sides]
        dims = [math.prod(getattr(w.owner, x) for x in side) for side in sides]
        k, n = (dim // tp for dim, tp in zip(dims, split, strict=True))
        weights.append((k, n, share, experts))

    def layer_s(rows):
        passes = lambda r, k, n, of: ((r, n, k, of), (r, k, n, of), (k, n, r, of))
        gemms = [passes(round(rows * share), k, n, of) for k, n, share, of in weights]
        return sum(costs.gemm(*g, dtype=run.format.reads[0]) for weight in gemms for g in weight)

    longer = times * layer_s(rows / times) - layer_s(rows)
    return a.microbatches * m.layers / a.pp * longer + (times - 1) * t.compute["launch"]


def _nemo_communication(run: Run, t: Timeline, hidden: float) -> dict[str, float]:
    """Deltas of exposed communication in NeMo."""
    names = "exposed tp", "exposed pp and cp", "ZeRO overlap", "expert collectives"
    found = dict.fromkeys(names, 0.0)
    for (kind, axes), x in t.traffic.items():
        per_microbatch = x.count >= run.layout.microbatches
        if run.model.has_experts and axes in ("tp", "ep") and per_microbatch:
            found["expert collectives"] -= x.busy_s - x.exposed_s
        elif axes == "tp":
            found["exposed tp"] += hidden * x.exposed_s
        elif kind in ("permute", "all-reduce"):
            found["exposed pp and cp"] += x.exposed_s
        elif run.layout.pp > 1 and {*axes.split("+")} <= REPLICAS:
            found["ZeRO overlap"] -= x.busy_s - x.exposed_s
    return found


def _loss_on_one_stage(run: Run, costs: Costs) -> float:
    """Seconds that the LM head takes longer for all tokens than for one stage's part."""
    a, m, per_loss = run.layout, run.model, schedule_for(run).microbatches_per_loss
    rows, vocab = a.mbs * run.train.seq // a.cp, m.vocab // a.tp

    def head_s(rows):
        sizes = (rows, vocab, m.embed), (rows, m.embed, vocab), (m.embed, vocab, rows)
        return sum(costs.gemm(*mnk) for mnk in sizes)

    return a.microbatches * (head_s(rows) - head_s(-(-rows // a.pp) * per_loss) / per_loss)


def amax_syncs(run: Run, row: Published) -> tuple[int, int]:
    """GPUs (one per tp group) that synchronize amaxes in NeMo, and how often in a step."""
    a = run.layout
    return a.dp * a.fsdp * a.ep * a.cp, 2 * (a.microbatches * a.mbs // row.mbs) * a.vp


def _nemo_fp8(run: Run, t: Timeline, costs: Costs, row: Published) -> dict[str, float]:
    """Deltas of NeMo's FP8."""
    a, m = run.layout, run.model
    replicas, times = amax_syncs(run, row)
    found = {"amax synchronization": -costs.straggler_s(t.seconds, times, replicas)}
    if m.has_experts:
        times = 2 * a.microbatches * m.layers // a.pp  # dispatch, and the gradient of the combine
        theirs, ours = (_dispatch_s(run, costs, width) for width in (2, run.format.bytes))
        found["experts in bf16"] = -times * (theirs - ours)
    return found


def _dispatch_s(run: Run, costs: Costs, width: float) -> float:
    """Seconds of one layer's dispatch to experts over ep, then tp; `width` in bytes per element."""
    a, m = run.layout, run.model
    tokens = a.mbs * run.train.seq // a.cp // a.tp
    sent = int(tokens * m.top_k * (m.capacity_factor or 1) * m.embed * width)
    steps = (("all-to-all", "ep", a.ep, sent), ("all-gather", "tp", a.tp, sent * a.tp))
    return sum(
        costs.collective(kind, costs.axis_link(axis), sent, received)
        for kind, axis, degree, received in steps
        if degree > 1
    )
