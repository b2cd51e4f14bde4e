"""The executor's order on XLA:CPU, where a collective and a branch must not be independent.

XLA:CPU runs them concurrently, in another order on each device, and then deadlocks. These methods
surround those of the executor with data dependences; a GPU's program has none of them.
"""

from typing import Any

from maxbench.pipeline.executor import Carry, Executor, OneStage, Pipeline, Tick
from maxbench.pipeline.zero_overlap import ZeroOverlap
from maxbench.sharding.ordering import serialize_on_cpu


class SerializedOnCpu(Executor):
    """Each communication and each branch of a tick depends on the one before."""

    def receive_input(self, carry: Carry, t: Tick) -> Carry:
        before = t.dy, list(t.tokens.tokens.values()), carry.chunk_grads
        t.now = serialize_on_cpu(before, t.now)
        ends = carry.metrics, carry.end_grads
        carry = super().receive_input(carry.replace(output=serialize_on_cpu(ends, carry.output)), t)
        t.now, t.dy = serialize_on_cpu(t.x, (t.now, t.dy))
        return carry

    def before_branch(self, carry: Carry, t: Tick, index: Any) -> Any:
        before = t.x, t.dy, carry.chunk_grads, carry.metrics, carry.head_weight, t.slices
        return serialize_on_cpu((before, list(t.tokens.tokens.values())), index)

    def after_branch(self, t: Tick, result: Any) -> None:
        if t.x is not None:
            t.x = serialize_on_cpu(result, t.x)
        if t.dy is not None:
            t.dy = serialize_on_cpu(result, t.dy)

    def zero_slices(self, carry: Carry, t: Tick, i: int, zero: ZeroOverlap) -> Carry:
        if any(slot.table is not None for slots in self.placement.slots.values() for slot in slots):
            t.now = serialize_on_cpu((t.x, t.dy), t.now)
        return super().zero_slices(carry, t, i, zero)

    def run_branches(self, carry: Carry, t: Tick) -> Carry:
        before = carry.chunk_grads, carry.output, carry.metrics, carry.head_weight, t.dy, t.slices
        t.now = serialize_on_cpu(before, t.now)
        return super().run_branches(carry, t)

    def send_input_grad(self, carry: Carry, t: Tick) -> Carry:
        t.dy = serialize_on_cpu((carry.metrics, carry.end_grads), t.dy)
        return super().send_input_grad(carry, t)

    def loss(self, t: Tick, ys: Any, head: Any, state: Carry) -> Carry:
        before = state.metrics, state.end_grads
        return super().loss(_at(t, serialize_on_cpu(before, t.now)), ys, head, state)

    def embed_grad(self, first: Any, dxs: Any, state: Carry) -> Carry:
        first = serialize_on_cpu((state.metrics, state.end_grads), first)
        return super().embed_grad(first, dxs, state)

    def finish(self, carry: Carry) -> Any:
        grads, metrics = super().finish(carry)
        ends = {name: grad for name, grad in grads.items() if name != "layers"}
        ends, metrics = serialize_on_cpu(carry.grad_slots, (ends, metrics))
        return {**ends, "layers": grads["layers"]}, metrics


class OneStageOnCpu(SerializedOnCpu, OneStage):
    pass


class PipelineOnCpu(SerializedOnCpu, Pipeline):
    def embed(self, first: Any, state: Carry) -> Carry:
        state = super().embed(serialize_on_cpu(state.metrics, first), state)
        return state.replace(metrics=serialize_on_cpu(state.input_slots, state.metrics))


def _at(t: Tick, now) -> Tick:
    return Tick(t.phase, t.forward, t.backward, now, t.following, t.tokens, t.x, t.dy)
