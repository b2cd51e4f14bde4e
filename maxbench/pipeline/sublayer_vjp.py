"""The vjp of a sublayer of a layer (attention or MLP) in two passes that can be far apart.

In a steady-state tick the attention of the layer in the forward pass runs between the MLP and the
attention of the layer in the backward pass, and its MLP runs after both: the tp collectives of each
overlap GEMMs of the other.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxbench.config.model import Model
from maxbench.config.run import Run
from maxbench.model import transformer
from maxbench.model.layer_stack import part_of
from maxbench.model.layers import rope_angles
from maxbench.quantization import Weight, row_major
from maxbench.sharding import mesh
from maxbench.sharding.ordering import Token


class SublayerVjp:
    """The vjp of one sublayer, split into a forward and a backward pass.

    Residuals are the leaves of the vjp except weights, gradients so far and the RoPE table. The
    backward pass gets those again; saved, they would be stashed once per microbatch.

    Args:
      name: of transformer.SUBLAYERS.
      layer: index of its layer in a chunk.
      kind: its Model.
    """

    def __init__(self, run: Run, name: str, layer: int, kind: Model):
        self.run, self.name, self.kind = run, name, kind
        # In FP8 over cp, the last wgrad of a tick overlaps the reduce-scatter of the output, which
        # has only half of the GEMMs that hide it otherwise. Without cp, `up` would wait for x after
        # dx.
        fp8_over_cp = run.format.quantized and run.layout.cp > 1 and not run.model.experts
        self.dx_unordered = fp8_over_cp and (name, layer) == ("attn", 0)
        self.rope = rope_angles(run.model, mesh.token_positions(run.train.seq))
        self.structure: tuple | None = None
        self.residual_count = 0  # of forward()

    def forward(
        self, layer: Any, grads: Any, x: jax.Array, wait_for: dict[str, Token | None]
    ) -> Any:
        """Runs the forward pass.

        Args:
          layer: weights of the layer.
          grads: gradients so far, as backward() gets them; only their shapes count here.
          x: input activation [b, u, d].
          wait_for: GEMM -> the token that its tp collective waits for.

        Returns:
          The output activation, the auxiliary loss, the residuals, and the token of each GEMM:
          known when it is computed (out, down) or when its input is all-gathered (qkv, up).
        """
        w, grads = part_of(self.name, layer), part_of(self.name, grads)
        wait_for = {name: jnp.full(3, 0.0 if t is None else t) for name, t in wait_for.items()}
        call = lambda grads, x, wait_for, issued: transformer.layer(
            self.run, self.kind, w, grads, x, self.rope, wait_for, issued,
            sublayer=self.name, dx_unordered=self.dx_unordered,
        )  # fmt: skip
        (y, tokens, aux), vjp = jax.vjp(call, grads, x, wait_for, jnp.zeros(()))
        leaves, tree = jax.tree.flatten(vjp)
        passed_again = self._passed_again(w, grads)
        index = lambda leaf: next((i for i, a in enumerate(passed_again) if a is leaf), None)
        again = list(map(index, leaves))
        self.structure = self.structure or (tree, again)
        residuals = [leaf for leaf, i in zip(leaves, again, strict=True) if i is None]
        self.residual_count = len(residuals)
        return y, aux, residuals, tokens

    def backward(
        self,
        layer: Any,
        grads: Any,
        residuals: Any,
        dy: jax.Array,
        daux: jax.Array,
        wait_for: Token,
    ) -> Any:
        """Runs the backward pass.

        Args:
          layer, grads: weights of the layer, and gradients so far.
          residuals: those of forward().
          dy, daux: gradients of the output activation and of the auxiliary loss.
          wait_for: the token that the all-gather of dy over tp waits for.

        Returns:
          The gradients with those of this sublayer added, the input gradient, and tokens:
          '<GEMM>.dgrad', '<GEMM>.all_gather', '<GEMM>.wgrad'.
        """
        tree, again = self.structure
        passed_again = self._passed_again(part_of(self.name, layer), part_of(self.name, grads))
        residuals = iter(residuals)
        leaves = [next(residuals) if i is None else passed_again[i] for i in again]
        first, last = transformer.SUBLAYERS[self.name]
        issued = {first: jnp.zeros(()), last: wait_for}
        new, dx, tokens, last_wgrad = jax.tree.unflatten(tree, leaves)((dy, issued, daux))
        operations = enumerate(("dgrad", "all_gather", "wgrad"))
        tokens = {f"{g}.{name}": t[i] for i, name in operations for g, t in tokens.items()}
        return grads | new, dx, tokens | {f"{last}.wgrad": last_wgrad}

    def backward_from_input(
        self,
        layer: Any,
        grads: Any,
        x: jax.Array,
        dy: jax.Array,
        daux: jax.Array,
        wait_for: Token,
    ) -> Any:
        """backward(), which recomputes the sublayer from its input activation."""
        unordered = dict.fromkeys(transformer.SUBLAYERS[self.name])
        residuals = self.forward(layer, grads, x, unordered)[2]
        return self.backward(layer, grads, residuals, dy, daux, wait_for)

    def _passed_again(self, w, grads):
        return [*jax.tree.leaves(w), *jax.tree.leaves(grads), *self.rope]


def drop_form(form: str, layers: Any) -> Any:
    """Layers without one operand of each Weight: the forward pass reads fprop_operand alone, the
    backward pass dgrad_operand."""
    return _map_weights(lambda w: w.replace(**{form: None}), layers)


def with_fprop_form(layers: Any) -> Any:
    """Layers with the fprop_operand of each Weight that is stored as its dgrad_operand alone.

    Row-major: otherwise XLA would transpose the whole stack of layers, in each tick.
    """
    stored = lambda operand: operand._replace(q=row_major(operand.q))
    transposed = lambda w: stored(w.arithmetic.make_fprop_operand(stored(w.dgrad_operand), w.gemm))
    fill = lambda w: w if w.fprop_operand is not None else w.replace(fprop_operand=transposed(w))
    return _map_weights(fill, layers)


def _map_weights(change, layers):
    is_weight = lambda w: isinstance(w, Weight)
    return jax.tree.map(lambda w: change(w) if is_weight(w) else w, layers, is_leaf=is_weight)
