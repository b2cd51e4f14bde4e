"""The pipeline's executor: interleaved 1F1B, or any other schedule, inside the one compiled step.

One lax.scan per phase of a schedule.Schedule: warm-up (forward passes), steady state (a forward and
a backward pass of different microbatches in each tick), cool-down (backward passes). All stages run
the same program; a stage reads its row of the schedule's table: which microbatch and chunk (virtual
stage) it runs, and which buffer slots it reads and writes. A stage without work in a tick computes
on zeros, as it would wait for the other stages otherwise.

In the steady state the sublayers of the two passes alternate, without a branch, so that the tp
collectives of one pass overlap GEMMs of the other. tick_order.py says which collective waits for
which GEMM.

Differentiation is by hand, one sublayer at a time: the forward pass stashes its residuals in a
slot, the backward pass reads them and recomputes what train.remat does not save. So the memory of
activations is bounded by the schedule and not by the number of microbatches.

The weights of the chunks that a stage runs, and their gradients, have buffers of their own. A chunk
switch copies them, once in train.microbatch_group_size (at least pp) ticks.

Without a pipeline there may be one stage of one chunk (Train.overlapped): the forward pass of a
microbatch then overlaps the backward pass of the one before.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxbench.config.run import Run
from maxbench.config.sublayers import ROLES, ByRole, Ends
from maxbench.model import layer_stack
from maxbench.model.grad_accumulation import Statistic, is_accumulator
from maxbench.pipeline import buffers, layer_order, schedule, tick_order
from maxbench.pipeline.embed_and_loss import WEIGHTS, EmbedAndLoss
from maxbench.pipeline.schedule import Row
from maxbench.pipeline.sublayer_vjp import OPERATIONS, SublayerVjp, drop_form, with_fprop_form
from maxbench.pipeline.zero_overlap import ZeroOverlap
from maxbench.quantization import row_major
from maxbench.sharding import collectives, ordering


class Metrics(NamedTuple):
    """This GPU's shares of the metrics, fp32 scalars."""

    aux: jax.Array
    loss: jax.Array
    mtp_loss: jax.Array | None = None  # with multi-token prediction

    def plus(self, more: Any) -> "Metrics":
        """With some metrics added, by name."""
        return self._replace(**{name: getattr(self, name) + x for name, x in more.items()})

    def asdict(self) -> dict[str, jax.Array]:
        """The metrics that the run has, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}


@flax.struct.dataclass(kw_only=True)
class Carry:
    """State that the scans over ticks carry. Fields that a run does not need are None."""

    end_grads: Any = None  # of the embedding and the head
    grad_slots: Any = None  # output gradients, [slots, b, u, d]
    head_weight: Any = None  # if it is all-gathered in slices
    input_slots: Any = None  # input activations, [slots, b, u, d]
    stash: Any = None  # residuals, ByRole of [per layer of a chunk: arrays [slots, ...]]
    residuals: Any = None  # of the tick before, ByRole of [per layer of a chunk: arrays]
    residual_slot: Any = None  # and their slot
    metrics: Metrics
    layer_grads: Any = None  # of all chunks, arrays [slots of layers, ...]
    chunk_grads: Any = None  # of the backward chunk, {stack: one tree per entry}
    bwd_weights: Any = None  # of the backward chunk, {stack: one tree per entry}
    fwd_weights: Any = None  # of the forward chunk, {stack: one tree per entry}
    layer_weights: Any = None  # of all chunks, arrays [slots of layers, ...]
    output: Any = None  # the output activation of the tick before, [b, u, d]
    loss_inputs: Any = None  # output activations until their loss, [microbatches, b, u, d]


# The fields that the branches at the end of a tick update.
BRANCH_STATE = (
    "end_grads", "grad_slots", "input_slots", "metrics", "layer_grads", "chunk_grads",
    "bwd_weights",
)  # fmt: skip
# The fields that backward passes read or write: None where there are none.
BACKWARD_STATE = (
    "end_grads", "grad_slots", "stash", "residuals", "residual_slot", "layer_grads", "chunk_grads",
)  # fmt: skip


@dataclasses.dataclass
class Tick:
    """One tick while it is traced.

    Attributes:
      now, following: rows of this stage, of this tick and of the next one.
      fwd_documents, bwd_documents: documents_bt of the microbatches of the two passes, or None.
      x: the activation between two sublayers of the forward pass; None until the input is received.
      dy: the gradient between two sublayers of the backward pass.
      residuals: of the sublayers so far.
      slices: ZeRO slices (zero_overlap.py) that were all-gathered or reduce-scattered.
    """

    phase: str
    forward: bool
    backward: bool
    now: Row
    following: Row
    tokens: ordering.Tokens
    fwd_documents: Any = None
    bwd_documents: Any = None
    x: Any = None
    dy: Any = None
    residuals: ByRole = dataclasses.field(default_factory=lambda: ByRole([], []))
    slices: list = dataclasses.field(default_factory=list)


class Branch(NamedTuple):
    """Work that only few ticks have. A condition that is True is no branch."""

    name: str  # its scope in the compiled program
    condition: Any
    change: Callable[[Carry], Carry]


class Executor:
    """Runs a schedule. Subclasses say where activations come from, and what follows a tick.

    Args:
      w: compute weights of this GPU; 'layers' as ZeroOverlap.initial_weights returns them, in the
        order of layer_order.
      batch: microbatch -> (tokens_bt, targets_bt).
      zero: ZeRO slices in warm-up and cool-down, or None.
      documents, share: as in gradients.executor().
    """

    def __init__(
        self,
        run: Run,
        w,
        batch,
        zero: ZeroOverlap | None,
        documents: Callable,
        share: jax.Array | None,
    ):
        a = run.layout
        self.run, self.zero = run, zero
        self.documents = lambda microbatch: documents(batch(microbatch)[0])
        self.residuals: dict[Any, list] = {}  # shapes, by sublayer
        self.head = zero and zero.head
        self.plan = schedule.schedule_for(run)
        self.ends = EmbedAndLoss(run, w, batch, share)
        # Row-major before any buffer is created: XLA would transpose all-gathered weights later.
        self.layers = jax.tree.map(row_major, w["layers"])
        self.placement = layer_order.placement(run)
        self.layers_per_chunk = self.placement.slots_per_chunk
        self.shapes = jax.eval_shape(lambda: with_fprop_form(self.chunk(self.layers, 0)))
        self.vjps = {
            role: [
                [SublayerVjp(run, role, i, choice.sublayer) for choice in slot.choices]
                for i, slot in enumerate(slots)
            ]
            for role, slots in self.placement.slots.items()
        }
        u = run.train.seq // (a.cp * a.tp)
        self.activation = jax.ShapeDtypeStruct((a.mbs, u, run.model.embed), w["embed"]["w"].dtype)

    def gradients(self, grads: Any) -> Any:
        """Gradients of all microbatches, added to `grads` (zeros), and this GPU's metrics."""
        rows = self.rows_of_stage()
        carry = self.initial_carry(grads)
        for phase in self.plan.phases:
            if phase == schedule.STEADY:
                carry = self.begin_steady_state(carry)
            if phase == schedule.COOLDOWN:
                carry, _ = self.write_stash(carry)
                carry = carry.replace(head_weight=None)  # the last loss has read it
            carry = self.run_phase(phase, rows, carry)
        return self.finish(carry)

    def metrics(self, grads: Any) -> dict[str, jax.Array]:
        """This GPU's metrics of all microbatches, by the forward passes of the schedule alone. Of
        `grads` only the shapes count."""
        rows = self.rows_of_stage()
        carry = self.initial_carry(grads).replace(**dict.fromkeys(BACKWARD_STATE))
        for phase in (schedule.WARMUP, schedule.STEADY):
            carry = self.run_phase(phase, rows, carry)
        return carry.metrics.asdict()

    def rows_of_stage(self) -> jax.Array:
        """table() of this stage."""
        return jnp.asarray(self.table())[:, collectives.axis_index("pp")]

    def run_phase(self, phase: str, rows: jax.Array, carry: Carry) -> Carry:
        """The scan over the ticks of a phase."""
        ticks = self.plan.phases[phase]
        now, following = (rows[ticks.start + i : ticks.stop + i] for i in range(2))
        with jax.named_scope(phase):
            tick = functools.partial(self.tick, phase)
            return lax.scan(tick, carry, (now, following))[0]

    def tick(self, phase: str, carry: Carry, rows: Any) -> Any:
        """One tick: at most one forward and one backward pass through a chunk, of different
        microbatches."""
        forward = phase != schedule.COOLDOWN
        backward = phase != schedule.WARMUP and carry.grad_slots is not None
        now, following = map(Row._make, rows)
        t = Tick(phase, forward, backward, now, following, ordering.Tokens({}))
        if self.run.train.document_end is not None:
            t.fwd_documents = self.documents(now.fwd_microbatch) if forward else None
            t.bwd_documents = self.documents(now.bwd_microbatch) if backward else None
        if forward and carry.stash is not None:
            carry, written = self.write_stash(carry)
            t.tokens.emit("stash.write", written)
        if backward:
            t.dy = self.output_grad(carry, t)
        for i in range(self.layers_per_chunk):
            t.tokens.order = tick_order.tick_order(self.run, phase, i)
            for name, role in tick_order.sublayers(self.run):
                if name == "bwd" and backward:
                    carry = self.backward_sublayer(carry, t, role, self.layers_per_chunk - 1 - i)
                if name == "fwd" and forward:
                    carry = carry if i or role == "channel" else self.receive_input(carry, t)
                    carry = self.forward_sublayer(carry, t, role, i)
            if self.zero and phase != schedule.STEADY:
                carry = self.zero_slices(carry, t, i, self.zero)
        return self.end_tick(carry, t), None

    def forward_sublayer(self, carry: Carry, t: Tick, role: str, i: int) -> Carry:
        """t.x through a sublayer of layer i of the forward chunk."""
        slot = self.placement.slots[role][i]
        if not slot.choices:
            getattr(t.residuals, role).append([])
            return carry
        t.x = ordering.after(t.x, t.tokens.wanted_by(f"fwd.{role}.input"))
        wait_for = Ends(
            first=t.tokens.wanted_by(f"fwd.{role}.first.all_gather"),
            last=t.tokens.wanted_by(f"fwd.{role}.last.reduce_scatter"),
        )
        has_layer = self.has_layer(t.now.fwd_chunk, i)
        forward = self.forward_by_kind if slot.table is not None else self.forward_one_kind
        t.x, aux, residuals, tokens = forward(carry, t, role, i, wait_for)
        getattr(t.residuals, role).append(residuals)
        t.tokens.emit(f"fwd.{role}.first.all_gather", tokens.first)
        t.tokens.emit(f"fwd.{role}.last.gemm", tokens.last)
        t.tokens.emit(f"fwd.{role}.output", ordering.token(t.x))
        aux = jnp.where(has_layer & (t.now.fwd_microbatch >= 0), aux, 0) / self.run.layout.gbs
        return carry.replace(metrics=carry.metrics._replace(aux=carry.metrics.aux + aux))

    def forward_one_kind(
        self, carry: Carry, t: Tick, role: str, i: int, wait_for: Any, choice: int = 0
    ) -> Any:
        """SublayerVjp.forward() of a sublayer that is alike on all chunks, or of one choice."""
        at = self.placement.slots[role][i].choices[choice]
        w = self.with_both_forms(at, self.fwd_weights(carry))
        vjp = self.vjps[role][i][choice]
        return vjp.forward(w, self.shape_of_grads(at), t.x, wait_for, t.fwd_documents)

    def forward_by_kind(self, carry: Carry, t: Tick, role: str, i: int, wait_for: Any) -> Any:
        """SublayerVjp.forward() of the kind that the chunk has in slot i, by a branch.

        Residuals are those of the most frequent kind. Another kind stashes its input alone, in
        place of a residual of the same shape if there is one, and its backward pass recomputes it.
        """
        index = self.choice_index(role, i, t.now.fwd_chunk, t.now.fwd_microbatch)
        shapes, where = self.residual_shapes(role, i)
        zeros = lambda: [jnp.zeros(s.shape, s.dtype) for s in shapes]
        input_alone = lambda x: [x if j == where else z for j, z in enumerate(zeros())]
        slot = self.placement.slots[role][i]

        def run(choice, x):
            if choice == len(slot.choices):
                tokens = Ends(*[jnp.zeros(())] * 2)
                return x, jnp.zeros(()), zeros(), tokens
            at = dataclasses.replace(t, x=x)
            y, aux, residuals, tokens = self.forward_one_kind(carry, at, role, i, wait_for, choice)
            if choice:
                residuals = input_alone(x)
            elif len(residuals) < len(shapes):
                residuals = [*residuals, jnp.zeros_like(x)]
            return y, aux, residuals, tokens

        choices = range(len(slot.choices) + 1)
        with jax.named_scope(schedule.FORWARD_KIND):
            return lax.switch(index, [functools.partial(run, choice) for choice in choices], t.x)

    def backward_sublayer(self, carry: Carry, t: Tick, role: str, i: int) -> Carry:
        """t.dy back through a sublayer of layer i of the backward chunk."""
        slot = self.placement.slots[role][i]
        if not slot.choices:
            return carry
        t.dy = ordering.after(t.dy, t.tokens.wanted_by(f"bwd.{role}.input"))
        backward = self.backward_by_kind if slot.table is not None else self.backward_one_kind
        grads, tokens = backward(carry, t, role, i)
        for event, token in tokens.items():
            t.tokens.emit(f"bwd.{role}.{event}", token)
        t.dy = ordering.after(t.dy, t.tokens.wanted_by(f"bwd.{role}.output"))
        return carry.replace(chunk_grads=grads())

    def read_residuals(self, carry: Carry, t: Tick, role: str, i: int) -> Any:
        read = lambda stash: row_major(buffers.read(stash, t.now.bwd_stash_slot))
        return jax.tree.map(read, getattr(carry.stash, role)[i])

    def backward_one_kind(self, carry: Carry, t: Tick, role: str, i: int) -> Any:
        """t.dy back through a sublayer that is alike on all chunks: a function that returns the
        gradients of the chunk, and tokens."""
        has_work = self.has_layer(t.now.bwd_chunk, i) & (t.now.bwd_microbatch >= 0)
        residuals = self.read_residuals(carry, t, role, i)
        at = self.placement.slots[role][i].choices[0]
        w = self.with_both_forms(at, self.bwd_weights(carry))
        daux = jnp.where(has_work, jnp.float32(1 / self.run.layout.gbs), 0)
        wait_for = self.wait_of_backward(t, role)
        old = carry.chunk_grads[at.stack][at.entry]
        vjp = self.vjps[role][i][0]
        documents = t.bwd_documents
        new, t.dy, tokens = vjp.backward(w, old, residuals, t.dy, daux, wait_for, documents)
        kept = lambda: _keep_counts(has_work, new, old)
        ends = tokens._asdict()
        events = {f"{end}.{op}": ends[end][op] for op in OPERATIONS for end in ends}
        return lambda: _with_entry(carry.chunk_grads, at, kept()), events

    def backward_by_kind(self, carry: Carry, t: Tick, role: str, i: int) -> Any:
        """backward_one_kind() of the kind that the chunk has in slot i, by a branch for each kind:
        a branch that is not taken changes nothing and copies nothing."""
        index = self.choice_index(role, i, t.now.bwd_chunk, t.now.bwd_microbatch)
        residuals = self.read_residuals(carry, t, role, i)
        wait_for, daux = self.wait_of_backward(t, role), jnp.float32(1 / self.run.layout.gbs)
        _, where = self.residual_shapes(role, i)
        none = dict.fromkeys(OPERATIONS, jnp.zeros(()))
        tokens, dy, documents = Ends(none, none), t.dy, t.bwd_documents
        chunk_grads = carry.chunk_grads
        slot = self.placement.slots[role][i]
        for choice, (at, vjp) in enumerate(zip(slot.choices, self.vjps[role][i], strict=True)):
            w = self.with_both_forms(at, self.bwd_weights(carry))

            def change(state, choice=choice, vjp=vjp, w=w):
                grads, dy, _ = state
                if choice:
                    x = residuals[where]
                    new = vjp.backward_from_input(w, grads, x, dy, daux, wait_for, documents)
                else:
                    own = residuals[: vjp.residual_count]
                    new = vjp.backward(w, grads, own, dy, daux, wait_for, documents)
                return new

            state = chunk_grads[at.stack][at.entry], dy, tokens
            with jax.named_scope(schedule.OTHER_KIND if choice else schedule.FREQUENT_KIND):
                grads, dy, tokens = buffers.run_if(index == choice, change, state)
            chunk_grads = _with_entry(chunk_grads, at, grads)
        t.dy = dy
        ends = tokens._asdict()
        return lambda: chunk_grads, {
            f"{end}.{op}": ends[end][op] for end in ends for op in ends[end]
        }

    def wait_of_backward(self, t: Tick, role: str) -> ordering.Token:
        """The token that the all-gather of a sublayer's output gradient waits for."""
        wait_for = t.tokens.wanted_by(f"bwd.{role}.last.all_gather")
        return jnp.zeros(()) if wait_for is None else wait_for

    def choice_index(self, role: str, i: int, chunk: Any, microbatch: Any) -> jax.Array:
        """The index in Slot.choices of this stage's chunk; their number if slot i is empty, or if
        there is no microbatch. It is the same on all GPUs of a stage."""
        slot = self.placement.slots[role][i]
        index = jnp.asarray(slot.table)[collectives.axis_index("pp"), chunk]
        return jnp.where(microbatch >= 0, index, len(slot.choices))

    def zero_slices(self, carry: Carry, t: Tick, i: int, zero: ZeroOverlap) -> Carry:
        """Communicates the ZeRO slices of a tick that go with layer i: weights in the warm-up,
        gradients in the cool-down.

        They start late in the layer, and the next layer waits for them: unordered, XLA would move
        all of them before the first collective that a layer needs, and copy the buffers that a
        chunk switch reads or writes.
        """
        event = "zero.all_gather" if t.forward else "zero.reduce_scatter"
        started = t.tokens.of(event)
        token = ordering.index_token(started)
        slices = []
        if zero.slices_per_layer and t.forward:
            slices = zero.all_gather_slices(t.now.allgather_tick + token, i)
        elif zero.slices_per_layer:
            tick = t.now.reducescatter_tick + token
            slices = zero.reduce_scatter_slices(self.sliced(carry.layer_grads), tick, i)
        t.slices += slices
        done = ordering.token(slices)
        if self.head and t.forward and i == 0:
            tick = t.now.tick_in_phase + ordering.index_token(started)
            carry = carry.replace(head_weight=self.head.all_gather_slice(carry.head_weight, tick))
            done += ordering.token(carry.head_weight)
        t.tokens.emit(event, done)
        if t.forward:
            t.x = ordering.after(t.x, t.tokens.wanted_by("fwd.next_layer"))
        else:
            t.dy = ordering.after(t.dy, t.tokens.wanted_by("bwd.next_layer"))
        return carry

    def sliced(self, layers: Any) -> Any:
        """The stacks of stacked layers that have ZeRO slices."""
        names = self.placement.sliced
        return layers if names == ("",) else {name: layers[name] for name in names}

    def with_sliced(self, layers: Any, new: Any) -> Any:
        """Stacked layers with sliced() of them replaced."""
        return new if self.placement.sliced == ("",) else layers | new

    def end_tick(self, carry: Carry, t: Tick) -> Carry:
        """Stores the results of a tick, runs its branches and sends the input gradient."""
        if t.forward:
            t.x = ordering.after(t.x, t.tokens.wanted_by("fwd.output"))
            slot = t.now.fwd_microbatch % self.plan.microbatches_per_loss
            loss_inputs = buffers.write(carry.loss_inputs, slot, t.x)
            carry = carry.replace(output=t.x, loss_inputs=loss_inputs)
            if carry.stash is not None:
                carry = carry.replace(residuals=t.residuals, residual_slot=t.now.fwd_stash_slot)
        if self.zero and t.slices and t.forward:
            layers = self.zero.write_weights(self.sliced(carry.layer_weights), t.slices)
            carry = carry.replace(layer_weights=self.with_sliced(carry.layer_weights, layers))
        elif self.zero and t.slices:
            tick = t.now.reducescatter_tick
            grads = self.zero.write_gradients(self.sliced(carry.layer_grads), t.slices, tick)
            carry = carry.replace(layer_grads=self.with_sliced(carry.layer_grads, grads))
        carry = self.run_branches(carry, t)
        return self.send_input_grad(carry, t) if t.backward else carry

    def run_branches(self, carry: Carry, t: Tick) -> Carry:
        """Runs the branches of a tick. Few ticks have any: one host-side branch decides that there
        is none, and not one each. It costs the host as much time as a small kernel takes."""
        branches = self.branches(carry, t)

        def change(state):
            for branch in branches:
                with jax.named_scope(branch.name):
                    state = buffers.run_if(branch.condition, branch.change, state)
            return state

        conditions = [branch.condition for branch in branches]
        always = any(condition is True for condition in conditions)
        some = always or functools.reduce(jnp.logical_or, conditions)
        with jax.named_scope(schedule.END_OF_TICK):
            state = Carry(**{name: getattr(carry, name) for name in BRANCH_STATE})
            state = buffers.run_if(some, change, state)
        return carry.replace(**{name: getattr(state, name) for name in BRANCH_STATE})

    def send_input_grad(self, carry: Carry, t: Tick) -> Carry:
        """Sends the input gradient to the stage before, and stores what the stage after sends."""
        slot = self.recv_bwd_slot(carry, t)
        with jax.named_scope(schedule.SEND_DX):
            received = collectives.ppermute_shift(t.dy, "pp", -1)
        return carry.replace(grad_slots=buffers.write(carry.grad_slots, slot, received))

    def loss(self, t: Tick, ys: Any, head: Any, state: Carry) -> Carry:
        """The loss of a group of microbatches whose forward passes are complete, and its gradients,
        if there are backward passes.

        Row-major: otherwise jax 0.12 transposes the buffers for it in each tick.
        """
        last, ys = t.now.loss_microbatch, row_major(ys)
        if state.grad_slots is None:
            return state.replace(metrics=state.metrics.plus(self.ends.metrics(last, ys, head)))
        more, grads, dys = self.ends.loss(last, ys, state.end_grads, head)
        metrics = state.metrics.plus(more)
        slots = buffers.write(state.grad_slots, t.now.loss_grad_slot, row_major(dys))
        return state.replace(end_grads=grads, metrics=metrics, grad_slots=slots)

    def embed_grad(self, first: jax.Array | int, dxs: Any, state: Carry) -> Carry:
        """Adds the embedding's gradients of the microbatches from `first` on."""
        embed = self.ends.embed_backward(first, dxs, state.end_grads["embed"])
        return state.replace(end_grads=state.end_grads | {"embed": embed})

    def output_grad(self, carry: Carry, t: Tick) -> Any:
        """The gradient of the output activation of this tick's backward pass; zeros without one."""
        dy = buffers.read(carry.grad_slots, t.now.bwd_grad_slot)
        return jnp.where(t.now.bwd_microbatch >= 0, dy, 0)

    def write_stash(self, carry: Carry) -> tuple[Carry, ordering.Token]:
        """Writes the residuals of the tick before into their slots, which it has read; and the
        token of that. Row-major, or XLA transposes the buffers."""
        write = lambda stash, x: row_major(buffers.write(stash, carry.residual_slot, row_major(x)))
        with jax.named_scope(schedule.STASH):
            carry = carry.replace(stash=jax.tree.map(write, carry.stash, carry.residuals))
        return carry, ordering.token(carry.stash)

    def initial_carry(self, grads: Any) -> Carry:
        """Empty buffers, created when the layers' weights are all-gathered, which takes memory too,
        while the head's are; if those come in slices, concurrently with the former.

        A tick without work reads them, and an FP8 scale of 0 would turn zeros into NaN: they are
        filled with ones, and each with another number, as XLA would share one buffer of equal ones
        and copy it.
        """
        plan, x = self.plan, self.activation
        ready = ordering.token([] if self.head else self.layers)
        ones = (1 + i % 64 / 64 + ready for i in itertools.count())
        empty = lambda n, s: jnp.full((n, *s.shape), next(ones).astype(s.dtype))
        chunk_grads = self.chunk(grads["layers"], 0)
        self.zero_grads = chunk_grads
        self.first_fwd_weights = self.fwd_form(0)
        shapes = lambda role, i: self.residual_shapes(role, i)[0]
        residuals = ByRole(
            *([shapes(role, i) for i in range(self.layers_per_chunk)] for role in ROLES)
        )
        carry = Carry(
            chunk_grads=chunk_grads,
            stash=jax.tree.map(lambda s: empty(plan.stash_slots, s), residuals),
            residuals=jax.tree.map(lambda s: empty(1, s)[0], residuals),
            residual_slot=jnp.int32(0),
            # Two slots at least: XLA orders nothing by an index that can only be 0.
            input_slots=empty(max(plan.input_slots, 2), x),
            grad_slots=empty(max(plan.grad_slots, 2), x),
            output=jnp.zeros(x.shape, x.dtype),
            loss_inputs=empty(plan.microbatches_per_loss, x),
            end_grads={name: grads[name] for name in WEIGHTS if name in grads},
            metrics=Metrics(*[jnp.zeros(())] * (3 if self.run.model.mtp_layers else 2)),
        )
        if self.head:
            w = jax.ShapeDtypeStruct(self.head.shape, self.head.w.dtype)
            carry = carry.replace(head_weight=empty(1, w)[0])
        return carry

    def residual_shapes(self, role: str, i: int) -> tuple[list, int | None]:
        """The residuals that slot i of a chunk stashes, as ShapeDtypeStructs, and which of them is
        the input activation if another kind than the first stashes it."""
        slot = self.placement.slots[role][i]
        if not slot.choices:
            return [], None
        if (key := slot.choices[0].sublayer) not in self.residuals:
            at, vjp = slot.choices[0], self.vjps[role][i][0]
            w = self.with_both_forms(at, self.first_fwd_weights)
            unordered = Ends(None, None)
            grads, documents = self.shape_of_grads(at), self.documents(0)
            forward = lambda x: vjp.forward(w, grads, x, unordered, documents)[2]
            self.residuals[key] = jax.eval_shape(forward, self.activation)
        shapes = self.residuals[key]
        if len(slot.choices) == 1:
            return shapes, None
        form = lambda s: (s.shape, s.dtype)
        same = [j for j, s in enumerate(shapes) if form(s) == form(self.activation)]
        return (shapes, same[0]) if same else ([*shapes, self.activation], len(shapes))

    def fwd_form(self, chunk: int) -> Any:
        """The layers of a chunk as the forward pass reads them."""
        return drop_form("dgrad_operand", with_fprop_form(self.chunk(self.layers, chunk)))

    def with_both_forms(self, at: layer_order.Choice, chunk: Any) -> Any:
        """A layer of a chunk, with zeros for the operand of each Weight that its pass does not read
        (drop_form)."""
        zeros = lambda form, shape: jax.tree.map(jnp.zeros_like, shape) if form is None else form
        layer, shapes = chunk[at.stack][at.entry], self.shapes[at.stack][self.same_shapes(at)]
        return jax.tree.map(zeros, layer, shapes, is_leaf=lambda form: form is None)

    def shape_of_grads(self, at: layer_order.Choice) -> Any:
        """Gradients of a layer of which only the shapes count."""
        return self.zero_grads[at.stack][self.same_shapes(at)]

    def same_shapes(self, _at: layer_order.Choice) -> int:
        """An entry of a chunk whose weights have the shapes of those of a choice."""
        return 0

    def has_layer(self, chunk: Any, i: int) -> Any:
        """Whether slot i of a chunk of this stage has a layer. A layer of zeros passes activations
        and gradients on unchanged, but must not count in metrics and amaxes."""
        occupied = self.placement.layers[:, :, i] >= 0
        if occupied.all():
            return True
        return jnp.asarray(occupied)[collectives.axis_index("pp"), chunk]

    # What differs with and without a pipeline.

    def table(self) -> np.ndarray:
        """The schedule's rows, [ticks + 1, stages, columns of Row]."""
        after_the_last = ((0, 1), (0, 0), (0, 0))
        return np.pad(self.plan.rows(), after_the_last, constant_values=-1)

    def begin_steady_state(self, carry: Carry) -> Carry:
        return carry

    def finish(self, carry: Carry) -> Any:
        """The gradients, and this GPU's metrics."""
        return {**carry.end_grads, "layers": carry.chunk_grads[""]}, carry.metrics.asdict()


