"""Two halves of a microbatch in turn: the two-batch overlap of DeepSeek-V3's inference and of
SGLang, in training. The all-to-alls of each half overlap kernels of the other.

Sublayers run in the order mixer of A, mixer of B, experts of A, experts of B, mixer of A of the
next layer, and so on. Each waits for the one before with what it needs last: experts with the
tokens that were sent to them, others with their input. So while B's mixer runs, A's tokens are sent
to the experts, and while B's experts run, A's outputs return. The backward pass is in the reverse
order, with the same overlap (ordering.signal).

The gradients of both halves are added to one accumulator (grad_accumulation.in_two), which costs a
kernel of its own where the wgrad GEMM would have added to it (bf16). Activations take no more
memory than those of the whole microbatch. It is for layers that are unrolled: a loop over layers
ends with an all-to-all that nothing overlaps.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxbench.config.channels import Experts
from maxbench.config.model import Model
from maxbench.config.sublayers import Ends, Layer
from maxbench.model import grad_accumulation, layer_stack
from maxbench.model.layer_stack import part_of
from maxbench.sharding import ordering


def run_layers(
    m: Model,
    layer: Callable,
    x_bud: jax.Array,
    layers: tuple,
    sums: tuple | None,
    documents_bt: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """layer_stack.run_layers() of unrolled layers, by halves of the sequences.

    Args:
      layer: (kind, w, sums, x_bud, documents_bt, wait_for, issued) -> x_bud, Ends of tokens and the
        auxiliary loss, as transformer.layer().
      x_bud: of an even number of sequences.
      documents_bt: as in sublayers.Context.
    """
    documents = [None] * 2 if documents_bt is None else jnp.split(documents_bt, 2)

    def sublayer(kind, role, w, sums, half, x_bud, turn):
        alone, part = Layer.alone(role, kind.part(role)), part_of(role, w)
        args = alone, part, sums and part_of(role, sums)
        if isinstance(kind.part(role), Experts):
            none = jnp.zeros(())
            wait_for = Ends(first=jnp.stack([turn, none, none]), last=None)
            more = {"wait_for": wait_for, "issued": none}
            x_bud, tokens, aux = layer(*args, x_bud, documents[half], **more)
            return x_bud, tokens.last, aux
        x_bud, _, aux = layer(*args, ordering.wait(x_bud, turn), documents[half])
        return *ordering.signal(x_bud), aux

    def step(kind, state, weights):
        (*halves, turn), (w, sums), total = state, weights, jnp.zeros(())
        of_half = [None] * 2 if sums is None else grad_accumulation.in_two(w, sums)
        for role, _ in kind.parts():
            for i in (0, 1):
                halves[i], turn, aux = sublayer(kind, role, w, of_half[i], i, halves[i], turn)
                total += aux
        return (*halves, turn), total

    start: Any = (*jnp.split(x_bud, 2), jnp.zeros(()))
    (*halves, _), aux = layer_stack.run_layers(m, step, start, layers, sums)
    return jnp.concatenate(halves), aux
