"""A pipeline's weights and gradients over dp, in pieces beside its fill and its drain.

A chunk's weights are read when its first turn begins, and its gradients are ready when its last is
over. So those of all but one chunk can travel while others compute: in each tick of the fill a
piece of the chunk that comes next is gathered, in each tick of the drain one of the chunk that was
done last is reduced. A whole chunk would be in the way: all collectives wait in one queue, those of
tp too.

A piece is a part of each GEMM's weight of a layer, cut along a dim that dp does not split. The
head's weight, which the first loss reads, has parts of its own. What else there is travels before
the first tick and after the last.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import layout

from maxbench import quantization
from maxbench.config.run import Run
from maxbench.model.grad_accumulation import GradAccumulator, grads_of
from maxbench.pipeline.schedule import WARMUP, schedule_for
from maxbench.quantization import Weight
from maxbench.sharding.rules import WeightSharding, gather_master, reduce_grad

# What a layer's products reach of the GPU's peak, and bytes/s of a network, one adapter of 400 Gb/s
# for each GPU: they must take as long as a piece that goes beside them. Of the real network the
# program knows nothing; a plan for another one is of the same program.
PEAK, NETWORK = 0.7, 50e9


class ZeroOverlap:
    """The layers of this GPU's stage on their way. Lists are of the leaves of a layer's tree.

    Args:
      places: tree of Place, of the stacked layers.
      masters: this GPU's part of the master weights, [slots, ...].
      cast: Place, part of a master -> the same in the compute dtype.
      past: as formats.scales has it.
      head: Place of the head's weight, and this GPU's part of it, in the compute dtype, or None.

    Attributes:
      amax: the largest magnitudes of weights, as formats.scales gives them.
      parts: of a layer; 0 where nothing travels in pieces.
      each: pieces of a tick.
      cuts: which leaves do -> the dim of a layer's that they are cut along.
      head: HeadPieces, or None where there is no such weight, or no room for a part of it.
    """

    def __init__(self, run: Run, arithmetic, places, masters, cast, past, head=None):
        self.arithmetic, self.cast, plan = arithmetic, cast, schedule_for(run)
        self.masters, self.tree = jax.tree.flatten(masters)
        self.stacked = jax.tree.leaves(places)
        self.places = [place.layer for place in self.stacked]
        self.ready = list(map(cast, self.stacked, self.masters))
        self.scales, self.amax = quantization.scales(
            arithmetic, self.stacked, self.ready, True, past
        )
        self.chunks, self.size = plan.vp, len(self.ready[0]) // plan.vp  # layers of a chunk
        self.zero_overlap_ticks = plan.zero_overlap_ticks
        tokens = run.layout.mbs * run.train.seq // run.layout.cp
        least = PEAK * run.gpu.bf16_tflops * 1e12 / NETWORK / tokens
        self.parts, self.each, self.cuts = self._cuts(run, math.ceil(least))
        head = head and HeadPrefetch(run, *head)
        fits = head and math.prod(head.shape) < head.parts * self._room(least)
        self.head = head if fits else None

    def _cuts(self, run: Run, least: int) -> tuple[int, int, dict[int, int]]:
        """Parts of a layer, pieces of a tick, and cuts: such that the fewest ticks bring again what
        is there, and then as small as they can be. None where half the ticks would, or where a
        piece takes longer than a layer's products: for each number of a weight 2 bytes (its FP8
        takes half, and so do the products), and they 2 FLOPs per token."""
        block = run.format.multiple if run.format.blocks else 1
        moved = [i for i, p in enumerate(self.places) if p.gemm and any(p.zero1_axes)]
        best = 0.5, 0, 0, {}
        for parts in range(max(1, least), 1 + self.zero_overlap_ticks if moved else 0):
            cuts = {
                i: _slice_dim(self.places[i], self.ready[i].shape[1:], parts, block) for i in moved
            }
            each = -(-self.size * parts // self.zero_overlap_ticks)
            used = self.size * parts / (each * self.zero_overlap_ticks)
            if None not in cuts.values() and used >= best[0]:
                best = used, parts, each, cuts
        return best[1:]

    def _room(self, least: float) -> float:
        """Numbers of weights that could travel in a tick beside its pieces: those of its layers, of
        which one in `least` goes while they compute."""
        of = lambda i: math.prod(self.places[i].compute_shape(self.ready[i].shape[1:]))
        numbers = lambda ids: sum(map(of, ids))
        all_of = [i for i, place in enumerate(self.places) if place.gemm]
        gone = numbers(self.cuts) * self.each / max(self.parts, 1)
        return numbers(all_of) * self.size / max(least, 1e-9) - gone

    def start(self):
        """The compute weights, [slots, ...]; of those that come in pieces, the first chunk's."""
        cut = lambda i, x: x[: self.size] if i in self.cuts and x is not None else x
        first, scales = ([cut(i, x) for i, x in enumerate(xs)] for xs in (self.ready, self.scales))
        made = quantization.weights(self.arithmetic, self.stacked, first, scales, True)
        box = lambda x: jnp.zeros((len(self.ready[0]), *x.shape[1:]), x.dtype)
        whole = lambda x: lax.dynamic_update_slice_in_dim(box(x), x, 0, 0)
        made = [jax.tree.map(whole, w) if i in self.cuts else w for i, w in enumerate(made)]
        return self.tree.unflatten(made)

    def gather(self, tick, layer):
        """The pieces of a tick of the fill that go beside a layer, as compute weights; `tick` is
        the schedule's 'gather'. Where no piece is left the last one comes again."""

        def one(i, slot, part):
            w = _slice(self.masters[i], slot, self.cuts[i], part, self.parts)
            scale = None if self.scales[i] is None else self.scales[i][slot]
            place, w = self.places[i], self.cast(self.places[i], w)
            return quantization.weights(self.arithmetic, [place], [w], [scale], False)[0]

        return self._each(
            one, 1 + tick // self.zero_overlap_ticks, tick % self.zero_overlap_ticks, layer
        )

    def reduce(self, sums, tick, layer):
        """The pieces of a tick of the drain that go beside a layer, as the masters lie; `tick` is
        the schedule's 'reduce'. Where no piece is left, what travels is for nothing."""
        grads, tick = jax.tree.leaves(grads_of(sums)), jnp.maximum(tick, 0)

        def one(i, slot, part):
            # XLA would turn the whole stack round for what it sends of it.
            g = row_major(_slice(grads[i], slot, self.cuts[i], part, self.parts))
            return row_major(reduce_grad(self.places[i], g))

        chunk = self.chunks - 1 - tick // self.zero_overlap_ticks
        return self._each(one, chunk, tick % self.zero_overlap_ticks, layer)

    def _each(self, one, chunk, tick, layer):
        """(number, slot, part, what one() gives of each weight) for each piece of a chunk that goes
        in a tick beside a layer."""
        last, pieces = self.size * self.parts - 1, []
        for n in range(self.each):
            if n * self.size // self.each == layer:
                number = tick * self.each + n
                piece = jnp.minimum(number, last)
                at = chunk * self.size + piece // self.parts, piece % self.parts
                pieces.append((number, *at, [one(i, *at) for i in self.cuts]))
        return pieces

    def put_weights(self, stack, pieces):
        """The compute weights with what gather() gave."""
        leaves, tree = jax.tree.flatten(stack, is_leaf=lambda x: isinstance(x, Weight))
        for _, slot, part, new in pieces:
            for i, w in zip(self.cuts, new, strict=True):
                put = lambda box, x, at=(slot, part): _write_form(box, x, *at)
                leaves[i] = jax.tree.map(put, leaves[i], w)
        return tree.unflatten(leaves)

    def put_gradients(self, sums, pieces, tick):
        """The sums with what reduce() gave, in the first places of what it is of: that is not read
        again, and a box of its own would be memory."""
        leaves, tree = jax.tree.flatten(sums, is_leaf=lambda x: isinstance(x, GradAccumulator))
        for number, slot, part, new in pieces:
            real = (tick >= 0) & (number < self.size * self.parts)
            for i, g in zip(self.cuts, new, strict=True):
                box = grads_of(leaves[i])
                starts = [part * n if d == self.cuts[i] else 0 for d, n in enumerate(g.shape)]
                old = lax.dynamic_slice(box, [slot, *starts], (1, *g.shape))
                put = lax.dynamic_update_slice(box, jnp.where(real, g, old), [slot, *starts])
                leaves[i] = (
                    leaves[i]._replace(grad=put) if isinstance(leaves[i], GradAccumulator) else put
                )
        return tree.unflatten(leaves)

    def finish(self, grads):
        """All gradients, reduced; of those that went in pieces the first chunk's are left."""
        leaves = jax.tree.leaves(grads)

        def one(i, place: WeightSharding):
            if not (place.gemm and any(place.zero1_axes)):
                return reduce_grad(place, leaves[i])
            sent = lax.slice(leaves[i], [0] * leaves[i].ndim, self.masters[i].shape)
            # Of a stack XLA would turn round all, the state too, and jax 0.12 copy it in each turn.
            for j in range(self.size if i in self.cuts else len(sent)):
                g = row_major(reduce_grad(self.places[i], row_major(leaves[i][j])))
                sent = lax.dynamic_update_index_in_dim(sent, g, j, 0)
            return sent

        return self.tree.unflatten([one(i, place) for i, place in enumerate(self.stacked)])


