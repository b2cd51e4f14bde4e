"""The state and one training step, compiled once, ahead of time.

    state = {'step': int32, 'params': master weights, 'opt': optimizer state}
    state, out = step(state)        the state is donated; the batch is made inside

Training and planning build the step the same way; only the devices differ.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxbench import data, mesh, model, optim
from maxbench.config import DTYPES, Run


class Step:
    """What a run on a mesh is made of: places, shardings, init, and the step itself.

    Building it costs no memory and no compilation.

    Attributes:
      places: mesh.Place of each weight.
      abstract: the state as ShapeDtypeStructs with their shardings.
    """

    def __init__(self, run: Run, devices: Mesh):
        self.run, self.mesh = run, devices
        self.platform = devices.devices.flat[0].platform
        kind = run.train.attention
        if kind == "auto":
            kind = "cudnn" if self.platform in ("gpu", "cuda") and not run.model.softcap else "xla"
        self.attention = kind
        self.tx = optim.transform(run)
        boxed = jax.eval_shape(functools.partial(model.init, run.model), jax.random.key(0))
        place = lambda box: mesh.place(box.names, box.value.shape, devices.shape)
        self.places = jax.tree.map(place, boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))
        self.abstract = self._abstract()

    def _abstract(self):
        shapes = jax.eval_shape(self._init, jax.random.key(0))
        specs = jax.tree.map(lambda p: p.master_spec, self.places)
        # Optimizer state holds trees like the weights: their leaves end in the weights' paths.
        by_path = {path: spec for path, spec in jax.tree_util.tree_leaves_with_path(specs)}

        def sharded(path, leaf):
            spec = next((by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path), P())
            sharding = jax.sharding.NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(sharded, shapes)

    def _init(self, key):
        run = self.run
        params = optim.cast(nn.unbox(model.init(run.model, key)), run.precision.weights)
        opt = self.tx.init(optim.cast(params, run.precision.moments))
        return {"step": jnp.zeros((), jnp.int32), "params": params, "opt": opt}

    def init(self):
        """A new state, made in place on every device; the same numbers on every mesh."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        return jax.jit(self._init, out_shardings=shardings)(jax.random.key(self.run.train.seed))

    def lower(self):
        """The step, traced and lowered for the mesh; .compile() it."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        step = jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, None))
        return step.trace(self.abstract).lower()

    def _step(self, state):
        p = self.run.precision
        grads, out = self._grads(state["params"], state["step"])
        grads = optim.cast(grads, p.moments)
        out["grad_norm"] = optax.tree.norm(grads)
        out["lr"] = optim.learning_rate(self.run)(state["step"])
        updates, opt = self.tx.update(grads, state["opt"], optim.cast(state["params"], p.moments))
        params = optax.apply_updates(state["params"], updates)
        return {"step": state["step"] + 1, "params": params, "opt": opt}, out

    def _grads(self, params, step):
        """Gradients of the mean loss, placed as the master weights, and what is reported."""
        masters = jax.tree.map(lambda p: p.master_spec, self.places)
        grads = jax.shard_map(
            self._local_grads,
            mesh=self.mesh,
            in_specs=(masters, P()),
            out_specs=(masters, P()),
            check_vma=False,
        )
        return grads(params, step)

    def _local_grads(self, params, step):
        """One GPU's part of _grads: the whole of the forward and backward pass."""
        run, p = self.run, self.run.precision
        # The compute copy is gathered once, and gradients are reduced once, however many
        # microbatches there are. Cast first: half the bytes, and no casts to differentiate.
        w = jax.tree.map(mesh.gather_master, self.places, optim.cast(params, p.dtype))

        def microbatch(w, micro, sums=None):
            batch = data.batch(run, step, micro)
            return model.objective(run, self.attention, self.places, w, *batch, sums)

        def accumulate(sums, micro):
            return jax.grad(microbatch, argnums=2, has_aux=True)(w, micro, sums)

        count = run.layout.microbatches
        if count == 1:
            grads, out = jax.grad(microbatch, has_aux=True)(w, 0)
            grads = optim.cast(grads, p.grads)
        else:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, DTYPES[p.grads]), w)
            grads, out = jax.lax.scan(accumulate, zeros, jnp.arange(count))
            out = jax.tree.map(jnp.sum, out)
        grads = jax.tree.map(mesh.reduce_grad, self.places, grads)
        return grads, jax.tree.map(lambda x: mesh.total(x, *self.mesh.axis_names), out)
