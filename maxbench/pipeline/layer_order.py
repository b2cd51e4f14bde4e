"""Where the layers of a pipeline are: the part of each layer, and its slot in stacked weights.

A stage has vp chunks of layers (virtual stages); chunk c of stage p is the (c x pp + p)-th part of
the network. All chunks have the same number of slots, and the i-th layer of a chunk is in slot i.
Every stage has the same stacks of weights, sharded over pp, and a chunk is read from them by a
table.

If all layers have the same weights there is one stack. If they do not divide into the parts, slots
of the parts at both ends are empty (Llama 3.1 405B: 126 + 2 = 8 x 8 x 2). Empty slots contain
zeros: a layer of zeros adds nothing to its input, and its gradients are zeros, so it is no special
case.

With layout.stages, or layers that differ, a slot may be of different kinds on different chunks: the
executor branches there, at each sublayer that differs. Each form of a sublayer, its weights' shapes
and number format, has a stack of its own. A stack has as many slots as a stage has layers of that
form at most, so a few layers of a rare form take no memory for all chunks of all stages. An empty
slot is skipped by such a branch, too, unless the stack has weights of zeros for it anyway: a tick
takes as long as on the busiest stage, and a branch costs every stage time.
"""

import collections
import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from maxbench.config import pipeline_layout
from maxbench.config.model import Model
from maxbench.config.run import Run
from maxbench.config.sublayers import KEYS, ROLES, Layer, Sublayer
from maxbench.model import layer_stack
from maxbench.model.layer_stack import EMPTY, Stack, Stacks
from maxbench.pipeline.schedule import Schedule


class Choice(NamedTuple):
    """One kind of a sublayer in a slot of chunks.

    Attributes:
      sublayer: the sublayer, complete.
      stack: the name of the stack with its weights.
      entry: their index among those that a chunk has of the stack.
    """

    sublayer: Sublayer
    stack: str
    entry: int


class Slot(NamedTuple):
    """A sublayer in a slot of chunks.

    Attributes:
      choices: its kinds, the most frequent first; () if no layer in this slot has such a sublayer.
      table: index of the choice, int32 [stage, chunk], len(choices) where the slot is empty; None
        if it is choices[0] everywhere.
    """

    choices: tuple[Choice, ...]
    table: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Placement:
    """The layers of a pipeline, or of one stage without a pipeline.

    Attributes:
      layers: the layer in each slot, int [stage, chunk, slot]; EMPTY in an empty one.
      stacks: of all stages: those of stage 0, then those of stage 1, ...
      entries: stack -> the slot of the stage's stack of each entry of a chunk, int32 [stage, chunk,
        entry]; EMPTY if the chunk has no such layer.
      slots: role -> a Slot for each slot of a chunk.
      sliced: stacks whose chunks have an entry for each slot, at chunk x slots + slot: ZeRO slices
        can be communicated in warm-up and cool-down (zero_overlap.py).
    """

    layers: np.ndarray
    stacks: Stacks
    entries: dict[str, np.ndarray]
    slots: dict[str, tuple[Slot, ...]]
    sliced: tuple[str, ...]

    @property
    def slots_per_chunk(self) -> int:
        return self.layers.shape[2]


def stacks(run: Run) -> Stacks:
    """The stacks of a run's weights, and the layer in each of their slots."""
    return placement(run).stacks


def placement(run: Run) -> Placement:
    a = run.layout
    found = _placement(run.model, a.pp, a.vp, a.parts, a.cp > 1)
    # run_checks refuses others: a branch cannot contain the ring over cp.
    assert a.cp == 1 or all(slot.table is None for slot in found.slots["mixer"])
    return found


def other_kinds(run: Run, plan: Schedule) -> float:
    """The fraction of backward passes through a slot that branches on its kind in which a stage has
    another kind than the most frequent one, and the other stages wait for it."""
    chunks, busy = plan.column("bwd_chunk"), plan.column("bwd_microbatch") >= 0
    shares = []
    for slot in sum(placement(run).slots.values(), ()):
        if slot.table is not None:
            kind = slot.table[np.arange(plan.pp), np.maximum(chunks, 0)]
            other = busy & (kind > 0) & (kind < len(slot.choices))
            shares.append(other.any(1).sum() / busy.any(1).sum())
    return float(np.mean(shares)) if shares else 0.0


def layer_order(layers: int, pp: int, vp: int) -> np.ndarray:
    """The layer in each slot, [slots]; EMPTY in an empty one."""
    return _layers(pipeline_layout.even(layers, pp * vp), pp, vp).reshape(-1)


def _layers(counts: tuple[int, ...], pp: int, vp: int) -> np.ndarray:
    """Placement.layers, from the number of layers of each part."""
    return np.array(pipeline_layout.slots(counts)).reshape(vp, pp, -1).swapaxes(0, 1)


