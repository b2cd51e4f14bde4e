"""Where everything lives: the mesh, the place of each weight, and the collectives between GPUs.

The step is one shard_map over all mesh axes, so every collective in the program is one of the
functions below; nothing is left for a partitioner to guess. A weight has two places:

  compute   split as the layers use it (RULES), in the compute precision
  master    split further over every axis that would only hold a copy (ZeRO-1): the fp32 weight,
            its gradient and its optimizer state
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbench.config import AXES, Layout

# Logical axis of a weight -> mesh axis. The only table of placements there is.
RULES = {
    "layers": "pp",
    "embed": "fsdp",
    "experts": "ep",
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
    "vocab": "tp",
    # whole on every GPU
    "qkv": None,
    "head_dim": None,
    "gates": None,
    "width": None,
    "routes": None,
}
DATA = ("dp", "fsdp", "ep")  # axes that split the batch


def make_mesh(layout: Layout, devices: list | None = None) -> Mesh:
    """The mesh of a layout over devices (default: all that JAX sees), slowest axis first.

    Raises:
      ValueError: fewer devices than the layout needs.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < layout.gpus:
        raise ValueError(
            f"{layout.describe()}: {layout.gpus} are needed and {len(devices)} present "
            f"({devices[0].device_kind}); --cpu_devices {layout.gpus} makes virtual ones, and the "
            "presets :tiny and :rehearse fit a laptop; maxbench plan needs no devices at all"
        )
    degrees = [getattr(layout, axis) for axis in AXES]
    auto = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(degrees, AXES, axis_types=auto, devices=devices[: layout.gpus])


# Places of weights.


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one weight lives. `compute[i]` and `zero[i]` are the mesh axes that split dim i."""

    compute: tuple[str | None, ...]
    zero: tuple[tuple[str, ...], ...]  # further axes of the master copy, minor to compute's
    summed: tuple[str, ...]  # axes over which its gradient is summed without being split

    @property
    def compute_spec(self) -> P:
        return P(*self.compute)

    @property
    def master_spec(self) -> P:
        split = zip(self.compute, self.zero, strict=True)
        return P(*(((c,) if c else ()) + z or None for c, z in split))

    @property
    def layer(self) -> "Place":
        """Of one layer of a stacked weight."""
        return Place(self.compute[1:], self.zero[1:], self.summed)


def place(names: tuple[str, ...], shape: tuple[int, ...], degrees, rules=RULES) -> Place:
    """The place of a weight from its logical axes.

    Each axis that would hold a copy of the weight splits the largest dim of a layer that it
    divides; what divides none (a tiny norm on a large mesh) stays a copy.
    """
    compute = tuple(a if (a := rules[n]) and degrees[a] > 1 else None for n in names)
    left = [
        size // (degrees[axis] if axis else 1) for size, axis in zip(shape, compute, strict=True)
    ]
    zero: list[tuple[str, ...]] = [()] * len(names)
    summed = []
    for axis in AXES:
        if degrees[axis] == 1 or axis in compute:
            continue
        within = [i for i, name in enumerate(names) if name != "layers"]
        fits = [i for i in within if left[i] % degrees[axis] == 0]
        if not fits:
            summed.append(axis)
            continue
        # The dim already split this way keeps a weight's master in one dim: one collective.
        dim = max(fits, key=lambda i: (bool(zero[i]), left[i]))
        zero[dim] += (axis,)
        left[dim] //= degrees[axis]
    return Place(compute, tuple(zero), tuple(summed))


def gather_master(place: Place, w: jax.Array) -> jax.Array:
    """Master shard -> compute shard."""
    for dim, axes in enumerate(place.zero):
        if axes:
            w = jax.lax.all_gather(w, axes, axis=dim, tiled=True)
    return w


def reduce_grad(place: Place, g: jax.Array) -> jax.Array:
    """Gradient of the compute shard on each GPU -> its sum over GPUs, split as the master."""
    for dim, axes in enumerate(place.zero):
        if axes:
            g = jax.lax.psum_scatter(g, axes, scatter_dimension=dim, tiled=True)
    return jax.lax.psum(g, place.summed) if place.summed else g


def shardings(mesh: Mesh, specs):
    """NamedSharding for every PartitionSpec of a tree."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P))


