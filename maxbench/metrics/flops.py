"""Parameter counts, FLOPs by named convention, and the figures that follow from a step time.

FLOPs are of one sequence, forward and backward pass, without recompute; a multiply-add is two. With
S sequence, H embed, F mlp, g KV heads, h heads of width d and value width v, V vocab, k experts per
token, E the shared expert's width and A the scores per query, summed over the L layers:

    S (sum of (6 H (h + g)(d + v)  +  6 A h (d + v)  +  6 H (F k + E) x (up-projections + 1))
       +  6 V H)

With multi-head latent attention, the weights of its five projections replace H (h + g)(d + v). If
h x d = H, v = d and A = S, this is S (12 L H^2 (1 + g/h + S/H) + ...), the formula of the "model
flops" section of NVIDIA's recipes. Routers, norms, biases and sinks are not counted.
"""

import dataclasses
import functools
from typing import NamedTuple

from maxbench.config.model import Model


class Convention(NamedTuple):
    """The scores of attention and the up-projections that a convention counts."""

    causal: bool  # only the scores that a causal mask keeps: half of S x S
    windows: bool = False  # only those inside a layer's window
    silu_gates: bool = False  # a gate only before SiLU: other gated MLPs count one up-projection


# `maxbench train` and `maxbench report` print the first two.
CONVENTIONS = {
    "full": Convention(causal=False),  # all S x S scores, as in most published figures
    "causal": Convention(causal=True, windows=True),
}
# Of published figures. Megatron-Bridge counts as `causal` since 0.5 (container 26.06), and as
# `bridge-0.4` before (training/utils/flop_utils.py).
PUBLISHED_CONVENTIONS = CONVENTIONS | {"bridge-0.4": Convention(causal=True, silu_gates=True)}


@functools.cache  # a search asks thousands of times
def params(m: Model) -> int:
    """Exact number of parameters, each counted once: a tied LM head adds none. Multi-token
    prediction adds a layer, a projection of 2 embed to embed, and three norms."""
    norm = m.embed * (2 if m.norm == "layernorm1p" else 1)
    per_layer = attention_params(m) + norm * (4 if m.post_norm else 2)
    layers = sum(n * (per_layer + mlp_params(layer)) for n, layer in m.kinds)
    layers += m.mtp_layers * (per_layer + mlp_params(m.per_layer[-1]) + 2 * m.embed**2 + 3 * norm)
    return layers + norm + m.vocab * m.embed * (1 if m.tied else 2)


@functools.cache
def mtp_params(m: Model) -> int:
    """Parameters of multi-token prediction."""
    return params(m) - params(dataclasses.replace(m, mtp_layers=0))


def expert_biases(m: Model) -> int:
    """Correction biases of the routers of all layers, which are state and no parameters here;
    published counts of DeepSeek-V3 and Kimi-K2 have them."""
    return sum(n * layer.experts for n, layer in m.kinds) if m.expert_bias_rate else 0


def attention_params(m: Model) -> int:
    """Parameters of one layer's attention."""
    if m.q_rank:
        biases, norms = m.latents, m.q_rank + m.kv_rank
    else:
        biases, norms = m.kv_heads * m.group_width, 2 * m.head_dim * m.qk_norm
    biases = (biases + m.embed) * m.attention_bias
    return _attention_projections(m) + biases + norms + m.heads * m.sinks


def _attention_projections(m: Model) -> int:
    """Weights of the projections of one layer's attention."""
    if m.q_rank:
        up = m.q_rank * m.head_dim + m.kv_rank * m.kv_up_width
        return m.embed * (m.latents + m.heads * m.value_width) + m.heads * up
    return m.embed * (m.heads + m.kv_heads) * (m.head_dim + m.value_width)


def mlp_params(m: Model) -> int:
    """Parameters of one layer's MLP, or of its experts, their router and the shared expert."""
    width = lambda mlp: (
        m.embed * mlp * (m.mlp_inputs + 1) + m.mlp_bias * (m.mlp_inputs * mlp + m.embed)
    )
    if not m.experts:
        return width(m.mlp)
    shared = width(m.shared_mlp) if m.shared_mlp else 0
    return (width(m.mlp) + m.embed + m.router_bias) * m.experts + shared


def per_sequence(m: Model, seq: int, convention: str = "full") -> float:
    """FLOPs of one sequence of `seq` tokens. `convention` is a key of PUBLISHED_CONVENTIONS."""
    counted = PUBLISHED_CONVENTIONS[convention]
    layers = sum(n * _layer(layer, seq, counted) for n, layer in m.kinds)
    head = m.vocab * m.embed
    mtp = _layer(m.per_layer[-1], seq, counted) + 2 * m.embed**2 + head
    return 6 * seq * (layers + head + m.mtp_layers * mtp)


def _layer(m: Model, seq: int, counted: Convention) -> float:
    """Multiply-adds of a layer for one token, forward pass."""
    scores = m.heads * (m.head_dim + m.value_width) * _scores_per_query(m, seq, counted)
    width = m.mlp * m.top_k + m.shared_mlp if m.experts else m.mlp
    gated = m.mlp_inputs == 2 and (m.act == "swiglu" or not counted.silu_gates)
    return _attention_projections(m) + scores + m.embed * width * (3 if gated else 2)


def _scores_per_query(m: Model, seq: int, counted: Convention) -> float:
    """Scores of a query that are counted, the mean over the sequence."""
    if counted.windows and 0 < m.window < seq:
        return m.window - m.window * (m.window - 1) / (2 * seq)
    return seq / 2 if counted.causal else seq


def seconds_at_peak(m: Model, seq: int, gbs: int, gpus: int, peak_tflops: float) -> float:
    """Seconds of a step whose causal FLOPs run at a dense peak, TFLOP/s of one GPU, on all GPUs."""
    return per_sequence(m, seq, "causal") * gbs / (gpus * peak_tflops * 1e12)


def figures(
    m: Model | None, seq: int, gbs: int, gpus: int, step_s: float, peak_tflops: float = 0
) -> dict:
    """The figures that follow from a step time.

    Args:
      m: None leaves tflops_per_gpu and mfu empty.
      seq, gbs, gpus: tokens per sequence, sequences per step, GPUs of the run.
      step_s: seconds of a step.
      peak_tflops: dense peak of one GPU; 0 = unknown, and mfu is None.

    Returns:
      tokens_per_s over all GPUs; days_to_1t_tokens; by convention tflops_per_gpu, in TFLOP/s, and
      mfu, from 0 to 1.
    """
    tokens_s = seq * gbs / step_s
    tflops = {c: per_sequence(m, seq, c) * gbs / step_s / gpus / 1e12 for c in CONVENTIONS if m}
    return {
        "tokens_per_s": tokens_s,
        "tflops_per_gpu": tflops,
        "mfu": {c: x / peak_tflops if peak_tflops else None for c, x in tflops.items()},
        "days_to_1t_tokens": 1e12 / tokens_s / 86400,
    }
