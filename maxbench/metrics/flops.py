"""Parameter counts, FLOPs by named convention, and the figures that follow from a step time.

FLOPs are of one sequence, forward and backward pass, without recompute; a multiply-add is two. With
S sequence, H embed, F mlp, g KV heads, h heads of width d and value width v, V vocab and k experts
per token, summed over the L layers:

    S (sum of (6 H (h + g)(d + v)  +  6 S h (d + v)  +  6 F H k x (up-projections + 1))  +  6 V H)

If h x d = H and v = d, this is S (12 L H^2 (1 + g/h + S/H) + ...), the formula of the "model flops"
section of NVIDIA's recipes. Routers are not counted.
"""

from maxbench.config.model import Model

# Convention -> factor on the FLOPs of the two GEMMs of attention scores.
CONVENTIONS = {
    "full": 1.0,  # all S x S scores, as in most published figures
    "causal": 0.5,  # only the scores that a causal mask keeps
}


def params(m: Model) -> int:
    """Exact number of parameters, each counted once: a tied LM head adds none."""
    norm = m.embed * (2 if m.norm == "layernorm1p" else 1)
    attention = m.embed * (m.head_dim + m.value_width) * (m.heads + m.kv_heads)
    per_layer = attention + norm * (4 if m.post_norm else 2)
    layers = sum(n * (per_layer + mlp_params(layer)) for n, layer in m.kinds)
    return layers + norm + m.vocab * m.embed * (1 if m.tied else 2)


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
    """FLOPs of one sequence of `seq` tokens. `convention` is a key of CONVENTIONS."""
    projections = m.embed * (m.heads + m.kv_heads)
    scores = CONVENTIONS[convention] * seq * m.heads
    attention = 6 * m.layers * (m.head_dim + m.value_width) * (projections + scores)
    active = sum(n * (g.mlp * g.top_k + g.shared_mlp if g.experts else g.mlp) for n, g in m.kinds)
    mlp = 6 * active * m.embed * (m.mlp_inputs + 1)
    return seq * (attention + mlp + 6 * m.vocab * m.embed)


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
