"""Pipeline parallelism over pp: one executor for any schedule, inside the one compiled step.

A scan over the ticks of a schedule.Schedule. Every stage runs the same program and reads its own
row of the table; a stage without work skips it by a conditional, collectives over the other axes
included, for all GPUs that take part in them are of the same stage. Differentiation is by hand,
layer by layer: a forward piece leaves its residuals in a slot, a backward piece reads them. So the
memory of activations is bounded by the schedule, not by the number of microbatches.
"""

import jax
import jax.numpy as jnp
from jax import lax

from maxbench import mesh, model
from maxbench.config import DTYPES, Run
from maxbench.layers import rope_angles
from maxbench.schedule import (
    BACKWARD,
    COLUMNS,
    EMBED,
    EMBED_BACKWARD,
    FORWARD,
    LOSS,
    layer_order,
    schedule,
)


def gradients(run: Run, places, w, batch):
    """Gradients of the sum of model.objective over all microbatches, for this GPU's weights.

    Args:
      places: tree like w of mesh.Place.
      w: compute weights of this GPU; 'layers' in the order of schedule.layer_order.
      batch: microbatch -> (tokens_bt, targets_bt).

    Returns:
      Gradients like w in precision.grads, and this GPU's shares of what is reported.
    """
    return _Pipeline(run, places, w, batch).run_ticks()


class _Layer:
    """The vjp of one layer in two halves that can stand far apart.

    Residuals are the leaves of the vjp but for the weights and the rope table, which the backward
    half is given again: they would otherwise be kept once per microbatch.
    """

    def __init__(self, run: Run, places):
        self.run, self.places = run, places
        self.rope = rope_angles(run.model, mesh.chunks(run.train.seq))
        self.structure = None

    def forward(self, w, x):
        """y, the auxiliary loss, and the residuals."""
        w = mesh.after(x, w)
        call = lambda w, x: model.layer(self.run, self.places, w, x, self.rope)
        (y, aux), vjp = jax.vjp(call, w, x)
        leaves, tree = jax.tree.flatten(vjp)
        given = [*jax.tree.leaves(w), *self.rope]
        known = [next((i for i, g in enumerate(given) if g is leaf), None) for leaf in leaves]
        self.structure = tree, known
        return y, aux, [leaf for leaf, i in zip(leaves, known, strict=True) if i is None]

    def backward(self, w, residuals, dy, daux):
        """Gradients of the weights and of x."""
        tree, known = self.structure
        w = mesh.after(dy, w)
        given, rest = [*jax.tree.leaves(w), *self.rope], iter(residuals)
        leaves = [next(rest) if i is None else given[i] for i in known]
        return jax.tree.unflatten(tree, leaves)((dy, daux))


