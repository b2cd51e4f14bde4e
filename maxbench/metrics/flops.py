"""Parameter counts, FLOPs by named convention, and the figures that follow from a step time.

FLOPs are of one sequence, forward and backward pass, without recompute; a multiply-add is two.
Those of layers are sums over what their sublayers declare (config/sublayers.py). With S sequence,
H embed, F mlp, g KV heads, h heads of width d and value width v, V vocab, k experts per token, E
the shared expert's width and A the scores per query, summed over the L layers:

    S (sum of (6 H (h + g)(d + v)  +  6 A h (d + v)  +  6 H (F k + E) x (up-projections + 1))
       +  6 V H)

With multi-head latent attention, the weights of its five projections replace H (h + g)(d + v). If
h x d = H, v = d and A = S, this is S (12 L H^2 (1 + g/h + S/H) + ...), the formula of the "model
flops" section of NVIDIA's recipes. A layer of Mamba-2 has S times 6 H times the widths of its two
projections, and 6 times the products of its chunks (config.mixers.Mamba2.scores). Routers, norms,
biases, sinks and convolutions are not counted.
"""

import functools
from typing import NamedTuple

from maxbench.config.channels import Experts
from maxbench.config.model import Model
from maxbench.config.sublayers import Layer


class Convention(NamedTuple):
    """The scores of attention and the up-projections that a convention counts."""

    causal: bool  # only the scores that a causal mask keeps: half of S x S
    windows: bool = False  # only those inside a layer's window
    silu_gates: bool = False  # a gate only before SiLU: other gated MLPs count one up-projection
    mtp_inputs: bool = True  # the projection of the inputs of multi-token prediction


# `maxbench train` and `maxbench report` print the first two.
CONVENTIONS = {
    "full": Convention(causal=False),  # all S x S scores, as in most published figures
    "causal": Convention(causal=True, windows=True),
}
# Of published figures. Megatron-Bridge counts as `causal` since 0.5 (container 26.06), and as
# `bridge-0.4` before; models with Mamba-2 as `bridge-hybrid` (training/utils/flop_utils.py).
PUBLISHED_CONVENTIONS = CONVENTIONS | {
    "bridge-0.4": Convention(causal=True, silu_gates=True),
    "bridge-hybrid": Convention(causal=True, windows=True, mtp_inputs=False),
}


@functools.cache  # a search asks thousands of times
def params(m: Model) -> int:
    """Exact number of parameters, each counted once: a tied LM head adds none."""
    size = lambda weights: sum(w.size for w in weights.values())
    layers = sum(n * size(m.layer_weights(layer)) for n, layer in m.kinds)
    return layers + size(m.end_weights) + size(m.mtp_weights)


@functools.cache
def mtp_params(m: Model) -> int:
    """Parameters of multi-token prediction."""
    return sum(w.size for w in m.mtp_weights.values())


def expert_biases(m: Model) -> int:
    """Correction biases of the routers of all layers, which are state and no parameters here;
    published counts of DeepSeek-V3 and Kimi-K2 have them."""
    channels = [(n, layer.channel) for n, layer in m.kinds]
    return sum(n * c.experts for n, c in channels if isinstance(c, Experts) and c.expert_bias_rate)


def per_sequence(m: Model, seq: int, convention: str = "full") -> float:
    """FLOPs of one sequence of `seq` tokens. `convention` is a key of PUBLISHED_CONVENTIONS."""
    counted = PUBLISHED_CONVENTIONS[convention]
    layers = sum(n * layer_multiply_adds(layer, seq, counted) for n, layer in m.kinds)
    head = m.vocab * m.embed
    if m.mtp_layers:  # each time a layer, its input's projection, and the head again
        projection = counted.mtp_inputs * m.mtp_weights["mtp/input/projection/w"].multiply_adds
        mtp_layer = layer_multiply_adds(m.mtp_layer, seq, counted)
        layers += m.mtp_layers * (mtp_layer + projection + head)
    return 6 * seq * (layers + head)


def layer_multiply_adds(layer: Layer, seq: int, counted: Convention) -> float:
    """Multiply-adds of a layer for one token, forward pass."""
    return sum(
        sublayer.counted_multiply_adds(counted.silu_gates)
        + sublayer.scores(seq, counted.causal, counted.windows)
        for _, sublayer in layer.parts()
    )


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