# Inside the step. Each is the identity on an axis of degree 1 and outside shard_map.


def degree(axis: str | None) -> int:
    """GPUs along a mesh axis (or none) of the enclosing shard_map; 1 outside of one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def index(axis: str) -> jax.Array | int:
    """This GPU's position along a mesh axis."""
    return jax.lax.axis_index(axis) if degree(axis) > 1 else 0


def local(name: str, size: int) -> int:
    """What one GPU holds of a weight's logical axis between two uses."""
    return size // degree(RULES[name])


def gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """All-gather along dim; the gradient is reduce-scattered."""
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True) if degree(axis) > 1 else x


def scatter(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Reduce-scatter along dim; the gradient is all-gathered."""
    if degree(axis) == 1:
        return x
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def total(x: jax.Array, *axes: str) -> jax.Array:
    """Sum over mesh axes."""
    axes = tuple(a for a in axes if degree(a) > 1)
    return jax.lax.psum(x, axes) if axes else x


def largest(x: jax.Array, *axes: str) -> jax.Array:
    """Maximum over mesh axes."""
    axes = tuple(a for a in axes if degree(a) > 1)
    return jax.lax.pmax(x, axes) if axes else x


def exchange(x: jax.Array, axis: str, split: int = 0, join: int = 0) -> jax.Array:
    """All-to-all: part i of dim `split` goes to GPU i; part j of dim `join` comes from GPU j."""
    return jax.lax.all_to_all(x, axis, split, join, tiled=True) if degree(axis) > 1 else x


def rotate(tree, axis: str, by: int = 1):
    """Every array of the tree goes to the GPU `by` further along the axis, round its end."""
    n = degree(axis)
    if n == 1:
        return tree
    permute = lambda tree: jax.lax.ppermute(tree, axis, [(i, (i + by) % n) for i in range(n)])
    if axis == "pp" or degree("pp") == 1:
        return permute(tree)
    # XLA:CPU's permute waits for all GPUs of the mesh, those of idle pipeline stages included.
    pick = lambda x: jax.lax.all_gather(x, axis)[(jax.lax.axis_index(axis) - by) % n]
    gathered = lambda tree: jax.tree.map(pick, tree)
    return jax.lax.platform_dependent(tree, cpu=gathered, default=permute)


def beside(sent, made):
    """What collectives bring, as it is, but needed only once `made` is there.

    XLA's scheduler then runs the collective beside the work that makes `made`. Left alone it puts
    off gradients of weights to the end, and waits for collectives. An optimization barrier is gone
    before it looks; a zero that it cannot know to be one is not.
    """
    zero = 0 * made[(0,) * made.ndim]
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), sent)


def after(x, tree):
    """The tree, on a CPU not before x is there.

    XLA:CPU may run a conditional and a collective that do not depend on each other at once, each
    device in its own order, and then waits for ever.
    """
    held = lambda x, tree: jax.lax.optimization_barrier((x, tree))[1]
    return jax.lax.platform_dependent(x, tree, cpu=held, default=lambda x, tree: tree)


def chunks(seq: int) -> np.ndarray | jax.Array:
    """Positions of this GPU's tokens over cp: chunk i and chunk 2 cp - 1 - i of 2 cp.

    A causal mask gives late tokens more work than early ones; the pair is the same for all.
    """
    n = degree("cp")
    if n == 1:
        return np.arange(seq)
    size, i = seq // (2 * n), index("cp")
    first = jnp.arange(size)
    return jnp.concatenate([first + i * size, first + (2 * n - 1 - i) * size])


def rows(layout: Layout, micro: jax.Array | int) -> jax.Array:
    """Numbers, within the global batch, of this GPU's sequences in a microbatch."""
    shard = 0
    for axis in DATA:
        shard = shard * degree(axis) + index(axis)
    return (micro * layout.shards + shard) * layout.mbs + jnp.arange(layout.mbs)


def size_gib(tree) -> float:
    """Bytes that one device holds of a tree of arrays or ShapeDtypeStructs with shardings, GiB."""
    leaf = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(map(leaf, jax.tree.leaves(tree))) / 2**30