class _Pipeline:
    """What stays the same over the ticks; the carry of the scan is a dict of arrays."""

    def __init__(self, run: Run, places, w, batch):
        a = run.layout
        self.run, self.places, self.batch = run, places, batch
        self.plan = schedule(run.train.schedule, a.pp, a.vp, a.microbatches)
        self.ends = {"embed": w["embed"], "head": w["head"]}
        chunked = lambda x: x.reshape(a.vp, -1, *x.shape[1:])
        self.chunks = jax.tree.map(chunked, w["layers"])
        order = layer_order(run.model.layers, a.pp, a.vp).reshape(a.pp, a.vp, -1)
        self.whole = bool((order >= 0).all())
        self.real = jnp.asarray(order >= 0)[mesh.index("pp")]  # [chunk, layer of the chunk]
        self.numbers = jnp.arange(order.shape[-1])
        self.layer = _Layer(run, places["layers"])
        u = run.train.seq // (a.cp * a.tp)
        self.x = jax.ShapeDtypeStruct((a.mbs, u, run.model.embed), w["embed"]["w"].dtype)
        self.daux = jnp.float32(1 / a.gbs)

    def run_ticks(self):
        rows = jnp.asarray(self.plan.table)[:, mesh.index("pp")]
        carry, _ = lax.scan(self.tick, self.start(), rows)
        unchunked = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), carry["layers"])
        return {**carry["ends"], "layers": unchunked}, carry["out"]

    def start(self):
        """Empty buffers. Each has one slot more than the schedule counts, for what is dropped."""
        plan, x = self.plan, self.x
        *_, residuals = jax.eval_shape(self.chunk_forward, 0, x)
        slots = lambda n, s: jnp.zeros((n + 1, *s.shape), s.dtype)
        zeros = lambda w: jnp.zeros(w.shape, DTYPES[self.run.precision.grads])
        return {
            "keep": jax.tree.map(lambda s: slots(plan.keep, s), residuals),
            "inbox": slots(plan.inbox, x),
            "grads": slots(plan.grads, x),
            "dx": jnp.zeros(x.shape, x.dtype),
            "layers": jax.tree.map(zeros, self.chunks),
            "ends": jax.tree.map(zeros, self.ends),
            "out": {"loss": jnp.zeros(()), "aux": jnp.zeros(())},
        }

    def tick(self, carry, row):
        """Forward, then backward. What they send travels during the other of the two."""
        at = dict(zip(COLUMNS, row, strict=True))
        carry = dict(carry)
        arrived = mesh.rotate(carry["dx"], "pp", -1)
        with jax.named_scope(FORWARD):
            made = lax.cond(at["f_micro"] >= 0, self.forward, self.no_forward, carry, at)
        y, residuals, dy, carry["ends"], carry["out"] = made
        carry["keep"] = jax.tree.map(
            lambda box, r: _put(box, at["f_keep"], r), carry["keep"], residuals
        )
        carry["grads"] = _put(_put(carry["grads"], at["g_put"], arrived), at["f_grad"], dy)
        arrived = mesh.rotate(y, "pp")
        with jax.named_scope(BACKWARD):
            done = lax.cond(at["b_micro"] >= 0, self.backward, self.no_backward, carry, at)
        carry["dx"], dw, carry["ends"] = done
        # Outside of the conditional, which would copy the whole sum.
        add = lambda g, d: g.at[jnp.maximum(at["b_chunk"], 0)].add(d.astype(g.dtype))
        carry["layers"] = jax.tree.map(add, carry["layers"], dw)
        carry["inbox"] = _put(carry["inbox"], at["x_put"], arrived)
        return carry, None

    # Forward: y, residuals, gradient of the loss, gradients of the ends, what is reported.

    def forward(self, carry, at):
        take = lambda: _take(carry["inbox"], at["f_from"])
        with jax.named_scope(EMBED):
            x = lax.cond(at["f_from"] < 0, lambda: self.embed(at["f_micro"]), take)
        y, aux, residuals = self.chunk_forward(at["f_chunk"], x)
        skip = lambda ends: (jnp.zeros(()), ends, jnp.zeros(self.x.shape, self.x.dtype))
        lossy = lambda ends: self.loss(at["f_micro"], y, ends)
        with jax.named_scope(LOSS):
            loss, ends, dy = lax.cond(at["f_grad"] >= 0, lossy, skip, carry["ends"])
        out = carry["out"]
        out = {"loss": out["loss"] + loss, "aux": out["aux"] + aux / self.run.layout.gbs}
        return y, residuals, dy, ends, out

    def no_forward(self, carry, at):
        *_, residuals = jax.eval_shape(self.chunk_forward, 0, self.x)
        zeros = lambda s: jnp.zeros(s.shape, s.dtype)
        residuals = jax.tree.map(zeros, residuals)
        return zeros(self.x), residuals, zeros(self.x), carry["ends"], carry["out"]

    def weights(self, c, number):
        """Of one layer, straight from the stack: a chunk's would be copied first."""
        take = lambda x: lax.dynamic_slice(
            x, (c, number, *[0] * (x.ndim - 2)), (1, 1, *x.shape[2:])
        )
        return jax.tree.map(lambda x: take(x)[0, 0], self.chunks)

    def embed(self, micro):
        return model.embed(self.run, self.ends, self.batch(micro)[0])

    def loss(self, micro, y, ends_grads):
        targets = self.batch(micro)[1]
        call = lambda ends, y: model.head_loss(self.run, self.places, ends, y, targets)
        loss, vjp = jax.vjp(call, self.ends, y)
        dends, dy = vjp(jnp.ones(()))
        return loss, _add(ends_grads, dends), dy

    def chunk_forward(self, c, x):
        """x through chunk c: y, its auxiliary losses, residuals [layers of the chunk, ...]."""

        def step(x, at):
            w, real = self.weights(c, at[0]), at[1]
            if self.whole:
                y, *rest = self.layer.forward(w, x)
                return y, rest
            shapes = jax.eval_shape(self.layer.forward, w, x)
            skip = lambda w, x: (
                x,
                *jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[1:]),
            )
            y, *rest = lax.cond(real, self.layer.forward, skip, w, x)
            return y, rest

        y, (aux, residuals) = lax.scan(step, x, (self.numbers, _take(self.real, c)))
        return y, jnp.sum(aux), residuals

    # Backward: gradient of the input, of the chunk's layers, and the sum of those of the ends.

    def backward(self, carry, at):
        c, dy = at["b_chunk"], _take(carry["grads"], at["b_from"])
        residuals = jax.tree.map(lambda box: _take(box, at["b_keep"]), carry["keep"])

        def step(dy, at):
            number, residuals, real = at
            w = self.weights(c, number)
            call = lambda dy: self.layer.backward(w, residuals, dy, self.daux)[::-1]
            if self.whole:
                return call(dy)
            return lax.cond(real, call, lambda dy: (dy, jax.tree.map(jnp.zeros_like, w)), dy)

        xs = self.numbers, residuals, _take(self.real, c)
        dx, dw = lax.scan(step, dy, xs, reverse=True)
        first = (c == 0) & (mesh.index("pp") == 0)
        with jax.named_scope(EMBED_BACKWARD):
            ends = lax.cond(first, self.embed_backward, self.no_embed, carry, at, dx)
        return dx, dw, ends

    def no_backward(self, carry, at):
        dw = jax.tree.map(lambda w: jnp.zeros(w.shape[1:], w.dtype), self.chunks)
        return jnp.zeros(self.x.shape, self.x.dtype), dw, carry["ends"]

    def embed_backward(self, carry, at, dx):
        tokens = self.batch(at["b_micro"])[0]
        call = lambda ends: model.embed(self.run, ends, tokens)
        return _add(carry["ends"], jax.vjp(call, self.ends)[1](dx)[0])

    def no_embed(self, carry, at, dx):
        return carry["ends"]


def _put(box, slot, value):
    """box with value in a slot; slot -1 is the spare one at the end, which nobody reads."""
    return lax.dynamic_update_index_in_dim(box, value, jnp.where(slot < 0, len(box) - 1, slot), 0)


def _take(box, slot):
    return lax.dynamic_index_in_dim(box, slot, keepdims=False)


def _add(grads, more):
    return jax.tree.map(lambda g, m: g + m.astype(g.dtype), grads, more)
