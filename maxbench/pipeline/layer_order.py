"""Where the layers of a pipeline are: the part of each layer, and its slot in stacked weights.

A stage has vp chunks of layers (virtual stages); chunk c of stage p is the (c x pp + p)-th part of
the network. All chunks have the same number of slots, and the i-th layer of a chunk is in slot i.
Every stage has the same stacks of weights, sharded over pp, and a chunk is read from them by a
table.

If all layers have the same weights there is one stack. If they divide into the parts except for
two, one slot of the first part, which also embeds, and one of the last, which also computes the
loss, are empty (Llama 3.1 405B: 126 + 2 = 8 x 8 x 2). Empty slots contain zeros: a layer of zeros
adds nothing to its input, and its gradients are zeros, so it is no special case.

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
from maxbench.model import layer_stack
from maxbench.model.layer_stack import EMPTY, SUBLAYERS, Stack, Stacks
from maxbench.pipeline.schedule import Schedule


class Choice(NamedTuple):
    """One kind of a sublayer in a slot of chunks.

    Attributes:
      kind: the Model of the sublayer.
      stack: the name of the stack with its weights.
      entry: their index among those that a chunk has of the stack.
    """

    kind: Model
    stack: str
    entry: int


class Slot(NamedTuple):
    """A sublayer in a slot of chunks.

    Attributes:
      choices: its kinds, the most frequent first.
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
      slots: sublayer -> a Slot for each slot of a chunk.
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
    assert a.cp == 1 or all(slot.table is None for slot in found.slots["attn"])
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
    forms = {s: dict.fromkeys(_form(kind, s) for kind in m.per_layer) for s in SUBLAYERS}
    alike = [s for s in SUBLAYERS if len(forms[s]) == 1]
    if len(alike) == len(SUBLAYERS):
        found = [("", m.per_layer[0], tuple(SUBLAYERS), layers != EMPTY)]
    else:
        found = []
        for s in SUBLAYERS:
            for i, form in enumerate(forms[s]):
                has_form = [_form(kind, s) == form for kind in m.per_layer]
                kind = m.per_layer[has_form.index(True)]
                found.append((f"{s}{i}", kind, (s,), np.array([*has_form, False])[layers]))
    table, entries, ranks, sliced = [], {}, {}, []
    for name, kind, sublayers, uses in found:
        # One empty slot in the first and the last stage at most: zeros for each, and no branch.
        # Nor may attention branch over cp: the permutes of its ring wait for all stages.
        few = layers.size == m.layers + 2 or (ring and sublayers[0] == "attn")
        uniform = few and sublayers[0] in alike
        stack, entries[name], ranks[name] = _stack(name, kind, sublayers, layers, uses, uniform)
        table.append(stack)
        sliced += [name] if len(stack.slots) == layers.size else []
    slots = {}
    for s in SUBLAYERS:
        of_form = {_form(st.kind, s): st.name for st in table if s in st.sublayers}
        zeros = sliced if _zeros_stay(m, s) else []
        slots[s] = tuple(
            _slot(m, s, layers[:, :, i], i, of_form, ranks, zeros) for i in range(layers.shape[2])
        )
    return Placement(layers, tuple(table), entries, slots, tuple(sorted(sliced)))


def _one_stage(m: Model) -> Placement:
    """Without a pipeline: unrolled layers, each an entry of its own of the only chunk."""
    slots = {
        s: tuple(Slot((Choice(_kind(m, k, s), "", i),)) for i, k in enumerate(m.per_layer))
        for s in SUBLAYERS
    }
    layers = np.arange(m.layers)[None, None]
    return Placement(layers, layer_stack.stacks(m), {"": layers.astype(np.int32)}, slots, ())


def _kind(m: Model, kind: Model, sublayer: str) -> Model:
    """The Model of a sublayer of a layer: equal for all layers whose sublayers are alike."""
    if not m.layer_groups:
        return kind
    if sublayer == "attn":
        return dataclasses.replace(kind, mlp=m.mlp, experts=m.experts)
    return dataclasses.replace(kind, window=0)


def _form(kind: Model, sublayer: str):
    """The fields that determine shapes and number format of a sublayer's weights."""
    return (kind.quantized,) if sublayer == "attn" else (kind.quantized, kind.mlp, kind.experts)


def _stack(name, kind, sublayers, layers, uses, uniform):
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
    stack = Stack(name, kind, tuple(order.reshape(-1).tolist()), sublayers)
    return stack, entries, rank


def _zeros_stay(m: Model, sublayer: str) -> bool:
    """Whether the gradients of a sublayer of zeros are zeros: those of the bias that it adds at the
    end are not."""
    bias = m.attention_bias if sublayer == "attn" else m.mlp_bias
    return not bias and not (m.post_norm and m.norm == "layernorm1p")


def _slot(m, sublayer, layers, i, of_form, ranks, zeros):
    """The Slot of a sublayer in slot i of chunks, which have `layers` there, [stage, chunk].

    Args:
      zeros: stacks that have weights of zeros in each empty slot.
    """
    kind_of = {n: _kind(m, m.per_layer[n], sublayer) for n in layers.reshape(-1).tolist() if n >= 0}
    counts = collections.Counter(kind_of[n] for n in layers.reshape(-1).tolist() if n >= 0)
    kinds = [kind for kind, _ in counts.most_common()]
    choice = lambda kind, name: Choice(kind, name, ranks[name][i])
    choices = tuple(choice(kind, of_form[_form(kind, sublayer)]) for kind in kinds)
    if len(kinds) == 1 and (choices[0].stack in zeros or (layers >= 0).all()):
        return Slot(choices)
    index = [kinds.index(kind_of[n]) if n >= 0 else len(kinds) for n in layers.reshape(-1).tolist()]
    return Slot(choices, np.array(index, np.int32).reshape(layers.shape))