class HeadPrefetch:
    """The head's weight on its way, a part of it in each tick of the fill.

    Args:
      place: of the weight, and `w` this GPU's part of it as a master, in the compute dtype.

    Attributes:
      parts: in which it travels; 0 where it does not, or cannot be cut.
      shape: of the compute weight.
    """

    def __init__(self, run: Run, place: WeightSharding, w):
        plan, self.place, self.w = schedule_for(run), place, w
        self.shape = place.compute_shape(w.shape)
        first = 1 + int(np.argmax(plan.column("loss_microbatch")[:, 0] >= 0))
        ticks = min(first, len(plan.phases[WARMUP]))
        dims = [d for d, axes in enumerate(place.zero1_axes) if not axes]
        fits = [(n, d) for d in dims for n in range(1, ticks + 1) if w.shape[d] % n == 0]
        self.parts, self.dim = max(fits, default=(0, 0)) if len(dims) < w.ndim else (0, 0)

    def gather(self, box, tick):
        """The compute weight with the part of a tick of the fill. Where none is left the last one
        comes again."""
        part = jnp.minimum(tick, self.parts - 1)
        w = gather_master(self.place, _slice(self.w[None], 0, self.dim, part, self.parts))
        return lax.dynamic_update_slice_in_dim(
            box, row_major(w), part * w.shape[self.dim], self.dim
        )


