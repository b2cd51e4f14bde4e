"""What a published run did otherwise than our program, as seconds of our predicted step.

A term is what the predicted step would be shorter by, read off its timeline, negative where the
published program takes longer; predicted as published = predicted - all terms. They say how two
programs differ, the same for every workload.

  recomputation      what the backward pass computes again, ours less theirs (arithmetic)
  larger microbatches  than theirs: products fill their last rounds better, gaps are fewer

Published by NeMo (Megatron-LM and Transformer Engine):

  copies             kernels that compute nothing: ours put a pipeline's activations into a buffer
                     of slots and take them out again, and a loop over layers does so with all it
                     touches
  host decisions     its host never waits for what a GPU decides
  exposed tp         tp's gathers and reduce-scatters run beside the products there
                     (tp_comm_overlap); HIDDEN of the waiting is gone. Of dense layers
  other waiting      for pp (overlap_p2p_comm), for cp (in a ring), and for small sums in the queue
  dp in pieces       a pipeline's weights and gradients over dp travel at the start and the end of a
                     step there, here beside its fill and its drain
  loss on one stage  the last one has the head's products of all tokens, here each stage of its part
  experts' traffic   tp and ep of experts run beside nothing there; here in part
  experts in bf16    their dispatcher brings tokens over ep and tp in bf16, and experts make them
                     FP8; ours brings FP8
  FlashAttention 2   where NVTE_FUSED_ATTN=0 chose it, which cuDNN is faster than
  waits for scales   all data-parallel GPUs agree on scales after each forward and backward pass of
                     a chunk (Transformer Engine's delayed scaling), and wait for the slowest

Without seconds, because they hide in others: bf16 Adam state and master weights (Nemotron4 in
BF16), experts one after the other. Without seconds, because with them workloads that are left out
are predicted no better: gradients and weights that travel beside a microbatch (overlap_grad_reduce,
overlap_param_gather), and scales that cost no pass over a tensor.
"""

from maxbench.config.run import Run
from maxbench.cost_model import memory
from maxbench.cost_model.costs import Costs
from maxbench.cost_model.simulate import Timeline
from maxbench.hardware.published import Published
from maxbench.pipeline.schedule import schedule_for

HIDDEN = 0.889  # fitted to published steps, by benchmarks/fit_constants.py
# FlashAttention 2's rate over cuDNN's: arXiv:2407.08608, figures 5 and 6, head_dim 128, length 4k.
FLASH_2 = 0.62
REPLICAS = {"dp", "cp", "ep"}  # mesh axes that may split no more of a weight than its master copy
UNFUSED = ("nemo:24.09", "nemo:dev")  # the releases that set NVTE_FUSED_ATTN=0


def terms(
    run: Run, t: Timeline, row: Published, costs: Costs, hidden: float = HIDDEN
) -> dict[str, float]:
    """Name -> seconds; those of 0 are left out."""
    share, theirs = map(memory.recomputed, (run, memory.with_remat(run, row.remat)))
    products = t.compute["gemm"] + t.compute["attention"]
    found = {"recomputation": products * (share - theirs) / (3 + share)}
    found["larger microbatches"] = -_divided(run, t, run.layout.mbs / row.mbs, costs)
    if "nemo" in row.source:
        found |= {"copies": t.compute["copy"], "host decisions": t.compute["host"]}
        found |= _waiting(run, t, hidden)
        found["loss on one stage"] = -_on_one_stage(run, costs)
        if any(release in row.source for release in UNFUSED):
            found["FlashAttention 2"] = -t.compute["attention"] * (1 / FLASH_2 - 1)
        if run.format.quantized:
            found |= _fp8(run, t, costs, row)
    return {name: seconds for name, seconds in found.items() if seconds}


