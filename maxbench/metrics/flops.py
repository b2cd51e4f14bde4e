"""Parameters, FLOPs by named convention, and the figures made from a step time.

FLOPs are of one sequence, forward and backward, without recomputation; a multiply-add is two.
With S sequence, H embed, F mlp, g KV heads, h heads of width d and value width v, V vocab, k
experts per token, summed over layers:

    S (sum of (6 H (h + g)(d + v)  +  6 S h (d + v)  +  6 F H k x (up-projections + 1))  +  6 V H)

Where h x d = H and v = d this is S (12 L H^2 (1 + g/h + S/H) + ...), the formula of the "model
flops" section of NVIDIA's recipes. A router is not counted.
"""

from maxbench.config.model import Model

# What the products with attention scores are multiplied with.
CONVENTIONS = {
    "full": 1.0,  # every S x S score counted, as most published figures do
    "causal": 0.5,  # only the half that a causal mask leaves
}


def params(m: Model) -> int:
    """Exact number of weights, each counted once (a tied head is not counted again)."""
    norm = m.embed * (2 if m.norm == "layernorm1p" else 1)
    attn = m.embed * (m.head_dim + m.value_width) * (m.heads + m.kv_heads)
    shared = attn + norm * (4 if m.post_norm else 2)
    layers = sum(n * (shared + mlp_params(kind)) for n, kind in m.stacks)
    return layers + norm + m.vocab * m.embed * (1 if m.tied else 2)


def mlp_params(m: Model) -> int:
    """Weights of one layer's MLP, or of its experts and their router."""
    mlp = m.embed * m.mlp * (m.mlp_inputs + 1)
    return (mlp + m.embed) * m.experts if m.experts else mlp


def per_sequence(m: Model, seq: int, convention: str = "full") -> float:
    """FLOPs of one sequence of `seq` tokens. `convention` is a key of CONVENTIONS."""
    products = m.embed * (m.heads + m.kv_heads) + CONVENTIONS[convention] * seq * m.heads
    attention = 6 * m.layers * (m.head_dim + m.value_width) * products
    active = sum(n * kind.mlp * (kind.top_k if kind.experts else 1) for n, kind in m.stacks)
    mlp = 6 * active * m.embed * (m.mlp_inputs + 1)
    return seq * (attention + mlp + 6 * m.vocab * m.embed)


def figures(
    m: Model | None, seq: int, gbs: int, gpus: int, step_s: float, peak_tflops: float = 0
) -> dict:
    """What a step time means: tokens/s over all GPUs, days to train on 1e12 tokens, and by
    convention TFLOP/s per GPU and MFU (0 to 1; None where the GPUs' peak is not known).

    Without a model the last two are empty.
    """
    tokens_s = seq * gbs / step_s
    rates = {c: per_sequence(m, seq, c) * gbs / step_s / gpus / 1e12 for c in CONVENTIONS if m}
    return {
        "tokens_per_s": tokens_s,
        "tflops_per_gpu": rates,
        "mfu": {c: rate / peak_tflops if peak_tflops else None for c, rate in rates.items()},
        "days_to_1t_tokens": 1e12 / tokens_s / 86400,
    }