@functools.cache
def _placement(m: Model, pp: int, vp: int, parts: tuple[int, ...], ring: bool) -> Placement:
    if pp == 1:
        return _one_stage(m)
    layers = _layers(parts, pp, vp)
    forms = {role: dict.fromkeys(_form(layer, role) for layer in m.per_layer) for role in ROLES}
    alike = [role for role in ROLES if len(forms[role]) == 1]
    if len(alike) == len(ROLES):
        roles = tuple(role for role, _ in m.per_layer[0].parts())
        found = [("", m.per_layer[0], roles, layers != EMPTY)]
    else:
        found = []
        for role in ROLES:
            for i, form in enumerate(filter(None, forms[role])):
                has_form = [_form(layer, role) == form for layer in m.per_layer]
                layer = m.per_layer[has_form.index(True)]
                uses = np.array([*has_form, False])[layers]
                found.append((f"{KEYS[role]}{i}", layer, (role,), uses))
    table, entries, ranks, sliced = [], {}, {}, []
    for name, layer, roles, uses in found:
        # One empty slot in the first and the last stage at most: zeros for each, and no branch.
        # Nor may a mixer branch over cp: the permutes of its ring wait for all stages.
        few = layers.size == m.layers + 2 or (ring and roles[0] == "mixer")
        uniform = few and roles[0] in alike
        stack, entries[name], ranks[name] = _stack(name, layer, roles, layers, uses, uniform)
        table.append(stack)
        sliced += [name] if len(stack.slots) == layers.size else []
    slots = {}
    for role in ROLES:
        of_form = {_form(st.layer, role): st.name for st in table if role in st.roles}
        slots[role] = tuple(
            _slot(m, role, layers[:, :, i], i, of_form, ranks, sliced)
            for i in range(layers.shape[2])
        )
    return Placement(layers, tuple(table), entries, slots, tuple(sorted(sliced)))


def _one_stage(m: Model) -> Placement:
    """Without a pipeline: unrolled layers, each an entry of its own of the only chunk."""
    slot = lambda part, i: Slot((Choice(part, "", i),) if part else ())
    slots = {
        role: tuple(slot(layer.part(role), i) for i, layer in enumerate(m.per_layer))
        for role in ROLES
    }
    layers = np.arange(m.layers)[None, None]
    return Placement(layers, layer_stack.stacks(m), {"": layers.astype(np.int32)}, slots, ())


def _form(layer: Layer, role: str):
    part = layer.part(role)
    return part and part.form


def _stack(name, layer, roles, layers, uses, uniform):
    """A Stack, Placement.entries of it, and {slot of a chunk: entry}.

    Args:
      uses: whether a layer is in the stack, bool [stage, chunk, slot].
      uniform: every chunk has an entry for each slot. It is so anyway if that takes no more memory.
    """
    rank = {int(slot): i for i, slot in enumerate(np.flatnonzero(uses.any((0, 1))))}
    stages, chunks, _ = layers.shape
    most = int(uses.sum((1, 2)).max())
    if uniform := uniform or most >= chunks * len(rank):
        most = chunks * len(rank)
    order = np.full((stages, most), EMPTY)
    entries = np.full((stages, chunks, len(rank)), EMPTY, np.int32)
    if uniform:
        entries[:] = np.arange(most).reshape(chunks, -1)
    for stage in range(stages):
        used = [(c, i) for c in range(chunks) for i in rank if uses[stage, c, i]]
        for slot, (c, i) in enumerate(used):
            if not uniform:
                entries[stage, c, rank[i]] = slot
            order[stage, entries[stage, c, rank[i]]] = layers[stage, c, i]
    stack = Stack(name, layer, tuple(order.reshape(-1).tolist()), roles)
    return stack, entries, rank


def _slot(m, role, layers, i, of_form, ranks, sliced):
    """The Slot of a sublayer in slot i of chunks, which have `layers` there, [stage, chunk].

    Args:
      sliced: stacks that have weights of zeros in each empty slot.
    """
    parts = [m.per_layer[n].part(role) if n >= 0 else None for n in layers.reshape(-1).tolist()]
    kinds = [kind for kind, _ in collections.Counter(filter(None, parts)).most_common()]
    if not kinds:
        return Slot(())
    choice = lambda kind, name: Choice(kind, name, ranks[name][i])
    choices = tuple(choice(kind, of_form[kind.form]) for kind in kinds)
    # The gradient of a bias that the post-norm adds at the end is not zero.
    zeros_stay = kinds[0].zeros_stay and not (m.post_norm and m.norm == "layernorm1p")
    zeros = zeros_stay and choices[0].stack in sliced
    if len(kinds) == 1 and (zeros or all(parts)):
        return Slot(choices)
    index = [kinds.index(part) if part else len(kinds) for part in parts]
    return Slot(choices, np.array(index, np.int32).reshape(layers.shape))
