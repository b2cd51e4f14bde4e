"""Muon (arXiv:2502.16982): the momentum of each matrix, orthogonalized, is its update.

    m = b m + (1 - b) g        u = the Nesterov average of m and g
    update = 0.2 sqrt(max(rows, columns)) x newton_schulz(u)

The factor gives updates the root mean square of AdamW's, so one learning rate and one weight decay
serve both. The matrices are the GEMM weights of layers, but for routers; AdamW updates all others:
embedding, LM head, norms, biases, routers, convolutions. A weight that fuses matrices (queries,
keys and values; gate and up-projection; the inputs of Mamba-2) is taken apart into them
(Sublayer.fused). Layers, experts, and equal matrices of a weight are a batch.

The momentum is sharded as the weight, by fsdp, tp and ZeRO-1 in the dims of the matrix, by pp and
ep in its batch. No GPU repeats the work of another: of the GPUs that share matrices, each receives
some whole ones by all-to-all, orthogonalizes them, and returns the shards by all-to-all, in the
compute dtype of the run. As many matrices are on their way at a time as one layer has of equal
ones, or one on each GPU if those are fewer; experts do not leave their GPUs of ep. A matrix with no
dim that an axis divides is on all its GPUs, and all of them orthogonalize it.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from maxbench.config.model import Model
from maxbench.config.run import DTYPES, Run
from maxbench.config.sublayers import Weight
from maxbench.model.layer_stack import Stacks
from maxbench.sharding.collectives import axis_size
from maxbench.sharding.rules import WeightSharding

RMS = 0.2  # of an update over its learning rate: AdamW's
STEPS, COEFFICIENTS, EPS = 5, (3.4445, -4.7750, 2.0315), 1e-8  # of Newton-Schulz; optax has them


class State(NamedTuple):
    """The optimizer state: the number of steps, and the momentum, a tree like the weights."""

    steps: jax.Array
    momentum: Any


def matrices(m: Model, table: Stacks) -> dict[str, Weight]:
    """The weights that Muon updates, by their paths in the tree of all weights."""
    found = dict(m.mtp_weights)
    for stack in table:
        prefix = f"layers/{stack.name}/" if stack.name else "layers/"
        found |= {prefix + path: w for path, w in m.layer_weights(stack.layer).items()}
    return {path: w for path, w in found.items() if w.is_gemm and not w.plain}


def unsplit_axes(run: Run) -> set[str]:
    """Logical axes that ZeRO-1 must not split: those along which matrices are fused, with Muon."""
    layers = [layer for _, layer in run.model.kinds if run.optim.name == "muon"]
    return {axis for layer in layers for _, part in layer.parts() for axis in part.fused}


class Muon:
    """Muon for the weights in a table of stacks.

    Args:
      shardings: tree of WeightSharding of all weights, none of which splits unsplit_axes() further.
    """

    def __init__(self, run: Run, mesh: Mesh, table: Stacks, shardings: Any):
        self.mesh, self.momentum = mesh, run.optim.momentum
        self.dtype = DTYPES[run.format.compute]
        self.weights = matrices(run.model, table)
        leaves = jax.tree_util.tree_leaves_with_path(shardings)
        self.shardings: dict[str, WeightSharding] = {_name(path): s for path, s in leaves}

    def has(self, path: Any) -> bool:
        """Whether Muon updates the weight of this path in a tree."""
        return _name(path) in self.weights

    def transform(self) -> optax.GradientTransformation:
        """Gradients of its weights -> orthogonalized momentum; the rest of the tree is masked."""

        def init(params):
            return State(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

        def update(grads, before, params=None):
            b, steps = self.momentum, before.steps + 1
            average = lambda m, g: b * m + (1 - b) * g
            momentum = jax.tree.map(average, before.momentum, grads)
            # Nesterov's average, as optax.contrib.muon corrects its bias.
            ahead, now = 1 - b ** (steps + 1), 1 - b**steps
            nesterov = jax.tree.map(lambda m, g: average(m / ahead, g / now), momentum, grads)
            return self.orthogonalized(nesterov), State(steps, momentum)

        return optax.GradientTransformation(init, update)

    def orthogonalized(self, tree: Any) -> Any:
        """The update of each weight of a tree, sharded as the master weights."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
        names, arrays = [_name(path) for path, _ in leaves], [x for _, x in leaves]
        specs = [self.shardings[name].master_spec for name in names]
        local = lambda arrays: [self._of_weight(*of) for of in zip(names, arrays, strict=True)]
        of_all = jax.shard_map(
            local, mesh=self.mesh, in_specs=(specs,), out_specs=specs, check_vma=False
        )
        return jax.tree.unflatten(treedef, of_all(arrays))

    def _of_weight(self, name: str, x: jax.Array) -> jax.Array:
        """The update of a weight from this GPU's shard, inside shard_map."""
        weight, sharding = self.weights[name], self.shardings[name]
        axes = [c + z for c, z in zip(sharding.compute_axes, sharding.zero1_axes, strict=True)]
        if unstacked := x.ndim == len(weight.names):
            x, axes = x[None], [(), *axes]
        batch, ins, _ = map(len, weight.sides)
        matrix = 1 + batch  # its first dim
        dim, sizes = weight.fused
        ends = [*itertools.accumulate(sizes)][:-1]
        assert not ends or not axes[1 + dim]
        parts = jnp.split(x, ends, 1 + dim)
        updates: dict[int, jax.Array] = {}
        for shape in dict.fromkeys(part.shape for part in parts):
            equal = [i for i, part in enumerate(parts) if part.shape == shape]
            group = jnp.stack([parts[i] for i in equal], matrix)
            group = self._of_group(group, axes[matrix:], ins)
            updates |= {i: jnp.take(group, n, matrix) for n, i in enumerate(equal)}
        update = jnp.concatenate([updates[i] for i in range(len(parts))], 1 + dim)
        return update[0] if unstacked else update

    def _of_group(self, x: jax.Array, axes: Any, ins: int) -> jax.Array:
        """The updates of this GPU's shards of equal matrices, [layers, ..., ins..., outs...].

        Args:
          axes: mesh axes that split each dim of ins and outs.
          ins: number of dims of ins.
        """
        lead = x.ndim - len(axes)
        local = x.shape[lead:]
        count, of_layer = math.prod(x.shape[:lead]), math.prod(x.shape[1:lead])
        gpus = math.prod(axis_size(axis) for names in axes for axis in names)
        at_once = -(-of_layer // gpus) * gpus
        rounds = -(-count // at_once)
        shards = x.astype(self.dtype).reshape(count, *local)
        shards = jnp.pad(shards, [(0, rounds * at_once - count), *[(0, 0)] * len(local)])
        split = [(dim, names) for dim, names in enumerate(axes, 1) if names]

        def orthogonalize(x):
            for dim, names in split:
                x = jax.lax.all_to_all(x, names, 0, dim, tiled=True)
            whole = x.reshape(len(x), math.prod(x.shape[1 : 1 + ins]), -1)
            factor = RMS * math.sqrt(max(whole.shape[1:]))
            x = (factor * newton_schulz(whole)).reshape(x.shape)
            for dim, names in reversed(split):
                x = jax.lax.all_to_all(x, names, dim, 0, tiled=True)
            return x

        if rounds == 1:
            updates = orthogonalize(shards)
        else:  # a loop, so that few whole matrices are in memory at a time
            updates = jax.lax.map(orthogonalize, shards.reshape(rounds, at_once, *local))
        return updates.reshape(-1, *local)[:count].reshape(x.shape).astype(x.dtype)


def newton_schulz(x: jax.Array) -> jax.Array:
    """Matrices with the singular vectors of x, [matrices, rows, columns], and singular values near
    1. GEMMs are in the dtype of x, their sums in fp32. A matrix of zeros stays one."""
    if x.shape[1] > x.shape[2]:  # the GEMMs of the transpose are smaller
        return newton_schulz(x.swapaxes(1, 2)).swapaxes(1, 2)
    a, b, c = COEFFICIENTS
    dtype, wide = x.dtype, lambda x: x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(jnp.square(wide(x)), (1, 2), keepdims=True))
    x = (wide(x) / (norm + EPS)).astype(dtype)
    for _ in range(STEPS):
        gram = x @ x.swapaxes(1, 2)
        polynomial = (b * wide(gram) + c * wide(gram @ gram)).astype(dtype)
        x = (a * wide(x) + wide(polynomial @ x)).astype(dtype)
    return x


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
