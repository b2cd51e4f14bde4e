"""The place of each weight: one table of rules, from logical axes to mesh axes.

A weight has two places:

  compute   split as the layers use it (RULES), in the compute precision unless exact
  master    split further over every axis that would only hold a copy (ZeRO-1): the fp32 weight,
            its gradient and its optimizer state
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from maxbench.config.number_formats import FORMATS
from maxbench.config.run import AXES
from maxbench.sharding.collectives import axis_size

BLOCK = max(f.multiple for f in FORMATS.values())  # what a split dim is best a multiple of

# Logical axis of a weight -> mesh axes, the last changing fastest. The only table of placements
# there is.
RULES = {
    "layers": ("pp",),
    "embed": ("fsdp",),
    "experts": ("ep",),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "mlp": ("tp",),
    "vocab": ("tp",),
    "columns": ("tp", "fsdp"),
    "stage_columns": ("tp", "fsdp", "pp"),  # in place of columns, if program.columns_over_pp
    # whole on every GPU
    "words": (),
    "qkv": (),
    "head_dim": (),
    "value_width": (),
    "group_width": (),
    "gates": (),
    "width": (),
    "routes": (),
}


class GemmDims(NamedTuple):
    """A weight [batch..., ins..., outs...] of a layer that is multiplied in the run's format."""

    batch: int  # dims
    ins: int  # dims that the product sums over


@dataclasses.dataclass(frozen=True)
class WeightSharding:
    """Where one weight lives. `compute[i]` and `zero[i]` are the mesh axes that split dim i."""

    compute_axes: tuple[tuple[str, ...], ...]
    zero1_axes: tuple[tuple[str, ...], ...]  # further axes of the master copy, minor to compute's
    psum_axes: tuple[str, ...]  # axes over which its gradient is summed without being split
    gemm: GemmDims | None = None
    exact: bool = False  # layers see the master weight, not a copy in the compute precision

    @property
    def master_spec(self) -> P:
        return P(*(c + z or None for c, z in zip(self.compute_axes, self.zero1_axes, strict=True)))

    def compute_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Master shard -> compute shard, of shapes, within the mesh."""
        degrees = [math.prod(map(axis_size, axes)) for axes in self.zero1_axes]
        return tuple(n * more for n, more in zip(shape, degrees, strict=True))

    @property
    def layer(self) -> "WeightSharding":
        """Of one layer of a stacked weight."""
        return dataclasses.replace(
            self, compute_axes=self.compute_axes[1:], zero1_axes=self.zero1_axes[1:]
        )


def shard_weight(
    names: tuple[str, ...], shape: tuple[int, ...], degrees, rules=RULES, gemm=None
) -> WeightSharding:
    """The place of a weight from its logical axes.

    Each axis that would hold a copy of the weight splits the first dim of a layer that it divides
    into whole blocks of a number format: what is gathered and scattered then lies in one piece.
    Another dim costs a transpose, and where the compiler moves that into the loop over
    microbatches, one for each. Without such a dim it splits the largest that it divides; what it
    divides nowhere (a tiny norm on a large mesh) stays a copy.
    """
    compute = tuple(tuple(a for a in rules[n] if degrees[a] > 1) for n in names)
    parts = [math.prod(degrees[a] for a in axes) for axes in compute]
    left = [size // n for size, n in zip(shape, parts, strict=True)]
    zero: list[tuple[str, ...]] = [()] * len(names)
    summed = []
    for axis in AXES:
        if degrees[axis] == 1 or axis in itertools.chain(*compute):
            continue
        within = [i for i, name in enumerate(names) if name != "layers"]
        fits = [i for i in within if left[i] % degrees[axis] == 0]
        if not fits:
            summed.append(axis)
            continue
        whole = [i for i in fits if left[i] // degrees[axis] % BLOCK == 0]
        # The dim already split this way keeps a weight's master in one dim: one collective.
        first = min(whole) if whole else max(fits, key=lambda i: left[i])
        dim = next((i for i in fits if zero[i]), first)
        zero[dim] += (axis,)
        left[dim] //= degrees[axis]
    # Which expert a token takes is discrete: a router keeps all the bits of its weight.
    return WeightSharding(compute, tuple(zero), tuple(summed), gemm, exact="routes" in names)


def gather_master(place: WeightSharding, w: jax.Array) -> jax.Array:
    """Master shard -> compute shard."""
    for dim, axes in enumerate(place.zero1_axes):
        if axes:
            w = jax.lax.all_gather(w, axes, axis=dim, tiled=True)
    return w


def reduce_grad(place: WeightSharding, g: jax.Array) -> jax.Array:
    """Gradient of the compute shard on each GPU -> its sum over GPUs, split as the master."""
    for dim, axes in enumerate(place.zero1_axes):
        if axes:
            g = jax.lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True)
    return jax.lax.psum(g, place.psum_axes) if place.psum_axes else g


def local_size(name: str, size: int) -> int:
    """What one GPU holds of a weight's logical axis between two uses."""
    return size // math.prod(map(axis_size, RULES[name]))


def size_gib(tree) -> float:
    """Bytes that one device holds of a tree of arrays or ShapeDtypeStructs with shardings, GiB."""
    leaf = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(map(leaf, jax.tree.leaves(tree))) / 2**30
