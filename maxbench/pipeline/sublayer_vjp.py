"""Layers of a pipeline, by the half (network.HALVES), each in two passes that can stand far apart.

In a tick the attention of the layer that goes forward stands between the MLP and the attention of
the layer that goes back, and its MLP after both: each communicates beside products of the other.
"""

import jax
import jax.numpy as jnp

from maxbench.config.run import Run
from maxbench.model import transformer
from maxbench.model.layers import rope_angles
from maxbench.pipeline.zero_overlap import row_major
from maxbench.quantization import Weight
from maxbench.sharding import mesh, ordering

# What a half that goes forward gathers or scatters -> the product beside which it does, of the half
# that goes back before it in the same tick, for dx or its weight (linear.Turn). The last scatter is
# left to the next two; y comes from the neighbour beside the product of 'up' for dx.
BESIDE = {"qkv": "up wgrad", "out": "down wgrad", "up": "out"}
# Experts' own communication takes turns with these.
EXPERTS = {"qkv": "down", "out": "up wgrad", "up": "out"}
# Of a tick's later layers in BF16, whose products are twice as long: x is scattered beside 'down',
# so that the gradient which that gathers has the last products of the layer before for itself.
LATER = BESIDE | {"x": "down"}
# In FP8, in microbatches of few tokens: x is gathered behind the gradient, which is needed first.
LATER_FP8, MANY = BESIDE | {"x": "down x"}, 8192


def tick_order(run: Run, i: int) -> dict[str, str]:
    """Which of these a tick's i-th layer has."""
    a = run.layout
    many = a.mbs * run.train.seq // a.cp >= MANY
    later = LATER if run.format.bytes > 1 else BESIDE if many else LATER_FP8
    return EXPERTS if run.model.experts else later if i > 0 else BESIDE


class SublayerVjp:
    """The vjp of one half of a layer in two passes.

    Residuals are the leaves of the vjp but for the weights, the sums of gradients and the rope
    table, which the backward pass is given again: they would otherwise be kept once per microbatch.
    """

    def __init__(self, run: Run, name: str, layer: int):
        self.run, self.name = run, name
        # In FP8 over cp a tick's last product for a weight runs beside y's scatter, which has half
        # of what it needs otherwise. Without cp, `up` would then wait for x, behind dx.
        fast = run.format.bytes == 1 and run.layout.cp > 1 and not run.model.experts
        self.free = () if fast and (name, layer) == ("attn", 0) else None
        self.rope = rope_angles(run.model, mesh.token_positions(run.train.seq))
        self.structure = None

    def of(self, layer):
        """Its part of a layer's weights, or of their sums."""
        return {name: part for name, part in layer.items() if name.startswith(self.name)}

    def forward(self, layer, sums, x, held=None, beside=BESIDE):
        """y, the auxiliary loss, the residuals, and the zeros that its products make (linear.Turn).

        `sums` stand for those that backward gets; `held` are zeros of the half that went back, of
        which `beside` says which is for what.
        """
        w, sums = self.of(layer), self.of(sums)
        if held and beside.get("x") in held:
            x = ordering.after(x, held[beside["x"]])
        held = {
            name: jnp.full(3, held[beside[name]] if held and name in beside else 0.0)
            for name in transformer.SUBLAYERS[self.name]
        }
        how = {"half": self.name, "free": self.free}
        call = lambda sums, x, held, made: transformer.layer(
            self.run, self.run.model, w, sums, x, self.rope, held, made, **how
        )
        (y, made, aux), vjp = jax.vjp(call, sums, x, held, jnp.zeros(()))
        leaves, tree = jax.tree.flatten(vjp)
        given = self.given(w, sums)
        known = [next((i for i, g in enumerate(given) if g is leaf), None) for leaf in leaves]
        self.structure = self.structure or (tree, known)
        kept = [leaf for leaf, i in zip(leaves, known, strict=True) if i is None]
        return y, aux, kept, made

    def backward(self, layer, sums, residuals, dy, daux, made):
        """The sums with the gradients of the weights, the gradient of x, and zeros (linear.Turn):
        of each product by its name, 'NAME x' when what it gathers is there, 'NAME wgrad' when its
        weight's gradient is made; and the last of these.

        `made` is the zero beside whose work dy is gathered.
        """
        tree, known = self.structure
        given, rest = self.given(self.of(layer), self.of(sums)), iter(residuals)
        leaves = [next(rest) if i is None else given[i] for i in known]
        first, last = transformer.SUBLAYERS[self.name]
        made = {first: jnp.zeros(()), last: made}
        new, dx, zeros, made = jax.tree.unflatten(tree, leaves)((dy, made, daux))
        at = {"": 0, " x": 1, " wgrad": 2}
        held = {name + of: zero[i] for name, zero in zeros.items() for of, i in at.items()}
        return sums | new, dx, held, made

    def given(self, w, sums):
        return [*jax.tree.leaves(w), *jax.tree.leaves(sums), *self.rope]


def drop_form(form: str, layers):
    """Layers without one form of each Weight: the forward pass reads 'col', the backward 'row'."""
    return _weights(lambda w: w.replace(**{form: None}), layers)


def with_fprop_form(layers):
    """Layers with both forms of each Weight that stands in one. They lie by rows, or XLA would turn
    the whole stack, in each tick."""
    by_rows = lambda form: form._replace(q=row_major(form.q))
    made = lambda w: by_rows(w.arithmetic.make_fprop_operand(by_rows(w.dgrad_operand), w.gemm))
    return _weights(
        lambda w: w.replace(fprop_operand=made(w)) if w.fprop_operand is None else w, layers
    )


def _weights(change, layers):
    is_weight = lambda w: isinstance(w, Weight)
    return jax.tree.map(lambda w: change(w) if is_weight(w) else w, layers, is_leaf=is_weight)
