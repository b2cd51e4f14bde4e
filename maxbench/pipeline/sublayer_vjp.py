"""The vjp of a sublayer of a layer (mixer or channel) in two passes that can be far apart.

In a steady-state tick the sublayers of the layer in the forward pass run between those of the layer
in the backward pass (tick_order.sublayers): the collectives of each overlap GEMMs of the other.
"""

from typing import Any

import jax
import jax.numpy as jnp

from maxbench.config.run import Run
from maxbench.config.sublayers import Ends, Layer, Sublayer
from maxbench.model import transformer
from maxbench.model.layer_stack import part_of
from maxbench.model.layers import rope_angles
from maxbench.quantization import Weight, row_major
from maxbench.sharding import mesh
from maxbench.sharding.ordering import Token

OPERATIONS = ("dgrad", "all_gather", "wgrad")  # of a GEMM's backward pass


class SublayerVjp:
    """The vjp of one sublayer, split into a forward and a backward pass.

    Residuals are the leaves of the vjp except weights, gradients so far, the RoPE table and the
    documents. The backward pass gets those again; saved, they would be stashed once per microbatch.

    Args:
      role: 'mixer' or 'channel'.
      layer: index of its layer in a chunk.
      sublayer: the sublayer, complete.
    """

    def __init__(self, run: Run, role: str, layer: int, sublayer: Sublayer):
        self.run, self.role, self.layer = run, role, Layer.alone(role, sublayer)
        # In FP8 over cp, the last wgrad of a tick overlaps the reduce-scatter of the output, which
        # has only half of the GEMMs that hide it otherwise. Without cp, the first GEMM of the
        # channel would wait for x after dx.
        fp8_over_cp = run.format.quantized and run.layout.cp > 1 and not run.model.has_experts
        self.dx_unordered = fp8_over_cp and (role, layer) == ("mixer", 0)
        self.rope = rope_angles(run.model, mesh.token_positions(run.train.seq))
        self.structure: tuple | None = None
        self.residual_count = 0  # of forward()

    def forward(
        self, layer: Any, grads: Any, x: jax.Array, wait_for: Ends, documents: jax.Array | None
    ) -> Any:
        """Runs the forward pass.

        Args:
          layer: weights of the layer.
          grads: gradients so far, as backward() gets them; only their shapes count here.
          x: input activation [b, u, d].
          wait_for: the tokens that the tp collectives of its GEMMs wait for, or None.
          documents: documents_bt of sublayers.Context, of this microbatch.

        Returns:
          The output activation, the auxiliary loss, the residuals, and Ends of tokens: known when
          the input of the first GEMM is all-gathered, and when the last GEMM is computed.
        """
        w, grads = part_of(self.role, layer), part_of(self.role, grads)
        token = lambda t: jnp.full(3, 0.0 if t is None else t)
        wait_for = Ends(first=token(wait_for.first), last=token(wait_for.last))
        call = lambda grads, x, wait_for, issued: transformer.layer(
            self.run, self.layer, w, grads, x, self.rope, wait_for, issued,
            dx_unordered=self.dx_unordered, documents_bt=documents,
        )  # fmt: skip
        (y, tokens, aux), vjp = jax.vjp(call, grads, x, wait_for, jnp.zeros(()))
        leaves, tree = jax.tree.flatten(vjp)
        passed_again = self._passed_again(w, grads, documents)
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
        documents: jax.Array | None,
    ) -> Any:
        """Runs the backward pass.

        Args:
          layer, grads: weights of the layer, and gradients so far.
          residuals: those of forward().
          dy, daux: gradients of the output activation and of the auxiliary loss.
          wait_for: the token that the all-gather of dy over tp waits for.
          documents: as in forward().

        Returns:
          The gradients with those of this sublayer added, the input gradient, and Ends of tokens
          by OPERATIONS.
        """
        tree, again = self.structure
        w, old = part_of(self.role, layer), part_of(self.role, grads)
        passed_again = self._passed_again(w, old, documents)
        residuals = iter(residuals)
        leaves = [next(residuals) if i is None else passed_again[i] for i in again]
        issued = Ends(first=jnp.zeros(()), last=wait_for)
        new, dx, tokens, last_wgrad = jax.tree.unflatten(tree, leaves)((dy, issued, daux))
        found = Ends({}, {})
        for i, name in enumerate(OPERATIONS):
            for of_gemm, token in zip(found, tokens, strict=True):
                of_gemm[name] = token[i]
        found.last["wgrad"] = last_wgrad
        return grads | new, dx, found

    def backward_from_input(
        self,
        layer: Any,
        grads: Any,
        x: jax.Array,
        dy: jax.Array,
        daux: jax.Array,
        wait_for: Token,
        documents: jax.Array | None,
    ) -> Any:
        """backward(), which recomputes the sublayer from its input activation."""
        residuals = self.forward(layer, grads, x, Ends(None, None), documents)[2]
        return self.backward(layer, grads, residuals, dy, daux, wait_for, documents)

    def _passed_again(self, w, grads, documents):
        return jax.tree.leaves((w, grads, *self.rope, documents))


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
