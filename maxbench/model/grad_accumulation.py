"""Gradient accumulation fused into the backward pass (Megatron's gradient_accumulation_fusion).

The trick: the step differentiates the loss with respect to gradient accumulators, `sums`, and not
with respect to the weights. An operation with a weight w has a custom VJP, in which

    cotangent of sums = sums + gradient of w

    accumulate_into(sums, w)   for a weight that is used as it is (norms, embedding)
    linear.linear(x, w, sums)  for a weight of a GEMM

so jax.grad of one microbatch's loss returns the accumulators that the next microbatch starts from:

    sums = zeros(weights, dtype)
    for each microbatch: sums = jax.grad(loss)(sums)

Each weight's gradient is added where it is computed, in the epilogue of the wgrad GEMM where XLA
can, instead of in a separate pass over all gradients; and quantized weights, which are not
differentiable, need no gradient. The value of the loss does not depend on the accumulators.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxbench.quantization import Weight, by_layer


class GradAccumulator(NamedTuple):
    """Accumulator of a weight whose format has an amax history: over microbatches it sums the
    gradients and takes the maximum of the amaxes."""

    grad: jax.Array  # like the weight
    amax: jax.Array  # of x and dy, fp32 [2]


@jax.custom_vjp
def accumulate_into(sums: Any, w: Any) -> Any:
    """Returns w, a tree of arrays, whose gradient is added to `sums`: see the module."""
    return w


accumulate_into.defvjp(
    lambda sums, w: (w, sums),
    lambda sums, dw: (jax.tree.map(lambda s, d: s + d.astype(s.dtype), sums, dw), None),
)


def zeros(weights: Any, dtype: Any) -> Any:
    """Empty accumulators of a tree of weights (arrays and quantization.Weight)."""

    def accumulator(w):
        grad, scales = jnp.zeros(w.shape, dtype), getattr(w, "scales", None)
        if scales is None:
            return grad
        return GradAccumulator(grad, jnp.zeros(scales.shape, scales.dtype))

    return jax.tree.map(accumulator, weights, is_leaf=lambda w: isinstance(w, Weight))


def _has_amax(x) -> bool:
    return isinstance(x, GradAccumulator)


def grads_of(sums: Any) -> Any:
    """The gradients in a tree of accumulators."""
    return jax.tree.map(lambda x: x.grad if _has_amax(x) else x, sums, is_leaf=_has_amax)


def amaxes_of(sums: Any, stacked: bool) -> Any:
    """The amaxes of x and dy in a tree of accumulators, fp32 [layers, gemms, 2], or None.

    stacked: sums['layers'] is one tree stacked over layers, and not a tuple of trees.
    """
    amaxes = [x.amax for x in jax.tree.leaves(sums, is_leaf=_has_amax) if _has_amax(x)]
    layers = None if stacked else len(sums["layers"])
    return by_layer(jnp.stack(amaxes), layers) if amaxes else None
