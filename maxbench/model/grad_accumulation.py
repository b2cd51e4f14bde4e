"""Sums of gradients: how microbatches add up without a pass of their own.

The trick. A step differentiates with respect to `sums`, the gradients so far, and not with respect
to the weights; and what multiplies or looks up a weight says that the gradient of the former is

    sums + the gradient of the weight

So jax.grad of one microbatch's loss returns the sums to go on with, each layer's part added where
the layer's gradient is made, in the GEMM itself where XLA can; and quantized weights, which have no
gradient of their own, need none. add_to says it for a weight that is used as it is,
linear.linear for one that is multiplied. By themselves sums have no influence on the loss.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbench.quantization import Weight, by_layer


class GradAccumulator(NamedTuple):
    """Sums of a weight whose format remembers largest magnitudes: of those, the maximum."""

    grad: jax.Array  # like the weight
    amax: jax.Array  # of x and of dy, fp32 [2]


@jax.custom_vjp
def accumulate_into(sums, w):
    """The weights w, arrays; the gradient with respect to `sums` is sums + the gradient of w."""
    return w


accumulate_into.defvjp(
    lambda sums, w: (w, sums),
    lambda sums, dw: (jax.tree.map(lambda s, d: s + d.astype(s.dtype), sums, dw), None),
)


def zeros(weights, dtype):
    """No sums yet of a tree of weights, arrays and Weight."""

    def one(w):
        grad, scales = jnp.zeros(w.shape, dtype), getattr(w, "scales", None)
        return (
            grad if scales is None else GradAccumulator(grad, jnp.zeros(scales.shape, scales.dtype))
        )

    return jax.tree.map(one, weights, is_leaf=lambda w: isinstance(w, Weight))


def grads_of(sums):
    """A tree of sums as gradients alone."""
    is_sums = lambda x: isinstance(x, GradAccumulator)
    return jax.tree.map(lambda x: x.grad if is_sums(x) else x, sums, is_leaf=is_sums)


def amaxes_of(sums, stacked: bool):
    """The largest magnitudes of a tree of sums, [layers, gemms, 2] or None."""
    is_sums = lambda x: isinstance(x, GradAccumulator)
    found = [x.amax for x in jax.tree.leaves(sums, is_leaf=is_sums) if is_sums(x)]
    layers = None if stacked else len(sums["layers"])
    return by_layer(jnp.stack(found), layers) if found else None
