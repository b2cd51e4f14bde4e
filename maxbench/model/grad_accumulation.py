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

What a layer counts (step/state.py) comes out in the same way: record() returns the accumulator of a
Statistic with a count added as its cotangent.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxbench.quantization import SCALE, Weight, by_layer


class GradAccumulator(NamedTuple):
    """Accumulator of a weight whose format has an amax history: over microbatches it sums the
    gradients and takes the maximum of the amaxes."""

    grad: jax.Array  # like the weight
    amax: jax.Array  # of x and dy, fp32 [2]


class Statistic(NamedTuple):
    """Accumulator of what a layer counts, in place of the accumulator of a gradient."""

    value: jax.Array  # fp32


@flax.struct.dataclass
class LayerState:
    """Non-trainable state of a layer among its weights."""

    value: jax.Array  # fp32
    reduce: str = flax.struct.field(pytree_node=False)  # over microbatches: 'max' or 'sum'


def layer_state(module: nn.Module, name: str) -> Any:
    """Non-trainable state of a module, an array, or None if there is none."""
    state: Any = module.get_variable("params", name)
    return state.value if isinstance(state, LayerState) else state


def record(module: nn.Module, name: str, x: jax.Array, count: jax.Array) -> jax.Array:
    """Counts a statistic of a microbatch, for the update of the state `name`.

    Args:
      x: any array that the loss depends on.
      count: of this GPU, in the shape of the state.

    Returns:
      x, which must be used in its place: the statistic is added in its backward pass.
    """
    variables: Any = module.get_variable("params", name), module.get_variable("sums", name)
    state, sums = variables
    if sums is None:
        return x
    count = jax.lax.stop_gradient(count.astype(jnp.float32))
    return _record(state.reduce, x, sums, checkpoint_name(count, SCALE))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _record(_reduce, x, _sums, _count):
    return x


def _record_backward(reduce, saved, dx):
    sums, count = saved
    add = jnp.maximum if reduce == "max" else jnp.add
    return dx, Statistic(add(sums.value, count)), None


_record.defvjp(lambda _reduce, x, sums, count: (x, (sums, count)), _record_backward)


@jax.custom_vjp
def accumulate_into(sums: Any, w: Any) -> Any:
    """Returns w, a tree of arrays, whose gradient is added to `sums`: see the module."""
    return w


accumulate_into.defvjp(
    lambda sums, w: (w, sums),
    lambda sums, dw: (jax.tree.map(lambda s, d: s + d.astype(s.dtype), sums, dw), None),
)


def in_two(w: Any, sums: Any) -> tuple[Any, Any]:
    """Accumulators for two uses of weights w in one microbatch: `sums`, and empty ones. The
    cotangent of `sums` is that of both together."""
    is_state = lambda x: isinstance(x, LayerState)
    states = filter(is_state, jax.tree.leaves(w, is_leaf=is_state))
    return _in_two(tuple(x.reduce for x in states), sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_two(_reduces, sums):
    return sums, jax.tree.map(jnp.zeros_like, sums)


def _in_two_backward(reduces, _, cotangents):
    reduce = iter(reduces)  # of the statistics, which are in the order of their states

    def join(a, b):
        if isinstance(a, Statistic):
            add = jnp.maximum if next(reduce) == "max" else jnp.add
            return Statistic(add(a.value, b.value))
        if _has_amax(a):
            return GradAccumulator(a.grad + b.grad, jnp.maximum(a.amax, b.amax))
        return a + b

    return (jax.tree.map(join, *cotangents, is_leaf=is_accumulator),)


_in_two.defvjp(lambda *args: (_in_two(*args), None), _in_two_backward)


def zeros(weights: Any, dtype: Any) -> Any:
    """Empty accumulators of a tree of weights: arrays, quantization.Weight and LayerState."""

    def accumulator(w):
        if isinstance(w, LayerState):
            return Statistic(jnp.zeros_like(w.value))
        grad, scales = jnp.zeros(w.shape, dtype), getattr(w, "scales", None)
        if scales is None:
            return grad
        return GradAccumulator(grad, jnp.zeros(scales.shape, scales.dtype))

    return jax.tree.map(accumulator, weights, is_leaf=lambda w: isinstance(w, Weight | LayerState))


def _has_amax(x) -> bool:
    return isinstance(x, GradAccumulator)


def is_accumulator(x: Any) -> bool:
    """Whether a node of a tree of accumulators is a leaf that is more than an array."""
    return isinstance(x, GradAccumulator | Statistic)


def grads_of(sums: Any) -> Any:
    """The gradients in a tree of accumulators, without its statistics."""
    if isinstance(sums, dict):
        return {k: grads_of(v) for k, v in sums.items() if not isinstance(v, Statistic)}
    if _has_amax(sums):
        return sums.grad
    return tuple(map(grads_of, sums)) if isinstance(sums, tuple) else sums


def statistics_of(sums: Any) -> dict:
    """The statistics in a tree of accumulators, by the same keys."""
    found = {k: v if isinstance(v, Statistic) else statistics_of(v) for k, v in sums.items()
             if isinstance(v, Statistic | dict)}  # fmt: skip
    return {k: v for k, v in found.items() if v}


def amaxes_of(sums: Any, stacked: bool) -> Any:
    """The amaxes of x and dy in a tree of accumulators of layers, fp32 [layers, gemms, 2], or None.

    stacked: sums is one tree stacked over layers, and not a tuple of trees.
    """
    amaxes = [x.amax for x in jax.tree.leaves(sums, is_leaf=_has_amax) if _has_amax(x)]
    return by_layer(jnp.stack(amaxes), None if stacked else len(sums)) if amaxes else None
