"""Pipeline parallelism over pp: one executor for any schedule, inside the one compiled step.

A scan over the ticks of each phase of a schedule.Schedule. Every stage runs the same program and
reads its own row of the table: which microbatch goes forward and which backward, and where their
data is. Forward and backward pass of a tick are one piece of code without a condition, in which the
products of one run beside the communication of the other; a stage that has no work for one of them
does it for nothing, on zeros, while it would wait.

Chunks take turns: the weights of those that have theirs, and the sums of their gradients, stand in
buffers of their own, which the code names. They are copied when a turn begins, once in pp ticks
or train.microbatch_group_size; an FP8 weight, which is kept once, is transposed on its way to the forward pass.

Without a pipeline there may be one stage of one chunk (config/lowering.py): the forward pass of each
microbatch then goes beside the backward pass of the one before, and nothing takes turns.

Differentiation is by hand, layer by layer: a forward piece leaves its residuals in a slot, a
backward piece reads them. So the memory of activations is bounded by the schedule, not by the
number of microbatches.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxbench.config.run import Run
from maxbench.model import transformer
from maxbench.model.grad_accumulation import GradAccumulator
from maxbench.pipeline import buffers, layer_order, schedule
from maxbench.pipeline.embed_and_loss import WEIGHTS, EmbedAndLoss
from maxbench.pipeline.sublayer_vjp import SublayerVjp, drop_form, tick_order, with_fprop_form
from maxbench.pipeline.zero_overlap import ZeroOverlap, row_major
from maxbench.sharding import collectives, ordering


def gradients(run: Run, w, sums, batch, pieces: ZeroOverlap | None):
    """Gradients of the sum of model.objective over all microbatches, for this GPU's weights.

    Args:
      w: compute weights of this GPU; 'layers' stacked in the order of slots.order, as
        pieces.start has them.
      sums: tree like w of zeros, in precision.grads.
      batch: microbatch -> (tokens_bt, targets_bt).

    Returns:
      Gradients like sums, some of them reduced already (Pieces.finish), and this GPU's shares of
      what is reported.
    """
    return _Pipeline(run, w, batch, pieces).run_phases(sums)


class _Pipeline:
    """What stays the same over the ticks; the carry of the scans is a dict of arrays."""

    def __init__(self, run: Run, w, batch, pieces: ZeroOverlap | None):
        a = run.layout
        self.run, self.pieces = run, pieces
        self.head = pieces and pieces.head
        self.plan = schedule.schedule_for(run)
        # One stage of one chunk, whose turn it always is: its layers come as a tuple of trees.
        self.alone, self.fixed = a.pp == 1, {}
        self.ends = EmbedAndLoss(run, w, batch)
        # Layer by layer, before any box is made: XLA would turn what was gathered round afterwards.
        self.layers = jax.tree.map(row_major, w["layers"])
        self.real = layer_order.occupied(
            layer_order.layer_order(run.model.layers, a.pp, a.vp), a.pp, a.vp
        )
        self.size = self.real.shape[2]  # layers of a chunk
        self.shapes = jax.eval_shape(lambda: with_fprop_form(self.take_chunk(self.layers, 0)[0]))
        halves = lambda i: {name: SublayerVjp(run, name, i) for name in transformer.SUBLAYERS}
        self.halves = [halves(i) for i in range(self.size)]
        u = run.train.seq // (a.cp * a.tp)
        self.x = jax.ShapeDtypeStruct((a.mbs, u, run.model.embed), w["embed"]["w"].dtype)

    def run_phases(self, sums):
        plan, nothing = self.plan, ((0, 1), (0, 0), (0, 0))  # after the last tick
        table = np.pad(plan.table, nothing, constant_values=-1)
        newest = plan.microbatches - 1
        if not self.alone:  # what goes back of the newest comes round when all ticks are over
            table[-1, :, schedule.COLUMNS.index("recv_bwd_slot")] = (
                newest % plan.microbatches_per_embedding
            )
        rows, carry = jnp.asarray(table)[:, collectives.axis_index("pp")], self.start(sums)
        for name, ticks in plan.phases.items():
            if name == schedule.STEADY and not self.alone:
                # All begin with the last chunk. Copied before the fill, that would keep it.
                last = self.take_chunk(carry["weights"], plan.vp - 1)
                carry["w_backward"] = drop_form("fprop_operand", last)
                carry["sums"] = ordering.after(carry["sums"], ordering.token(carry["y"]))
            if name == schedule.COOLDOWN:
                self.keep(carry)
                carry.pop("head", None)  # the last loss has read it
            tick = functools.partial(self.tick, name != schedule.COOLDOWN, name != schedule.WARMUP)
            these, then = (rows[ticks.start + i : ticks.stop + i] for i in range(2))
            with jax.named_scope(name):
                carry, _ = lax.scan(tick, carry, (these, then))
        layers = carry["sums"]  # all stages end with chunk 0
        if not self.alone:
            layers = self.put_chunk(carry["stack"], 0, layers)
            carry = self.embed_back(newest - newest % plan.microbatches_per_embedding, None, carry)
        ends, out = ordering.serialize_on_cpu(carry["grads"], (carry["ends"], carry["out"]))
        return {**ends, "layers": layers}, out

    def start(self, sums):
        """Empty buffers. They are made when the layers' weights have come, whose way there takes
        memory too, while the head's does; where that comes in parts, beside the former. Work for
        nothing reads them, and a scale of 0 would make of its zeros what is no number. No two are
        of the same one: XLA would make one box, and copy it.
        """
        plan, x = self.plan, self.x
        ready = ordering.token([] if self.head else self.layers)
        ones = (1 + i % 64 / 64 + ready for i in itertools.count())
        box = lambda n, s: jnp.full((n, *s.shape), next(ones).astype(s.dtype))
        zeros = self.take_chunk(sums["layers"], 0)
        self.blank = zeros[0]
        forward = drop_form("dgrad_operand", with_fprop_form(self.take_chunk(self.layers, 0)))
        turning = {"weights": self.layers, "w_forward": forward, "stack": sums["layers"]}
        if self.alone:
            turning, self.fixed = (
                {},
                {"w_forward": forward, "w_backward": drop_form("fprop_operand", self.layers)},
            )
        w = self.both_forms(forward[0])
        passes = lambda x: {n: h.forward(w, self.blank, x)[2] for n, h in self.halves[0].items()}
        kept = {n: [s for _ in forward] for n, s in jax.eval_shape(passes, x).items()}
        carry = turning | {
            "sums": zeros,
            "keep": jax.tree.map(lambda s: box(plan.stash_slots, s), kept),
            "kept": jax.tree.map(lambda s: box(1, s)[0], kept),
            "kept_at": jnp.int32(0),
            "inbox": box(max(plan.input_slots, 2), x),  # XLA waits for no number that can only be 0
            "grads": box(max(plan.grad_slots, 2), x),
            "y": jnp.zeros(x.shape, x.dtype),
            "ys": box(plan.microbatches_per_loss, x),
            "ends": {name: sums[name] for name in WEIGHTS},
            "out": {"loss": jnp.zeros(()), "aux": jnp.zeros(())},
        }
        if self.head:
            w = jax.ShapeDtypeStruct(self.head.shape, self.head.w.dtype)
            carry["head"] = box(1, w)[0]
        return carry if self.alone else self.embed(0, carry)

    def tick(self, forward: bool, backward: bool, carry, rows):
        """A tick of a phase that has forward work, backward work, or both: layer by layer, then
        the ends of the network. y comes from the neighbour in the tick that reads it, beside what
        goes back; dx, which is read first, at the end of the one before. `rows` are of both.

        What has communication under a condition is by itself (collectives.after).
        """
        at, then = (dict(zip(schedule.COLUMNS, row, strict=True)) for row in rows)
        given, carry = carry, self.fixed | carry
        x = dy = held = read = None
        made, kept, sent = jnp.zeros(()), {half: [] for half in transformer.SUBLAYERS}, []
        if forward:
            made = filled = self.keep(carry)
        travels = forward != backward and self.pieces
        if backward:
            dy = buffers.read(carry["grads"], at["bwd_grad_slot"])
            dy = jnp.where(at["bwd_microbatch"] >= 0, dy, 0)
        for i in range(self.size):
            for back, on in (("mlp", "attn"), ("attn", "mlp")):
                if backward:
                    j = self.size - 1 - i
                    dy, held, made = self.half_back(carry, at, back, j, dy, made)
                    if not (forward or self.run.model.experts):  # no half is free
                        dy = ordering.after(dy, held.get("qkv wgrad"))
                    if back == "mlp":
                        read = held["down"], held["up x"]
                if forward and x is None:
                    at = ordering.serialize_on_cpu((dy, held, carry["sums"]), at)
                    x = self.input(carry, at, held, filled)
                    at, dy = ordering.serialize_on_cpu(x, (at, dy))
                if forward:
                    x, residuals, done = self.half_on(carry, at, on, i, x, held)
                    kept[on].append(residuals)
                    made += ordering.token(x) if on == "attn" else done["down"]
            if forward:
                read = done["up"]  # what its longest product reads has come
            if travels:
                pieces = self.travel(forward, carry, at, i, read)
                sent, arrived = sent + pieces, ordering.token(pieces)
                if self.head and forward and i == 0:  # likewise
                    tick = at["tick_in_phase"] + lax.optimization_barrier(buffers.token_index(read))
                    carry["head"] = self.head.gather(carry["head"], tick)
                    arrived += ordering.token(carry["head"])
                x, dy = (y if y is None else ordering.after(y, arrived) for y in (x, dy))
        if forward:
            ys = buffers.write(
                carry["ys"], at["fwd_microbatch"] % self.plan.microbatches_per_loss, x
            )
            carry |= {"y": x, "ys": ys, "kept": kept, "kept_at": at["fwd_stash_slot"]}
        if sent and forward:
            carry["weights"] = self.pieces.put_weights(carry["weights"], sent)
        elif sent:
            carry["stack"] = self.pieces.put_gradients(
                carry["stack"], sent, at["reducescatter_tick"]
            )
        done = [carry.get(x) for x in ("sums", "y", "out", "head")]
        at = ordering.serialize_on_cpu([*done, dy, *sent], at)
        self.output(forward, carry, at, then, dy, made)
        return {name: carry[name] for name in given}, None

    def input(self, carry, at, held, filled):
        """x of the forward piece: y of the tick before comes from the neighbour, and a turn is had.
        `filled` is keep()'s zero.

        Where there is a backward piece, `held` are the zeros of its first half: y is sent when the
        gradient that this gathers is there, and has two products' time to travel. The turn is had
        after it is sent, or the neighbour would wait for the turn, too; and where what arrives is
        put is known when the turn is over, so that it is had meanwhile.
        """
        if self.alone:
            return jnp.where(at["fwd_microbatch"] >= 0, self.ends.embed(at["fwd_microbatch"]), 0)
        y = ordering.serialize_on_cpu((carry["out"], carry["ends"]), carry["y"])
        with jax.named_scope(schedule.SEND_X):
            arrived = ordering.ppermute_after(y, "pp", held and held["down x"])
        put, turn = at["recv_fwd_slot"] + buffers.token_index(filled), at["fwd_chunk_switch"]
        if held:
            put, turn = (
                put + buffers.token_index(held["up"]),
                turn + buffers.token_index(held["down x"]),
            )
        load = lambda _: drop_form(
            "dgrad_operand", with_fprop_form(self.take_chunk(carry["weights"], turn))
        )
        with jax.named_scope(schedule.FORWARD_CHUNK_SWITCH):
            carry["w_forward"] = buffers.run_if(turn >= 0, load, carry["w_forward"])
        put += buffers.token_index(jax.tree.leaves(carry["w_forward"])[0])
        # Behind a barrier, or XLA reads x in one kernel with residuals, which come later: each is
        # a row of its box, by a number of the same table.
        inbox = (
            row_major(buffers.write(carry["inbox"], put, arrived)),
            at["fwd_microbatch"],
            at["fwd_input_slot"],
        )
        carry["inbox"], micro, slot = lax.optimization_barrier(inbox)
        return jnp.where(micro >= 0, buffers.read(carry["inbox"], slot), 0)

    def output(self, forward: bool, carry, at, then, dx, made):
        """What a tick leaves when its pieces are done. dx goes to the neighbour. Few ticks have the
        embedding, its gradient, a turn, which is had while dx is on its way, as in input(), or the
        loss: one decision says that there is none of them, not one each. It takes the host as long
        as a small kernel takes the GPU. `then` is the row of the next tick.

        A zero says that all has been read that is written, or XLA would copy it: dx waits for the
        sums, but where the last product is free (Half). It is behind a barrier, or each reader
        would make it anew.
        """
        few, back = {}, dx is not None
        if forward and not self.alone:
            embed = functools.partial(self.embed, then["embed_microbatch"])
            few[schedule.EMBED] = then["embed_microbatch"] >= 0, embed
        if back:
            micro, dxs = (
                (at["bwd_microbatch"], dx[None])
                if self.alone
                else (at["embed_grad_microbatch"], None)
            )
            embed_back = functools.partial(self.embed_back, micro, dxs)
            few[schedule.EMBED_BACKWARD] = self.alone or micro >= 0, embed_back
        if back and not self.alone:
            late = carry["sums"] if forward and self.halves[0]["attn"].free is not None else ()
            all_read = (dx, late, made) if forward else dx
            read = lax.optimization_barrier(buffers.token_index(all_read))
            turn = functools.partial(self.turn, carry["weights"], then, read)
            few[schedule.BACKWARD_CHUNK_SWITCH] = then["bwd_chunk_switch"] + read >= 0, turn
        if forward:
            loss = functools.partial(self.loss, at, carry["ys"], carry.get("head"))
            few[schedule.LOSS] = self.alone or at["loss_microbatch"] >= 0, loss

        def change(state):
            for name, (condition, one) in few.items():
                # One after the other on a CPU, too.
                state = state | {"out": ordering.serialize_on_cpu(state["ends"], state["out"])}
                with jax.named_scope(name):
                    state = buffers.run_if(condition, one, state)
            return state

        some = self.alone or functools.reduce(jnp.logical_or, [had for had, _ in few.values()])
        names = {"ends", "out", "inbox", "grads", "stack", "sums", "w_backward"} & carry.keys()
        with jax.named_scope(schedule.END_OF_TICK):
            carry |= buffers.run_if(some, change, {name: carry[name] for name in sorted(names)})
        if back:
            put, dx = (
                then["recv_bwd_slot"],
                ordering.serialize_on_cpu((carry["out"], carry["ends"]), dx),
            )
            put += 0 if self.alone else buffers.token_index(jax.tree.leaves(carry["w_backward"])[0])
            with jax.named_scope(schedule.SEND_DX):
                arrived = collectives.ppermute_shift(dx, "pp", -1)
            carry["grads"] = buffers.write(carry["grads"], put, arrived)

    def embed(self, micro, state):
        """x of the microbatches from `micro` on whose turn comes next, in the first inbox slots."""
        x = self.ends.embed(
            ordering.serialize_on_cpu(state["out"], micro), self.plan.microbatches_per_embedding
        )
        out = ordering.serialize_on_cpu(x, state["out"])
        return state | {"inbox": buffers.write(state["inbox"], 0, row_major(x)), "out": out}

    def embed_back(self, micro, dxs, state):
        """The embedding's gradients with those of the microbatches from `micro` on. In a pipeline
        what the first stage gives comes round to the last, as dxs."""
        if dxs is None:
            last = collectives.axis_index("pp") == self.plan.pp - 1
            dxs = jnp.where(
                last, row_major(state["grads"][: self.plan.microbatches_per_embedding]), 0
            )
        micro = ordering.serialize_on_cpu(state["out"], micro)
        grads = self.ends.embed_backward(micro, dxs, state["ends"]["embed"])
        return state | {"ends": state["ends"] | {"embed": grads}}

    def turn(self, weights, then, read, state):
        stack = self.put_chunk(state["stack"], then["bwd_chunk_writeback"], state["sums"])
        w, sums = (self.take_chunk(x, then["bwd_chunk_switch"] + read) for x in (weights, stack))
        return state | {"stack": stack, "sums": sums, "w_backward": drop_form("fprop_operand", w)}

    def loss(self, at, ys, head, state):
        """When the last chunk is done for the microbatches of a loss: it, and the gradients of what
        that gave them (Ends.loss). Left alone, jax 0.12 turns boxes round for it in each tick."""
        at = ordering.serialize_on_cpu(state["out"], at)
        loss, ends, dys = self.ends.loss(at["loss_microbatch"], row_major(ys), state["ends"], head)
        out = state["out"] | {"loss": state["out"]["loss"] + loss}
        grads = buffers.write(state["grads"], at["loss_grad_slot"], row_major(dys))
        return state | {"ends": ends, "out": out, "grads": grads}

    def travel(self, forward: bool, carry, at, i, read):
        """The pieces of a tick that go beside its i-th layer: weights in the fill, gradients in the
        drain. They start when `read` is known, and what the layer gives waits for them: left alone,
        XLA brings them all at once, before what a layer needs next. A turn is over by then; the
        boxes that it reads or writes would be copied otherwise."""
        held = lax.optimization_barrier(buffers.token_index(read))
        if not self.pieces.parts:
            return []
        if forward:
            return self.pieces.gather(at["allgather_tick"] + held, i)
        return self.pieces.reduce(carry["stack"], at["reducescatter_tick"] + held, i)

    def half_on(self, carry, at, half, i, x, held):
        """x through a half of layer i of the chunk, its residuals, and its products' zeros."""
        real = self.is_real(at["fwd_chunk"], i)
        w = self.both_forms(carry["w_forward"][i])
        beside = tick_order(self.run, i)
        y, aux, kept, made = self.halves[i][half].forward(w, self.blank, x, held, beside)
        aux = jnp.where(real & (at["fwd_microbatch"] >= 0), aux, 0) / self.run.layout.gbs
        carry["out"] = carry["out"] | {"aux": carry["out"]["aux"] + aux}
        return y, kept, made

    def half_back(self, carry, at, half, i, dy, made):
        """dy back through a half of layer i of the chunk, whose sums grow, and zeros of its
        products."""
        real = self.is_real(at["bwd_chunk"], i)
        work = real & (at["bwd_microbatch"] >= 0)
        kept = lambda box: row_major(buffers.read(box, at["bwd_stash_slot"]))
        residuals = jax.tree.map(kept, carry["keep"][half][i])
        w, sums = self.both_forms(carry["w_backward"][i]), list(carry["sums"])
        daux = jnp.where(work, jnp.float32(1 / self.run.layout.gbs), 0)
        new, dx, held, made = self.halves[i][half].backward(w, sums[i], residuals, dy, daux, made)
        sums[i] = _unless(work, new, sums[i])
        carry["sums"] = tuple(sums)
        return dx, held, made

    def keep(self, carry):
        """Puts the residuals of the tick before into their slots, which that has read, while dy is
        gathered; by rows, or XLA turns the boxes round. Returns a zero that is known then."""
        put = lambda box, kept: buffers.write(box, carry["kept_at"], row_major(kept))
        with jax.named_scope(schedule.STASH):
            carry["keep"] = jax.tree.map(put, carry["keep"], carry["kept"])
        return ordering.token(carry["keep"])

    # Chunks: trees, one for each of their layers.

    def take_chunk(self, stack, chunk):
        """The layers of a chunk, of a stack of all."""
        if self.alone:
            return stack
        layer = lambda i: jax.tree.map(lambda x: buffers.read(x, chunk * self.size + i), stack)
        return tuple(map(layer, range(self.size)))

    def put_chunk(self, stack, chunk, layers):
        """The stack with the layers of a chunk replaced."""
        for i, layer in enumerate(layers):
            at = chunk * len(layers) + i
            stack = jax.tree.map(lambda box, x, at=at: buffers.write(box, at, x), stack, layer)
        return stack

    def both_forms(self, layer):
        """A layer with zeros for the form of each Weight that its pass does not read (but)."""
        form = lambda part, whole: jax.tree.map(jnp.zeros_like, whole) if part is None else part
        return jax.tree.map(form, layer, self.shapes, is_leaf=lambda part: part is None)

    def is_real(self, chunk, i):
        """Whether slot i of a chunk of this stage holds a layer: one of zeros lets x and dy pass as
        they are, but for what is counted."""
        real = self.real[:, :, i]
        return True if real.all() else jnp.asarray(real)[collectives.axis_index("pp"), chunk]


def _unless(real, new, old):
    """Sums whose largest magnitudes are of real work alone. Gradients of other are zeros."""
    is_sums = lambda x: isinstance(x, GradAccumulator)
    keep = lambda new, old: new._replace(amax=jnp.where(real, new.amax, old.amax))
    each = lambda new, old: keep(new, old) if is_sums(new) else new
    return jax.tree.map(each, new, old, is_leaf=is_sums)
