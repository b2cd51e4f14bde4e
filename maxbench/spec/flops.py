"""Parameters, FLOPs by named convention, and the figures made from a step time.

FLOPs are of one sequence, forward and backward, without recomputation; a multiply-add is two.
With S sequence, L layers, H embed, F mlp, g KV heads, h heads, V vocab, k experts per token:

    S (12 L H^2 (1 + g/h + S/H)  +  6 L F H k x (up-projections + 1)  +  6 V H)

which takes h x head_dim = H. The source is the "model flops" section of NVIDIA's recipes.
"""

from maxbench.spec.model import Model

# What S/H, the attention scores, is multiplied with.
CONVENTIONS = {
    "full": 1.0,  # every S x S score counted, as most published figures do
    "causal": 0.5,  # only the half that a causal mask leaves
}


def params(m: Model) -> int:
    """Exact number of weights, each counted once (a tied head is not counted again)."""
    norm = m.embed * (2 if m.norm == "layernorm1p" else 1)
    attn = m.embed * m.head_dim * (2 * m.heads + 2 * m.kv_heads)
    mlp = m.embed * m.mlp * (m.gates + 1)
    if m.experts:
        mlp = mlp * m.experts + m.embed * m.experts
    layer = attn + mlp + norm * (4 if m.post_norm else 2)
    return m.layers * layer + norm + m.vocab * m.embed * (1 if m.tied else 2)


def per_sequence(
    m: Model, seq: int, convention: str = "full", kv_heads: int | None = None
) -> float:
    """FLOPs of one sequence of `seq` tokens. `convention` is a key of CONVENTIONS."""
    g = kv_heads or m.kv_heads
    scores = CONVENTIONS[convention] * seq / m.embed
    attention = 12 * m.layers * m.embed**2 * (1 + g / m.heads + scores)
    mlp = 6 * m.layers * m.mlp * m.embed * (m.gates + 1) * (m.top_k if m.experts else 1)
    return seq * (attention + mlp + 6 * m.vocab * m.embed)


def tokens_per_s(seq: int, gbs: int, step_s: float) -> float:
    """Tokens per second over all GPUs."""
    return seq * gbs / step_s


def days_to_1t(tokens_per_second: float) -> float:
    """Days to train on 1e12 tokens."""
    return 1e12 / tokens_per_second / 86400


def tflops_per_gpu(flops: float, gbs: int, step_s: float, gpus: int) -> float:
    """TFLOP/s per GPU, from the FLOPs of one sequence."""
    return gbs * flops / step_s / gpus / 1e12


def mfu(tflops: float, peak_tflops: float) -> float:
    """Model FLOPs utilisation, 0 to 1."""
    return tflops / peak_tflops
