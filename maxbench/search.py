"""Which layout and remat policy is fastest: all legal ones by arithmetic, the best by compiling."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from maxbench import flops, memory
from maxbench.config import AXES, Run
from maxbench.costs import Costs
from maxbench.memory import GIB

POLICIES = ("none", "selective", "save_dot_except_mlpwi", "save_qkv_proj", "save_context", "full")
MOST_TP = 16  # GPUs that split one matrix product, at most
WIDTH = 2  # bytes of a number in the forward and backward pass


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to most."""
    return [1 << i for i in range(most.bit_length())]


def layouts(run: Run) -> Iterator[Run]:
    """Every legal run of the same work on as many GPUs: same batch, sequence and model."""
    gpus, experts = run.layout.gpus, run.model.experts
    inside = powers(min(gpus, MOST_TP))
    for tp, cp, ep in itertools.product(inside, powers(8), powers(experts or 1)):
        shards = gpus // (tp * cp * ep)
        if shards * tp * cp * ep != gpus:
            continue
        for fsdp, mbs in itertools.product(powers(shards), powers(4)):
            axes = dict(pp=1, vp=1, dp=shards // fsdp, fsdp=fsdp, ep=ep, cp=cp, tp=tp, mbs=mbs)
            try:
                layout = dataclasses.replace(run.layout, **axes)
                if layout.gpus == gpus:
                    yield dataclasses.replace(run, layout=layout)
            except ValueError:
                continue  # Run says why; here it only means: not legal


def recomputed(run: Run) -> float:
    """Share of a layer's forward FLOPs that the backward pass computes again."""
    m, saved = run.model, run.train.saved
    heads, kv, k = m.heads * m.head_dim, m.kv_heads * m.head_dim, m.top_k if m.experts else 1
    parts = {
        "query": m.embed * heads,
        "key": m.embed * kv,
        "value": m.embed * kv,
        "context": run.train.seq * heads,  # two products, half of the scores
        "attn_out": m.embed * heads,
        "mlp_up": m.embed * k * m.gates * m.mlp,
    }
    total = sum(parts.values()) + m.embed * k * m.mlp
    return sum(part for name, part in parts.items() if name not in saved) / total


def seconds(run: Run) -> float:
    """Arithmetic: about how long a step takes. For ranking only; the compiled program decides."""
    a, m = run.layout, run.model
    costs = Costs(a.gpu_type, {axis: getattr(a, axis) for axis in AXES})
    work = flops.per_sequence(m, run.train.seq, "causal") * a.gbs / a.gpus
    compute = work * (1 + recomputed(run) / 3)
    compute /= costs.gpu.bf16_tflops * 1e12 * costs.physics.gemm_bf16
    weights = WIDTH * flops.params(m) // (a.tp * a.ep)
    per_micro = 0.0
    if a.fsdp > 1:  # gathered forward and backward, reduced once, beside the products
        gather = costs.collective("all-gather", costs.axis_link("fsdp"), 0, weights)
        compute = max(compute, 3 * gather * a.microbatches)
    else:  # taken out of their stack twice; gradients put into theirs
        per_micro += costs.memory(9 * weights)
    part = a.mbs * run.train.seq // a.cp * m.embed * WIDTH
    if a.tp > 1:  # four of each kind per layer
        per_micro += 8 * m.layers * costs.collective("all-gather", costs.axis_link("tp"), 0, part)
    if a.ep > 1:  # there and back, forward and backward
        sent = int(part * m.top_k / a.tp)
        link = costs.axis_link("ep")
        per_micro += 4 * m.layers * costs.collective("all-to-all", link, sent, sent)
    return compute + per_micro * a.microbatches


def held(run: Run) -> float:
    """Arithmetic: about how many bytes a GPU holds."""
    a, m = run.layout, run.model
    count = flops.params(m)
    local = WIDTH * count / (a.tp * a.ep * a.fsdp)  # compute copy; gradients are as large
    gathered = 4 * local * a.fsdp / m.layers if a.fsdp > 1 else 0
    logits = 6 * run.train.loss_chunk * m.vocab / a.tp
    kept = memory.activation_bytes(run, run.train.remat)
    return 12 * count / a.gpus + 2 * local + gathered + logits + kept


def candidates(run: Run, keep: int) -> list[Run]:
    """The `keep` layouts that promise most, each with its best policy, after the given run."""
    room = memory.capacity(run.layout.gpu_type)
    promising = []
    for other in layouts(run):
        policies = (
            dataclasses.replace(other, train=dataclasses.replace(other.train, remat=remat))
            for remat in POLICIES
        )
        if fitting := [one for one in policies if held(one) < room]:
            promising.append(min(fitting, key=seconds))
    promising.sort(key=seconds)
    return [run, *[one for one in promising if one != run][:keep]]


def search(run: Run, plan: Callable, keep: int, say: Callable[[str], None]) -> list:
    """Plans of the candidates, compiled one after the other; `say` is told how far it is."""
    chosen = candidates(run, keep)
    plans = []
    for i, one in enumerate(chosen):
        say(f"{i + 1}/{len(chosen)}  {one.layout.describe()}; {one.train.remat}")
        plans.append(plan(one))
    return plans


def table(plans: list, given: Run) -> str:
    """Plans that fit, fastest first, then those that do not."""
    lines = [f"{'step s':>9} {'MFU':>6} {'spare GiB':>10}  layout; remat"]
    for p in sorted(plans, key=lambda p: (not p.fits, p.step_s)):
        mark = "  (as given)" if p.run == given else ""
        lines.append(
            f"{p.step_s:9.3f} {p.mfu:6.1%} {p.memory.spare / GIB:10.1f}  "
            f"{p.run.layout.describe()}; {p.run.train.remat}{mark}"
        )
    return "\n".join(lines)