def _divided(run: Run, t: Timeline, times: float, costs: Costs) -> float:
    """What so many times as many microbatches, each as much smaller, take longer."""
    a, m, rows = run.layout, run.model, run.layout.mbs * run.train.seq // run.layout.cp
    experts = m.experts // a.ep or 1  # of a GPU
    weights = [(m.kv_heads * m.group_width, 1, 1), (m.heads * m.value_width, 1, 1)]
    weights += [(n, m.rows(a.ep) / experts, experts) for n in (m.mlp_inputs * m.mlp, m.mlp)]

    def products(rows):
        ways = lambda r, n, of: ((r, n, m.embed, of), (r, m.embed, n, of), (m.embed, n, r, of))
        each = [ways(round(rows * share), n // a.tp, of) for n, share, of in weights]
        return sum(costs.gemm(*g, dtype=run.format.reads[0]) for some in each for g in some)

    longer = times * products(rows / times) - products(rows)
    return a.microbatches * m.layers / a.pp * longer + (times - 1) * t.compute["launch"]


def _waiting(run: Run, t: Timeline, hidden: float) -> dict[str, float]:
    """What NeMo waits less, or more, for communication."""
    names = "exposed tp", "other waiting", "dp in pieces", "experts' traffic"
    found = dict.fromkeys(names, 0.0)
    for (kind, axes), x in t.traffic.items():
        each = x.count >= run.layout.microbatches  # of a microbatch; the others are of the step
        if run.model.experts and axes in ("tp", "ep") and each:
            found["experts' traffic"] -= x.busy_s - x.exposed_s
        elif axes == "tp":
            found["exposed tp"] += hidden * x.exposed_s
        elif kind in ("permute", "all-reduce"):
            found["other waiting"] += x.exposed_s
        elif run.layout.pp > 1 and {*axes.split("+")} <= REPLICAS:
            found["dp in pieces"] -= x.busy_s - x.exposed_s
    return found


def _on_one_stage(run: Run, costs: Costs) -> float:
    """What the head's products take longer, of all tokens instead of a stage's part."""
    a, m, of = run.layout, run.model, schedule_for(run).microbatches_per_loss
    rows, vocab = a.mbs * run.train.seq // a.cp, m.vocab // a.tp

    def products(rows):
        sizes = (rows, vocab, m.embed), (rows, m.embed, vocab), (m.embed, vocab, rows)
        return sum(costs.gemm(*each) for each in sizes)

    return a.microbatches * (products(rows) - products(-(-rows // a.pp) * of) / of)


def agreements(run: Run, row: Published) -> tuple[int, int]:
    """How many GPUs, apart from tp's, agree on FP8 scales in NeMo, and how often in a step."""
    a = run.layout
    return a.dp * a.fsdp * a.ep * a.cp, 2 * (a.microbatches * a.mbs // row.mbs) * a.vp


def _fp8(run: Run, t: Timeline, costs: Costs, row: Published) -> dict[str, float]:
    """What NeMo's FP8 takes longer."""
    a, m = run.layout, run.model
    replicas, times = agreements(run, row)
    found = {"waits for scales": -costs.straggler_s(t.seconds, times, replicas)}
    if m.experts:
        times = 2 * a.microbatches * m.layers // a.pp  # forward, and the gradient of the way back
        theirs, ours = (_to_experts(run, costs, width) for width in (2, run.format.bytes))
        found["experts in bf16"] = -times * (theirs - ours)
    return found


def _to_experts(run: Run, costs: Costs, width: float) -> float:
    """Seconds in which one layer's slots reach their experts over ep, then tp; bytes a number."""
    a, m = run.layout, run.model
    tokens = a.mbs * run.train.seq // a.cp // a.tp
    sent = int(tokens * m.top_k * (m.capacity_factor or 1) * m.embed * width)
    ways = (("all-to-all", "ep", a.ep, sent), ("all-gather", "tp", a.tp, sent * a.tp))
    return sum(
        costs.collective(kind, costs.axis_link(axis), sent, received)
        for kind, axis, degree, received in ways
        if degree > 1
    )
