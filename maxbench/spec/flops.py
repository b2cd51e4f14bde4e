"""Parameters, FLOPs by named convention, and the figures made from a step time.

FLOPs are of one sequence, forward and backward, without recomputation; a multiply-add is two.
With S sequence, H embed, F mlp, g KV heads, h heads of width d and value width v, V vocab, k
experts per token, summed over layers:

    S (sum of (6 H (h + g)(d + v)  +  6 S h (d + v)  +  6 F H k x (up-projections + 1))  +  6 V H)

Where h x d = H and v = d this is S (12 L H^2 (1 + g/h + S/H) + ...), the formula of the "model
flops" section of NVIDIA's recipes. A router is not counted.
"""

from maxbench.spec.model import Model

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
    mlp = m.embed * m.mlp * (m.gates + 1)
    return (mlp + m.embed) * m.experts if m.experts else mlp


def per_sequence(
    m: Model, seq: int, convention: str = "full", kv_heads: int | None = None
) -> float:
    """FLOPs of one sequence of `seq` tokens. `convention` is a key of CONVENTIONS."""
    g = kv_heads or m.kv_heads
    products = m.embed * (m.heads + g) + CONVENTIONS[convention] * seq * m.heads
    attention = 6 * m.layers * (m.head_dim + m.value_width) * products
    active = sum(n * kind.mlp * (kind.top_k if kind.experts else 1) for n, kind in m.stacks)
    mlp = 6 * active * m.embed * (m.gates + 1)
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