class OneStage(Executor):
    """Without a pipeline: one stage with one chunk, whose layers are a tuple of trees."""

    def chunk(self, stack: Any, _chunk: Any) -> Any:
        return {"": stack}

    def same_shapes(self, at: layer_order.Choice) -> int:
        return at.entry if len(self.run.model.kinds) > 1 else 0

    def fwd_weights(self, _carry: Any) -> Any:
        return self.first_fwd_weights

    def bwd_weights(self, _carry: Any) -> Any:
        return drop_form("fprop_operand", self.chunk(self.layers, 0))

    def receive_input(self, carry: Carry, t: Tick) -> Carry:
        t.x = jnp.where(t.now.fwd_microbatch >= 0, self.ends.embed(t.now.fwd_microbatch), 0)
        return carry

    def branches(self, carry: Carry, t: Tick) -> list[Branch]:
        found = []
        if t.backward:
            embed_grad = functools.partial(self.embed_grad, t.now.bwd_microbatch, t.dy[None])
            found.append(Branch(schedule.EMBED_BACKWARD, True, embed_grad))
        if t.forward:
            loss = functools.partial(self.loss, t, carry.loss_inputs, carry.head_weight)
            found.append(Branch(schedule.LOSS, True, loss))
        return found

    def recv_bwd_slot(self, _carry: Any, t: Tick) -> Any:
        return t.following.recv_bwd_slot


