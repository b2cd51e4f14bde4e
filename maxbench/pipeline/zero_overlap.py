"""ZeRO slices: a pipeline's weights and gradients over dp, overlapped with warm-up and cool-down.

A chunk's weights are read at its first chunk switch, and its gradients are complete after its last.
So those of all chunks but one can be communicated while other chunks compute: each tick of the
warm-up all-gathers a slice of the weights of the chunk that comes next, and each tick of the
cool-down reduce-scatters a slice of the gradients of the chunk that was complete last. A whole
chunk at once would delay the tp collectives, as all collectives share one stream.

A slice is a part of each GEMM's weight of a layer, along a dim that dp does not shard. The head's
weight, which the first loss reads, has slices of its own. Everything else is all-gathered before
the first tick and reduce-scattered after the last.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxbench import quantization
from maxbench.config.run import Run
from maxbench.model.grad_accumulation import (
    GradAccumulator,
    LayerState,
    Statistic,
    grads_of,
    is_accumulator,
)
from maxbench.pipeline.schedule import WARMUP, schedule_for
from maxbench.quantization import Weight, row_major
from maxbench.sharding.rules import WeightSharding, gather_master, reduce_grad

# The fraction of the GPU's peak that GEMMs reach, and bytes/s of the network, one 400 Gb/s adapter
# per GPU: a slice must take no longer than the GEMMs that it overlaps. The program does not depend
# on the actual network, so that plans for other networks are of the same program.
GEMM_FRACTION, NETWORK_BYTES_PER_S = 0.7, 50e9


class ZeroOverlap:
    """The weights and gradients of this GPU's stage. Lists are of the leaves of a layer's tree.

    Args:
      shardings: tree of WeightSharding of the stacked layers.
      masters: this GPU's shard of the master weights, [slots, ...].
      cast: (WeightSharding, master shard) -> the shard in the compute dtype.
      past: amax history, as for quantization.scales.
      head: WeightSharding of the head's weight, and this GPU's shard of it in the compute dtype; or
        None.
      sliced: whether slot i of chunk c is c x slots of a chunk + i. Otherwise nothing is
        communicated in slices.

    Attributes:
      amax: amaxes of weights, as quantization.scales returns them.
      slices_per_layer: 0 if nothing is communicated in slices.
      slices_per_tick: slices of each tick.
      slice_dims: leaf -> the dim of a layer's array along which it is sliced.
      head: HeadPrefetch, or None without such a weight, or if there is no time for its slices.
    """

    def __init__(
        self, run: Run, arithmetic, shardings, masters, cast, past, head=None, sliced=True
    ):
        self.arithmetic, self.cast, plan = arithmetic, cast, schedule_for(run)
        self.masters, self.tree = jax.tree.flatten(masters)
        self.stacked = jax.tree.leaves(shardings)
        self.shardings = [sharding.layer for sharding in self.stacked]
        self.shards = list(map(cast, self.stacked, self.masters))
        self.scales, self.amax = quantization.scales(
            arithmetic, self.stacked, self.shards, True, past
        )
        self.chunks, self.layers_per_chunk = plan.vp, len(self.shards[0]) // plan.vp
        self.ticks = plan.zero_overlap_ticks
        tokens = run.layout.mbs * run.train.seq // run.layout.cp
        # GEMM weights per weight of a slice: 2 bytes on the network, 2 FLOPs per token.
        weights_per_slice = (
            GEMM_FRACTION * run.gpu.bf16_tflops * 1e12 / NETWORK_BYTES_PER_S / tokens
        )
        self.slices_per_layer, self.slices_per_tick = 0, 0
        self.slice_dims: dict[int, int] = {}
        if sliced:
            self.slices_per_layer, self.slices_per_tick, self.slice_dims = self._choose_slices(
                run, math.ceil(weights_per_slice)
            )
        head = head and HeadPrefetch(run, *head)
        room = head and head.slices * self._weights_left(weights_per_slice)
        self.head = head if head and math.prod(head.shape) < room else None

    def _choose_slices(self, run: Run, fewest: int) -> tuple[int, int, dict[int, int]]:
        """slices_per_layer (at least `fewest`), slices_per_tick and slice_dims: those whose ticks
        repeat the fewest slices, then the smallest slices. None if half of the ticks would repeat
        one, or if a slice takes longer than the GEMMs of a layer: per weight 2 bytes (in FP8 half,
        and the GEMMs take half the time), and 2 FLOPs per token."""
        block = run.format.multiple if run.format.blocks else 1
        sliced = [i for i, s in enumerate(self.shardings) if s.gemm and any(s.zero1_axes)]
        best: tuple[float, int, int, dict] = (0.5, 0, 0, {})
        for n in range(max(1, fewest), 1 + self.ticks if sliced else 0):
            shape = lambda i: self.shards[i].shape[1:]
            dims = {i: _slice_dim(self.shardings[i], shape(i), n, block) for i in sliced}
            per_tick = -(-self.layers_per_chunk * n // self.ticks)
            used = self.layers_per_chunk * n / (per_tick * self.ticks)
            if None not in dims.values() and used >= best[0]:
                best = used, n, per_tick, dims
        return best[1:]

    def _weights_left(self, weights_per_slice: float) -> float:
        """Weights that a tick has time to communicate besides its slices: those of its layers
        over weights_per_slice."""
        size = lambda i: math.prod(self.shardings[i].compute_shape(self.shards[i].shape[1:]))
        gemms = sum(size(i) for i, sharding in enumerate(self.shardings) if sharding.gemm)
        sliced = sum(map(size, self.slice_dims)) * self.slices_per_tick
        return gemms * self.layers_per_chunk / max(weights_per_slice, 1e-9) - sliced / max(
            self.slices_per_layer, 1
        )

    def initial_weights(self) -> Any:
        """The compute weights, [slots, ...]; of sliced ones the first chunk alone, and zeros."""
        first = lambda i, x: (
            x[: self.layers_per_chunk] if i in self.slice_dims and x is not None else x
        )
        shards, scales = (
            [first(i, x) for i, x in enumerate(xs)] for xs in (self.shards, self.scales)
        )
        weights = quantization.weights(self.arithmetic, self.stacked, shards, scales, True)
        zeros = lambda x: jnp.zeros((len(self.shards[0]), *x.shape[1:]), x.dtype)
        whole = lambda x: lax.dynamic_update_slice_in_dim(zeros(x), x, 0, 0)
        weights = [
            jax.tree.map(whole, w) if i in self.slice_dims else w for i, w in enumerate(weights)
        ]
        return self.tree.unflatten(weights)

    def all_gather_slices(self, tick: jax.Array | int, layer: Any) -> Any:
        """All-gathers the slices of a warm-up tick that go with a layer, as compute weights.

        `tick` is the schedule's allgather_tick. Ticks without a slice repeat the last one.
        """

        def gather(i, slot, part):
            shard = _slice(self.masters[i], slot, self.slice_dims[i], part, self.slices_per_layer)
            scale = None if self.scales[i] is None else self.scales[i][slot]
            sharding, shard = self.shardings[i], self.cast(self.shardings[i], shard)
            return quantization.weights(self.arithmetic, [sharding], [shard], [scale], False)[0]

        return self._slices(gather, 1 + tick // self.ticks, tick % self.ticks, layer)

    def reduce_scatter_slices(self, grads: Any, tick: jax.Array | int, layer: Any) -> Any:
        """Reduce-scatters the slices of a cool-down tick that go with a layer, to master shards.

        `tick` is the schedule's reducescatter_tick. The result of a tick without a slice is unused.
        """
        grads, tick = jax.tree.leaves(grads_of(grads)), jnp.maximum(tick, 0)

        def reduce(i, slot, part):
            # Row-major: XLA would transpose the whole stack for a slice of it.
            g = row_major(_slice(grads[i], slot, self.slice_dims[i], part, self.slices_per_layer))
            return row_major(reduce_grad(self.shardings[i], g))

        chunk = self.chunks - 1 - tick // self.ticks
        return self._slices(reduce, chunk, tick % self.ticks, layer)

    def _slices(self, communicate, chunk, tick, layer):
        """(index, slot, part, results per leaf) of each slice of a chunk that goes with a layer."""
        last, slices = self.layers_per_chunk * self.slices_per_layer - 1, []
        for n in range(self.slices_per_tick):
            if n * self.layers_per_chunk // self.slices_per_tick == layer:
                index = tick * self.slices_per_tick + n
                valid = jnp.minimum(index, last)
                slot = chunk * self.layers_per_chunk + valid // self.slices_per_layer
                part = valid % self.slices_per_layer
                results = [communicate(i, slot, part) for i in self.slice_dims]
                slices.append((index, slot, part, results))
        return slices

    def write_weights(self, stack: Any, slices: Any) -> Any:
        """The compute weights with the results of all_gather_slices()."""
        is_leaf = lambda x: isinstance(x, Weight | LayerState)
        leaves, tree = jax.tree.flatten(stack, is_leaf=is_leaf)
        weights = [i for i, x in enumerate(leaves) if not isinstance(x, LayerState)]
        for _, slot, part, results in slices:
            for i, w in zip((weights[i] for i in self.slice_dims), results, strict=True):
                write = lambda stack, x, at=(slot, part): _write_form(stack, x, *at)
                leaves[i] = jax.tree.map(write, leaves[i], w)
        return tree.unflatten(leaves)

    def write_gradients(self, grads: Any, slices: Any, tick: jax.Array | int) -> Any:
        """The gradients with the results of reduce_scatter_slices(), at the start of the slices
        that they are sums of: those are not read again, and a buffer would take memory."""
        leaves, tree = jax.tree.flatten(grads, is_leaf=is_accumulator)
        gradients = [i for i, x in enumerate(leaves) if not isinstance(x, Statistic)]
        for index, slot, part, results in slices:
            valid = (tick >= 0) & (index < self.layers_per_chunk * self.slices_per_layer)
            for (leaf, dim), g in zip(self.slice_dims.items(), results, strict=True):
                i = gradients[leaf]
                stack = grads_of(leaves[i])
                start = [part * n if d == dim else 0 for d, n in enumerate(g.shape)]
                old = lax.dynamic_slice(stack, [slot, *start], (1, *g.shape))
                new = lax.dynamic_update_slice(stack, jnp.where(valid, g, old), [slot, *start])
                is_pair = isinstance(leaves[i], GradAccumulator)
                leaves[i] = leaves[i]._replace(grad=new) if is_pair else new
        return tree.unflatten(leaves)

    def reduce_rest(self, grads: Any) -> Any:
        """All gradients, reduce-scattered: of sliced ones the first chunk's are left to do."""
        leaves = jax.tree.leaves(grads)

        def reduce(i, sharding: WeightSharding):
            if not (sharding.gemm and any(sharding.zero1_axes)):
                return reduce_grad(sharding, leaves[i])
            reduced = lax.slice(leaves[i], [0] * leaves[i].ndim, self.masters[i].shape)
            # One layer at a time: XLA would transpose the whole stack, the optimizer state too, and
            # jax 0.12 copy it at each chunk switch.
            for j in range(self.layers_per_chunk if i in self.slice_dims else len(reduced)):
                g = row_major(reduce_grad(self.shardings[i], row_major(leaves[i][j])))
                reduced = lax.dynamic_update_index_in_dim(reduced, g, j, 0)
            return reduced

        return self.tree.unflatten([reduce(i, sharding) for i, sharding in enumerate(self.stacked)])