def row_major(x):
    """x, lying in memory in the order of its dims."""
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


def _slice_dim(place: WeightSharding, shape, parts: int, block: int) -> int | None:
    """The largest dim of a layer's weight that divides into parts, and is not split over dp.

    With blocks it divides into parts of whole ones, and is the first of its matrix's dim: forms of
    such a weight are matrices [ins, outs].
    """
    batch, outs = place.gemm.batch, place.gemm.batch + place.gemm.ins
    first = lambda d: outs if d >= outs else batch if d >= batch else 0
    alone = lambda d: block == 1 or math.prod(shape[first(d) : d]) == 1
    whole = lambda d: shape[d] % (parts * (block if d in (outs - 1, len(shape) - 1) else 1)) == 0
    fits = [d for d in range(len(shape)) if not place.zero1_axes[d] and whole(d) and alone(d)]
    return max(fits, key=lambda d: shape[d], default=None)


def _slice(x, slot, dim: int, part, parts: int):
    """A part of a layer, of the stack x [slots, ...]; `dim` of the layer."""
    size = x.shape[1 + dim] // parts
    shape = [1, *x.shape[1:]]
    shape[1 + dim] = size
    at = [slot, *[0] * (x.ndim - 1)]
    at[1 + dim] = part * size
    return lax.dynamic_slice(x, at, shape)[0]


def _write_form(box, x, slot, part):
    """The box [slots, ...] with a part of a layer, in one form of its weight: cut in the dim in
    which it is smaller. XLA would have the box lie as the part came, and turn it all for a turn."""
    starts = [0 if n == m else part * m for n, m in zip(box.shape[1:], x.shape, strict=True)]
    return lax.dynamic_update_slice(box, row_major(x)[None], [slot, *starts])
