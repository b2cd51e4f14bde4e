"""Sharding of each weight by its logical axes.

A weight has two shardings:

  compute   as the layers use it (sublayers.RULES), in the compute dtype unless full_precision
  master    the compute sharding, split further over every mesh axis that would otherwise store a
            copy: the stored weight, its gradient and its optimizer state. This is ZeRO stage 1
            (arXiv:1910.02054), Megatron's distributed optimizer, over all such axes.

The step all-gathers the compute weights from the master shards once, and reduce-scatters the
gradients onto them once (gather_master, reduce_grad).
"""

import dataclasses
import itertools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from maxbench.config.number_formats import FORMATS
from maxbench.config.run import AXES
from maxbench.config.sublayers import RULES, mesh_axes
from maxbench.sharding.collectives import axis_size

BLOCK = max(f.multiple for f in FORMATS.values())  # preferred multiple of a shard's dim


class GemmDims(NamedTuple):
    """Dims of a weight [batch..., ins..., outs...] that GEMMs read in the run's number format."""

    batch: int  # number of batch dims (experts)
    ins: int  # number of dims that the forward GEMM contracts


@dataclasses.dataclass(frozen=True)
class WeightSharding:
    """Compute and master sharding of one weight.

    Attributes:
      compute_axes: mesh axes that split each dim of the compute copy.
      zero1_axes: further mesh axes that split each dim of the master copy, varying faster.
      psum_axes: mesh axes over which the master is replicated, and its gradient all-reduced.
      gemm: set if the weight is a GEMM operand in the run's number format.
      full_precision: layers use the master weight, not a copy in the compute dtype.
    """

    compute_axes: tuple[tuple[str, ...], ...]
    zero1_axes: tuple[tuple[str, ...], ...]
    psum_axes: tuple[str, ...]
    gemm: GemmDims | None = None
    full_precision: bool = False

    @property
    def master_spec(self) -> P:
        """PartitionSpec of the master copy."""
        return P(*(c + z or None for c, z in zip(self.compute_axes, self.zero1_axes, strict=True)))

    def compute_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the compute shard, from that of the master shard; inside shard_map."""
        shards = [math.prod(map(axis_size, axes)) for axes in self.zero1_axes]
        return tuple(size * n for size, n in zip(shape, shards, strict=True))

    def matrix_dims(self, lead: int = 0) -> tuple[int, int]:
        """The first dim of ins and the first of outs of a GEMM operand, after `lead` more dims."""
        assert self.gemm is not None
        ins = lead + self.gemm.batch
        return ins, ins + self.gemm.ins

    @property
    def layer(self) -> "WeightSharding":
        """The sharding of one layer of a stacked weight."""
        return dataclasses.replace(
            self, compute_axes=self.compute_axes[1:], zero1_axes=self.zero1_axes[1:]
        )


def shard_weight(
    names: tuple[str, ...],
    shape: tuple[int, ...],
    mesh_shape: Any,
    rules: Any = RULES,
    gemm: Any = None,
    whole: Collection[str] = ("layers",),
) -> WeightSharding:
    """The sharding of a weight from its logical axes.

    A mesh axis that does not split the compute copy splits the master: the first dim of a layer
    that it divides into whole blocks of a number format, so that each all-gather and reduce-scatter
    is contiguous. A later dim costs a transpose, which the compiler may move into the loop over
    microbatches. If no dim has whole blocks, it splits the largest dim that it divides; if it
    divides none (a small norm on a large mesh), the master is replicated over it.

    Args:
      names: logical axes of the weight.
      shape: global shape.
      mesh_shape: mesh axis -> size.
      whole: logical axes that the master splits no further than the compute copy.
    """
    compute = tuple(mesh_axes(rules[n], mesh_shape.__getitem__) for n in names)
    shards = [math.prod(mesh_shape[a] for a in axes) for axes in compute]
    local = [size // n for size, n in zip(shape, shards, strict=True)]
    zero1: list[tuple[str, ...]] = [()] * len(names)
    replicated = []
    for axis in AXES:
        size = mesh_shape[axis]
        if size == 1 or axis in itertools.chain(*compute):
            continue
        dims = [i for i, name in enumerate(names) if name not in whole and local[i] % size == 0]
        if not dims:
            replicated.append(axis)
            continue
        whole_blocks = [i for i in dims if local[i] // size % BLOCK == 0]
        first = min(whole_blocks) if whole_blocks else max(dims, key=lambda i: local[i])
        # Prefer a dim that another axis splits already: one collective for both.
        dim = next((i for i in dims if zero1[i]), first)
        zero1[dim] += (axis,)
        local[dim] //= size
    # A token's choice of experts is discrete: rounding the router's weight would change it. Those
    # of a head of a state-space model are few, and their rounding adds up along the sequence.
    exact = not {"experts_replicated", "ssm_heads"}.isdisjoint(names)
    return WeightSharding(compute, tuple(zero1), tuple(replicated), gemm, full_precision=exact)


def gather_master(sharding: WeightSharding, w: jax.Array) -> jax.Array:
    """All-gathers a master shard to the compute shard."""
    for dim, axes in enumerate(sharding.zero1_axes):
        if axes:
            w = jax.lax.all_gather(w, axes, axis=dim, tiled=True)
    return w


def reduce_grad(sharding: WeightSharding, g: jax.Array) -> jax.Array:
    """Sums each GPU's gradient of the compute shard, and scatters the sum as the master shard."""
    for dim, axes in enumerate(sharding.zero1_axes):
        if axes:
            g = jax.lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True)
    return jax.lax.psum(g, sharding.psum_axes) if sharding.psum_axes else g


def local_axes(name: str) -> tuple[str, ...]:
    """The mesh axes that split a logical axis; inside shard_map."""
    return mesh_axes(RULES[name], axis_size)


def local_size(name: str, size: int) -> int:
    """Size of one GPU's shard of a logical axis; inside shard_map."""
    return size // axis_size(local_axes(name))


def size_gib(tree: Any) -> float:
    """GiB per device of a tree of arrays or ShapeDtypeStructs with shardings."""
    shard_bytes = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(map(shard_bytes, jax.tree.leaves(tree))) / 2**30