class HeadPrefetch:
    """The head's weight, all-gathered in slices, one per tick of the warm-up.

    Args:
      sharding: of the weight.
      w: this GPU's master shard of it, in the compute dtype.

    Attributes:
      slices: how many; 0 if dp does not shard the weight, or no dim divides.
      shape: of the compute weight.
    """

    def __init__(self, run: Run, sharding: WeightSharding, w):
        plan, self.sharding, self.w = schedule_for(run), sharding, w
        self.shape = sharding.compute_shape(w.shape)
        before_loss = 1 + int(np.argmax(plan.column("loss_microbatch")[:, 0] >= 0))
        ticks = min(before_loss, len(plan.phases[WARMUP]))
        dims = [d for d, axes in enumerate(sharding.zero1_axes) if not axes]
        fits = [(n, d) for d in dims for n in range(1, ticks + 1) if w.shape[d] % n == 0]
        self.slices, self.dim = max(fits, default=(0, 0)) if len(dims) < w.ndim else (0, 0)

    def all_gather_slice(self, weight: Any, tick: jax.Array | int) -> Any:
        """The compute weight with the slice of a warm-up tick; later ticks repeat the last one."""
        part = jnp.minimum(tick, self.slices - 1)
        w = gather_master(self.sharding, _slice(self.w[None], 0, self.dim, part, self.slices))
        start = part * w.shape[self.dim]
        return lax.dynamic_update_slice_in_dim(weight, row_major(w), start, self.dim)


