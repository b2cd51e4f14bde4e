"""Pipeline parallelism over pp: one executor for any schedule, inside the one compiled step.

A scan over the ticks of a schedule.Schedule. Every stage runs the same program and reads its own
row of the table; a stage without work skips it by a conditional, collectives over the other axes
included, for all GPUs that take part in them are of the same stage. Differentiation is by hand,
layer by layer: a forward piece leaves its residuals in a slot, a backward piece reads them. So the
memory of activations is bounded by the schedule, not by the number of microbatches.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from maxbench.mesh import axes, collectives
from maxbench.model import network
from maxbench.model.layers import rope_angles
from maxbench.spec.run import Run
from maxbench.step import slots
from maxbench.step.schedule import (
    BACKWARD,
    COLUMNS,
    EMBED,
    EMBED_BACKWARD,
    FORWARD,
    LOSS,
    schedule,
)


def gradients(run: Run, w, sums, batch):
    """Gradients of the sum of model.objective over all microbatches, for this GPU's weights.

    Args:
      w: compute weights of this GPU; 'layers' a tuple in the order of slots.order.
      sums: tree like w of zeros, in precision.grads.
      batch: microbatch -> (tokens_bt, targets_bt).

    Returns:
      Gradients like sums, and this GPU's shares of what is reported.
    """
    return _Pipeline(run, w, batch).run_ticks(sums)


class _Layer:
    """The vjp of one layer in two halves that can stand far apart.

    Residuals are the leaves of the vjp but for the weights, the sums of gradients and the rope
    table, which the backward half is given again: they would otherwise be kept once per microbatch.
    """

    def __init__(self, run: Run):
        self.run = run
        self.rope = rope_angles(run.model, axes.chunks(run.train.seq))
        self.structure = None

    def forward(self, w, sums, x):
        """y, the auxiliary loss, and the residuals. `sums` stand for those that backward gets."""
        w = collectives.after(x, w)
        call = lambda sums, x: network.layer(self.run, self.run.model, w, sums, x, self.rope)
        (y, aux), vjp = jax.vjp(call, sums, x)
        leaves, tree = jax.tree.flatten(vjp)
        given = self.given(w, sums)
        known = [next((i for i, g in enumerate(given) if g is leaf), None) for leaf in leaves]
        self.structure = tree, known
        return y, aux, [leaf for leaf, i in zip(leaves, known, strict=True) if i is None]

    def backward(self, w, sums, residuals, dy, daux):
        """The sums with the gradients of the weights, and the gradient of x."""
        tree, known = self.structure
        w = collectives.after(dy, w)
        given, rest = self.given(w, sums), iter(residuals)
        leaves = [next(rest) if i is None else given[i] for i in known]
        return jax.tree.unflatten(tree, leaves)((dy, daux))

    def given(self, w, sums):
        return [*jax.tree.leaves(w), *jax.tree.leaves(sums), *self.rope]


class _Pipeline:
    """What stays the same over the ticks; the carry of the scan is a dict of arrays."""

    def __init__(self, run: Run, w, batch):
        a = run.layout
        self.run, self.batch = run, batch
        self.plan = schedule(run.train.schedule, a.pp, a.vp, a.microbatches)
        self.ends = {"embed": w["embed"], "head": w["head"]}
        # [chunk][layer of the chunk]: each chunk's code names its own weights, copied from nowhere.
        self.chunks = self.chunked(w["layers"])
        self.real = slots.filled(slots.order(run.model.layers, a.pp, a.vp), a.pp, a.vp)
        self.layer = _Layer(run)
        u = run.train.seq // (a.cp * a.tp)
        self.x = jax.ShapeDtypeStruct((a.mbs, u, run.model.embed), w["embed"]["w"].dtype)
        self.daux = jnp.float32(1 / a.gbs)

    def chunked(self, layers):
        size = len(layers) // self.run.layout.vp
        return tuple(layers[i : i + size] for i in range(0, len(layers), size))

    def run_ticks(self, sums):
        rows = jnp.asarray(self.plan.table)[:, collectives.index("pp")]
        carry, _ = lax.scan(self.tick, self.start(sums), rows)
        layers = tuple(layer for chunk in carry["layers"] for layer in chunk)
        return {**carry["ends"], "layers": layers}, carry["out"]

    def start(self, sums):
        """Empty buffers. Each has one slot more than the schedule counts, for what is dropped."""
        plan, x = self.plan, self.x
        box = lambda n, s: jnp.zeros((n + 1, *s.shape), s.dtype)
        self.blank = _zeros(sums["layers"][0])
        return {
            "keep": jax.tree.map(lambda s: box(plan.keep, s), self.forward_shapes()[2]),
            "inbox": box(plan.inbox, x),
            "grads": box(plan.grads, x),
            "dx": jnp.zeros(x.shape, x.dtype),
            "layers": self.chunked(sums["layers"]),
            "ends": {name: sums[name] for name in self.ends},
            "out": {"loss": jnp.zeros(()), "aux": jnp.zeros(())},
        }

    def tick(self, carry, row):
        """Forward, then backward. What they send travels during the other of the two."""
        at = dict(zip(COLUMNS, row, strict=True))
        carry = dict(carry)
        arrived = collectives.rotate(carry["dx"], "pp", -1)
        y, residuals, dy = self.forward(carry, at)
        carry["keep"] = jax.tree.map(
            lambda box, r: _put(box, at["f_keep"], r), carry["keep"], residuals
        )
        arrived = collectives.beside(arrived, y)
        carry["grads"] = _put(_put(carry["grads"], at["g_put"], arrived), at["f_grad"], dy)
        arrived = collectives.rotate(y, "pp")
        self.backward(carry, at)
        arrived = collectives.beside(arrived, carry["dx"])
        carry["inbox"] = _put(carry["inbox"], at["x_put"], arrived)
        return carry, None

    def forward(self, carry, at):
        """y, residuals, gradient of the loss; what the loss leaves goes into the carry."""
        micro, take = at["f_micro"], lambda: _take(carry["inbox"], at["f_from"])
        with jax.named_scope(EMBED):
            first = (micro >= 0) & (at["f_from"] < 0)
            x = lax.cond(first, lambda: self.embed(self.ends, micro), take)
        chunks = [functools.partial(self.chunk_forward, c) for c in range(len(self.chunks))]
        with jax.named_scope(FORWARD):
            which = jnp.where(micro < 0, 0, at["f_chunk"] + 1)
            y, aux, residuals = lax.switch(which, [self.no_forward, *chunks], x)
        ends, out = carry["ends"], carry["out"]
        skip = lambda ends, y: (jnp.zeros(()), ends, jnp.zeros_like(y))
        lossy = lambda ends, y: self.loss(micro, y, ends)
        with jax.named_scope(LOSS):
            loss, carry["ends"], dy = lax.cond(at["f_grad"] >= 0, lossy, skip, ends, y)
        aux = aux / self.run.layout.gbs
        carry["out"] = {"loss": out["loss"] + loss, "aux": out["aux"] + aux}
        return y, residuals, dy

    def backward(self, carry, at):
        """Puts the gradient of the input into the carry, and adds those of the weights."""
        micro, c = at["b_micro"], at["b_chunk"]
        dy = _take(carry["grads"], at["b_from"])
        dx, sums = jnp.zeros_like(dy), list(carry["layers"])

        def chunk(number, carried):
            _, _, sums = carried
            residuals = jax.tree.map(lambda box: _take(box, at["b_keep"]), carry["keep"])
            return False, *self.chunk_backward(number, residuals, dy, sums)

        # A loop that runs once or not at all adds to its sums in place; a conditional would copy
        # them.
        with jax.named_scope(BACKWARD):
            for number in range(len(self.chunks)):
                start = ((micro >= 0) & (c == number), dx, sums[number])
                body = functools.partial(chunk, number)
                _, dx, sums[number] = lax.while_loop(lambda carried: carried[0], body, start)
        carry["layers"] = tuple(sums)
        embedded = lambda ends, dx: self.embed_backward(micro, dx, ends)
        with jax.named_scope(EMBED_BACKWARD):
            first = (micro >= 0) & (c == 0) & (collectives.index("pp") == 0)
            carry["ends"] = lax.cond(first, embedded, lambda ends, _: ends, carry["ends"], dx)
        carry["dx"] = dx

    # One chunk. Its code is repeated for each layer: a loop would copy what goes in and out.

    def is_real(self, c, i):
        """Whether slot i of chunk c holds a layer: a bool where it is the same on all stages."""
        real = self.real[:, c, i]
        return (
            bool(real[0]) if (real == real[0]).all() else jnp.asarray(real)[collectives.index("pp")]
        )

    def chunk_forward(self, c, x):
        """x through chunk c: y, its auxiliary losses, residuals of each of its layers."""
        total, residuals = jnp.zeros(()), []
        for i, w in enumerate(self.chunks[c]):
            skip = lambda w, sums, x: (x, *_zeros(self.layer_shapes(w, sums, x)[1:]))
            x, aux, kept = _if(self.is_real(c, i), self.layer.forward, skip, w, self.blank, x)
            total += aux
            residuals.append(kept)
        return x, total, residuals

    def layer_shapes(self, w, sums, x):
        return jax.eval_shape(self.layer.forward, w, sums, x)

    def forward_shapes(self):
        return jax.eval_shape(functools.partial(self.chunk_forward, 0), self.x)

    def no_forward(self, x):
        return _zeros(self.forward_shapes())

    def chunk_backward(self, c, residuals, dy, sums):
        """Gradient of the input of chunk c, and the sums with the gradients of its layers."""
        sums = list(sums)
        for i in reversed(range(len(self.chunks[c]))):
            skip = lambda w, sums, kept, dy: (sums, dy)
            call = lambda w, sums, kept, dy: self.layer.backward(w, sums, kept, dy, self.daux)
            args = self.chunks[c][i], sums[i], residuals[i], dy
            sums[i], dy = _if(self.is_real(c, i), call, skip, *args)
        return dy, tuple(sums)

    # The ends of the network.

    def embed(self, ends, micro):
        return network.embed(self.run.model, ends, self.batch(micro)[0])

    def embed_backward(self, micro, dx, ends_grads):
        call = lambda ends: self.embed(ends, micro)
        return _add(ends_grads, jax.vjp(call, self.ends)[1](dx)[0])

    def loss(self, micro, y, ends_grads):
        targets = self.batch(micro)[1]
        call = lambda ends, y: network.head_loss(self.run, ends, y, targets)
        loss, vjp = jax.vjp(call, self.ends, y)
        dends, dy = vjp(jnp.ones(()))
        return loss, _add(ends_grads, dends), dy


def _if(condition, yes, no, *args):
    """lax.cond, or no conditional at all where the condition is known."""
    if isinstance(condition, bool):
        return (yes if condition else no)(*args)
    return lax.cond(condition, yes, no, *args)


def _zeros(tree):
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)


def _put(box, slot, value):
    """box with value in a slot; slot -1 is the spare one at the end, which nobody reads."""
    return lax.dynamic_update_index_in_dim(box, value, jnp.where(slot < 0, len(box) - 1, slot), 0)


def _take(box, slot):
    return lax.dynamic_index_in_dim(box, slot, keepdims=False)


def _add(grads, more):
    return jax.tree.map(lambda g, m: g + m.astype(g.dtype), grads, more)
