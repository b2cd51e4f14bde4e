"""A mixer that the package does not have: a gated linear recurrence along the sequence."""

from typing import ClassVar

from maxbench.config.sublayers import Ends, Saved, Sublayer, register, unset


@register("gated_recurrence")
class GatedRecurrence(Sublayer):
    """In each channel of a head, h = a h + (1 - a) v with a gate a; its output is silu(q) h."""

    heads: int = unset()
    head_dim: int = unset()

    role = "mixer"
    axes: ClassVar = {"recurrence_inputs": (), "heads": ("tp",), "head_dim": ()}
    recurrence_inputs = property(lambda self: 3)  # a, v and q
    zeros_stay = True

    def weight_axes(self):
        inputs = "embed -> recurrence_inputs heads head_dim"
        return {"in/w": inputs, "out/w": "heads head_dim -> embed"}

    def scores(self, seq, causal=True, windows=True):
        return 2 * self.heads * self.head_dim

    def saved(self, run):
        width = self.heads * self.head_dim
        inputs, state = Saved("query", 3 * width, ("in/w",)), Saved("context", width, ("scores",))
        return inputs, state, Saved("attn_out", self.embed, ("out/w",))

    def refusal(self, run):
        cut = f"cp={run.layout.cp} cuts the sequence, along which a recurrence runs; use cp=1"
        return cut if run.layout.cp > 1 else ""

    def apply(self, module, x_bud, context, orders):
        import jax
        from jax.ad_checkpoint import checkpoint_name

        from maxbench.model.layers import out_std, projection, seq_major

        first = projection(self, "in", self.init_std, sequence="gather")
        x, first_token = first(seq_major(x_bud), orders.first)
        x_btnhk = checkpoint_name(seq_major(x), "query").astype("float32")
        a, v = jax.nn.sigmoid(x_btnhk[:, :, 0]), x_btnhk[:, :, 1]
        after = lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1])
        _, h_bthk = jax.lax.associative_scan(after, (a, (1 - a) * v), axis=1)
        h_bthk = checkpoint_name(h_bthk.astype(x.dtype), "context")
        y_bthk = h_bthk * jax.nn.silu(x_btnhk[:, :, 2]).astype(x.dtype)
        last = projection(self, "out", out_std(self), sequence="scatter")
        y, last_token = last(seq_major(y_bthk), orders.last)
        return checkpoint_name(seq_major(y), "attn_out"), Ends(last_token, first_token), None