def _slice_dim(sharding: WeightSharding, shape, slices: int, block: int) -> int | None:
    """The largest dim of a layer's weight that divides into slices and that dp does not shard.

    With blocks (MXFP8) it divides into slices of whole blocks, and is the first dim of the rows or
    the columns of its matrix: operands of such a weight are matrices [ins, outs].
    """
    ins, outs = sharding.matrix_dims()
    first = lambda d: outs if d >= outs else ins if d >= ins else 0
    leads = lambda d: block == 1 or math.prod(shape[first(d) : d]) == 1
    unit = lambda d: block if d in (outs - 1, len(shape) - 1) else 1
    divides = lambda d: shape[d] % (slices * unit(d)) == 0
    dims = [d for d in range(len(shape)) if not sharding.zero1_axes[d] and divides(d) and leads(d)]
    return max(dims, key=lambda d: shape[d], default=None)


def _slice(x, slot, dim: int, part, slices: int):
    """One slice, along `dim` of a layer, of the layer in a slot of the stack x [slots, ...]."""
    size = x.shape[1 + dim] // slices
    shape = [1, *x.shape[1:]]
    shape[1 + dim] = size
    start = [slot, *[0] * (x.ndim - 1)]
    start[1 + dim] = part * size
    return lax.dynamic_slice(x, start, shape)[0]


def _write_form(stack, x, slot, part):
    """The stack [slots, ...] with a slice x of one operand of a weight, along the dim in which x is
    smaller. Row-major, or XLA would keep the stack in the layout of x, and transpose it at each
    chunk switch."""
    start = [0 if n == m else part * m for n, m in zip(stack.shape[1:], x.shape, strict=True)]
    return lax.dynamic_update_slice(stack, row_major(x)[None], [slot, *start])