class Pipeline(Executor):
    """pp stages of vp chunks each."""

    def chunk(self, layers: Any, chunk: Any) -> Any:
        """The layers of a chunk, by stack: a tuple of trees each, from stacked layers."""
        table = self.placement.stacks
        stacks = zip(table, layer_stack.split(table, layers), strict=True)
        return {
            s.name: buffers.read_slots(tree, self.slots(s.name, chunk)[0]) for s, tree in stacks
        }

    def write_chunk(self, layers: Any, chunk: Any, new: Any) -> Any:
        """Stacked layers with those of a chunk replaced."""
        table = self.placement.stacks
        stacks = zip(table, layer_stack.split(table, layers), strict=True)
        write = lambda s, tree: buffers.write_slots(tree, *self._with(new, s.name, chunk))
        return layer_stack.join(table, [write(s, tree) for s, tree in stacks])

    def _with(self, new, name, chunk):
        slots, valid = self.slots(name, chunk)
        return slots, new[name], valid

    def slots(self, name: str, chunk: Any) -> tuple[list, list]:
        """The slot of a stack of each entry of a chunk, a function each (each reader computes it
        for itself), and whether the chunk has a layer there."""
        table = self.placement.entries[name]
        _, chunks, count = table.shape
        if (table == np.arange(chunks * count).reshape(chunks, count)).all():
            return [lambda i=i: chunk * count + i for i in range(count)], [True] * count
        slots = jnp.asarray(table)[collectives.axis_index("pp"), chunk]
        always = np.asarray((table >= 0).all((0, 1)))
        valid = [True if always[i] else slots[i] >= 0 for i in range(count)]
        return [lambda i=i: jnp.maximum(slots[i], 0) for i in range(count)], valid

    def table(self) -> np.ndarray:
        table = super().table()
        # The input gradients of the last group arrive at the last stage when all ticks are over.
        newest = self.plan.microbatches - 1
        slot = newest % self.plan.microbatches_per_embedding
        table[-1, :, Row._fields.index("recv_bwd_slot")] = slot
        return table

    def initial_carry(self, grads: Any) -> Carry:
        carry = super().initial_carry(grads)
        carry = carry.replace(
            layer_weights=self.layers,
            fwd_weights=self.first_fwd_weights,
            layer_grads=grads["layers"],
        )
        return self.embed(0, carry)

    def begin_steady_state(self, carry: Carry) -> Carry:
        # All stages begin with the last chunk. Copied before the warm-up, it would be kept so long.
        last = self.chunk(carry.layer_weights, self.plan.vp - 1)
        grads = ordering.after(carry.chunk_grads, ordering.token(carry.output))
        return carry.replace(bwd_weights=drop_form("fprop_operand", last), chunk_grads=grads)

    def finish(self, carry: Carry) -> Any:
        layers = self.write_chunk(carry.layer_grads, 0, carry.chunk_grads)  # the last is chunk 0
        newest = self.plan.microbatches - 1
        first = newest - newest % self.plan.microbatches_per_embedding
        carry = self.embed_grad(first, None, carry)
        return {**carry.end_grads, "layers": layers}, carry.metrics.asdict()

    def fwd_weights(self, carry: Carry) -> Any:
        return carry.fwd_weights

    def bwd_weights(self, carry: Carry) -> Any:
        return carry.bwd_weights

    def receive_input(self, carry: Carry, t: Tick) -> Carry:
        """Receives the output of the stage before, of the tick before, and switches the forward
        chunk.

        The send starts when the first backward GEMM of the tick has its operand, and overlaps two
        GEMMs; before experts without tp it starts at once. The chunk switch follows the send, or
        the neighbour would wait for the switch; and the write of the received activation follows
        the switch, which overlaps the transfer.
        """
        with jax.named_scope(schedule.SEND_X):
            wait_for = t.tokens.wanted_by("fwd.recv")
            received = ordering.ppermute_after(carry.output, "pp", wait_for)
        switch = ordering.index_after(t.now.fwd_chunk_switch, *t.tokens.of("fwd.chunk_switch"))
        chunk = lambda: self.chunk(carry.layer_weights, switch)
        load = lambda _: drop_form("dgrad_operand", with_fprop_form(chunk()))
        with jax.named_scope(schedule.FORWARD_CHUNK_SWITCH):
            carry = carry.replace(fwd_weights=buffers.run_if(switch >= 0, load, carry.fwd_weights))
        t.tokens.emit("fwd.chunk_switch", jax.tree.leaves(carry.fwd_weights)[0])
        slot = ordering.index_after(t.now.recv_fwd_slot, *t.tokens.of("fwd.recv.write"))
        # The barrier keeps XLA from reading the input in one kernel with the residuals of the
        # backward pass, which come later: both are read by indices of one row of the table.
        slots = row_major(buffers.write(carry.input_slots, slot, received))
        slots, microbatch, slot = lax.optimization_barrier(
            (slots, t.now.fwd_microbatch, t.now.fwd_input_slot)
        )
        t.x = jnp.where(microbatch >= 0, buffers.read(slots, slot), 0)
        return carry.replace(input_slots=slots)

    def branches(self, carry: Carry, t: Tick) -> list[Branch]:
        found = []
        if t.forward:
            embed = functools.partial(self.embed, t.following.embed_microbatch)
            found.append(Branch(schedule.EMBED, t.following.embed_microbatch >= 0, embed))
        if t.backward:
            first = t.now.embed_grad_microbatch
            embed_grad = functools.partial(self.embed_grad, first, None)
            found.append(Branch(schedule.EMBED_BACKWARD, first >= 0, embed_grad))
            # After all reads of what the switch replaces, or XLA would copy it; of the gradients of
            # the chunk only if the last wgrad is not ordered (SublayerVjp.dx_unordered).
            unordered = t.forward and any(vjp.dx_unordered for vjp in self.vjps["mixer"][0])
            reads = carry.chunk_grads if unordered else (), t.tokens.wanted_by("bwd.chunk_switch")
            token = ordering.index_token((t.dy, *reads))
            switch = functools.partial(self.switch_backward_chunk, carry.layer_weights, t, token)
            condition = t.following.bwd_chunk_switch + token >= 0
            found.append(Branch(schedule.BACKWARD_CHUNK_SWITCH, condition, switch))
        if t.forward:
            loss = functools.partial(self.loss, t, carry.loss_inputs, carry.head_weight)
            found.append(Branch(schedule.LOSS, t.now.loss_microbatch >= 0, loss))
        return found

    def embed(self, first: jax.Array | int, state: Carry) -> Carry:
        """Embeds the next group of microbatches, from `first` on, into the first input slots."""
        x = self.ends.embed(first, self.plan.microbatches_per_embedding)
        return state.replace(input_slots=buffers.write(state.input_slots, 0, row_major(x)))

    def embed_grad(self, first: jax.Array | int, _dxs: Any, state: Carry) -> Carry:
        """The first stage sends its input gradients to the last one, into the first slots."""
        last = collectives.axis_index("pp") == self.plan.pp - 1
        dxs = row_major(state.grad_slots[: self.plan.microbatches_per_embedding])
        return super().embed_grad(first, jnp.where(last, dxs, 0), state)

    def switch_backward_chunk(
        self, layer_weights: Any, t: Tick, token: jax.Array, state: Carry
    ) -> Carry:
        """Writes back the gradients of the old chunk; reads weights and gradients of the next."""
        grads = self.write_chunk(
            state.layer_grads, t.following.bwd_chunk_writeback, state.chunk_grads
        )
        chunk = t.following.bwd_chunk_switch + token
        w, chunk_grads = (self.chunk(stack, chunk) for stack in (layer_weights, grads))
        bwd_weights = drop_form("fprop_operand", w)
        return state.replace(layer_grads=grads, chunk_grads=chunk_grads, bwd_weights=bwd_weights)

    def recv_bwd_slot(self, carry: Carry, t: Tick) -> Any:
        # After the chunk switch, which overlaps the transfer.
        return ordering.index_after(
            t.following.recv_bwd_slot, jax.tree.leaves(carry.bwd_weights)[0]
        )


def _with_entry(chunk, at, new):
    """A chunk with one entry replaced."""
    entries = list(chunk[at.stack])
    entries[at.entry] = new
    return chunk | {at.stack: tuple(entries)}


def _keep_counts(has_work, new, old):
    """New gradients, with the amaxes and statistics of ticks that have work only; their other
    gradients are zeros."""

    def one(new, old):
        if not is_accumulator(new):
            return new
        name = "value" if isinstance(new, Statistic) else "amax"
        kept = jnp.where(has_work, getattr(new, name), getattr(old, name))
        return new._replace(**{name: kept})

    return jax.tree.map(one, new, old, is_leaf=is_accumulator)
