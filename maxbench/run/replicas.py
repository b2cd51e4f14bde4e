"""Copies of the weights that must be equal, compared bit for bit: silent data corruption.

Every GPU all-gathers its compute weights as the step does, and sums the hashes of their bits; the
sums of GPUs with the same shards must be equal. One small all-reduce compares them, so that a check
costs an all-gather of the weights. It is a program of its own: the step does not change.

It finds an all-gather or a memory that changes bits. It cannot find a wrong product: gradients are
summed over all GPUs, and every copy gets the same wrong update (`maxbench preflight --numerics`
does).
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from maxbench.config.run import AXES, DTYPES
from maxbench.distributed import stragglers
from maxbench.host import environment
from maxbench.run.checksums import checksum
from maxbench.run.step_timer import RunFailed
from maxbench.sharding.rules import gather_master
from maxbench.step.train_step import Step


class Replicas:
    """The comparison of a step's weights.

    Attributes:
      axes: mesh axes along which some weights have copies, a tuple for each set of weights; empty
        if no weight has any.
    """

    def __init__(self, step: Step):
        self.step, sizes = step, step.mesh.shape
        self._groups: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
        for i, sharding in enumerate(jax.tree.leaves(step.shardings)):
            split = {axis for axes in sharding.compute_axes for axis in axes}
            copies = tuple(axis for axis in AXES if sizes[axis] > 1 and axis not in split)
            if copies:
                self._groups[copies].append(i)
        self.axes = [*self._groups]
        specs = jax.tree.map(lambda s: s.master_spec, step.shardings)
        program = jax.shard_map(
            self._local, mesh=step.mesh, in_specs=(specs,), out_specs=(P(AXES), P()),
            check_vma=False,
        )  # fmt: skip
        self._program = jax.jit(program)

    def _local(self, params):
        """This GPU's sums, uint32 [1, groups], and whether those of all GPUs agree, int32."""
        weights, shardings = jax.tree.leaves(params), jax.tree.leaves(self.step.shardings)
        dtype, sums, equal = DTYPES[self.step.run.format.compute], [], jnp.int32(1)
        for axes, group in self._groups.items():
            total = jnp.uint32(0)
            for i in group:
                s, w = shardings[i], weights[i]
                total += checksum(gather_master(s, w if s.full_precision else w.astype(dtype)))
            sums.append(total)
            high, low = jax.lax.pmax(total, axes), jax.lax.pmin(total, axes)
            equal &= (high == low).astype(jnp.int32)
        return jnp.stack(sums)[None], jax.lax.pmin(equal, AXES)

    def differing(self, params: Any) -> list[int]:
        """Devices of the mesh, by their place in it, whose copies differ from those of most; all
        processes must call it.

        Of two copies that differ neither is most: both are named.
        """
        sums, equal = self._program(params)
        if int(equal):
            return []
        gathered = np.asarray(multihost_utils.process_allgather(sums, tiled=True))
        return differing(gathered, self.axes, dict(self.step.mesh.shape))


class Check:
    """Ends a run whose GPUs have other weights than their copies.

    Attributes:
      every: steps between two checks.
    """

    def __init__(self, replicas: Replicas, every: int):
        self.replicas, self.every, self.agreed = replicas, every, 0

    def __call__(self, params: Any, steps: int) -> None:
        """Checks the weights after so many steps.

        Raises:
          RunFailed: some GPUs differ; it names them.
        """
        if not (wrong := self.replicas.differing(params)):
            self.agreed = steps
            return
        devices = self.replicas.step.mesh.devices.flat
        hosts = [f["host"] for f in stragglers.allgather_json({"host": environment.hostname()})]
        names = [f"{devices[i].id} on {hosts[devices[i].process_index]}" for i in wrong]
        since, kept = "at the first check", "no checkpoint of it is known to be right"
        if self.agreed:
            since = f"they were equal after {self.agreed}"
            kept = f"resume from a checkpoint of at most {self.agreed} steps"
        raise RunFailed(
            f"weights on GPU {', '.join(names)} differ from their copies after {steps} steps, "
            f"{since}: a memory or a link changes bits; leave the host out; {kept}"
        )


def check_of(step: Step) -> Check | None:
    """The check of a run's weights; None if it is off or no weight has a copy."""
    runtime = step.run.runtime
    if not runtime.compare_replicas_every or runtime.mock_gpus:
        return None
    replicas = Replicas(step)
    return Check(replicas, runtime.compare_replicas_every) if replicas.axes else None


def differing(
    sums: np.ndarray, groups: Sequence[tuple[str, ...]], sizes: dict[str, int]
) -> list[int]:
    """Devices whose sum differs from that of most of its copies.

    Args:
      sums: [devices in row-major order of the mesh, groups].
      groups: mesh axes of the copies, of each column.
      sizes: of the mesh.
    """
    places = np.arange(len(sums)).reshape([sizes[axis] for axis in AXES])
    found: set[int] = set()
    for column, axes in enumerate(groups):
        along = [AXES.index(axis) for axis in axes]
        others = [i for i in range(len(AXES)) if i not in along]
        count = int(np.prod([sizes[axis] for axis in axes]))
        for copies in places.transpose(*others, *along).reshape(-1, count):
            values, counts = np.unique(sums[copies, column], return_counts=True)
            most = values[np.argmax(counts)] if np.sum(counts == counts.max()) == 1 else None
            if len(values) > 1:
                found |= {int(i) for i in copies if sums[i, column] != most}
    return sorted(found)
