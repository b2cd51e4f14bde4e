"""The state and one training step, compiled once, ahead of time.

    state = {'step': int32, 'params': master weights, 'opt': optimizer state}
    and, where FP8 scaling is delayed, 'fp8': {'layers': [slots, gemms, 3, history]} (tensor.py)
    state, out = step(state)        the state is donated; the batch is made inside

Training and planning build the step the same way; only the devices differ.
"""

import dataclasses
import functools
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxbench import quantization
from maxbench.config import lowering
from maxbench.config.run import AXES, DTYPES, Run
from maxbench.model import attention, grad_accumulation, layer_stack, transformer
from maxbench.pipeline import executor, layer_order
from maxbench.pipeline.zero_overlap import ZeroOverlap
from maxbench.quantization import fp8_per_tensor, transformer_engine
from maxbench.sharding import collectives, ordering
from maxbench.sharding.rules import RULES, gather_master, reduce_grad, shard_weight
from maxbench.step import data, optimizer, xla_options


def for_device(run: Run, device) -> Run:
    """The run with what it leaves open settled: attention, format, loss chunk, loop or no loop.

    Raises:
      ValueError: Transformer Engine is wanted and absent, too old, or does not load.
      UserError: attention has no such kernel on the device.
    """
    t, gpu = run.train, device.platform in ("gpu", "cuda")
    budget = 1 << 30 if gpu else 32 << 20  # bytes; on a CPU, what its cache may hold
    # A power of two, as tokens mostly are: no chunk is padded, and none is left over.
    most = max(1, budget // (4 * run.model.vocab // run.layout.tp))
    chunk = 1 << (most.bit_length() - 1)
    kind = attention.select_kernel(run, device)
    unroll = t.unroll_layers if t.unroll_layers >= 0 else lowering.MAX_UNROLLED_LAYERS * gpu
    train = dataclasses.replace(
        t, attention=kind, loss_chunk=t.loss_chunk or chunk, unroll_layers=unroll
    )
    p = run.precision
    if run.format.quantized and p.backend == "te":
        transformer_engine.load()
    scaling = run.format.name if run.format.quantized else p.scaling
    precision = dataclasses.replace(p, scaling=scaling)
    return dataclasses.replace(run, train=train, precision=precision)


class Step:
    """What a run on a mesh is made of: places, shardings, init, and the step itself.

    Building it costs no memory and no compilation.

    Attributes:
      places: Place of each weight.
      abstract: the state as ShapeDtypeStructs with their shardings.
    """

    def __init__(self, run: Run, devices: Mesh):
        device = devices.devices.flat[0]
        self.platform = device.platform
        self.run, self.mesh = for_device(run, device), devices
        self.arithmetic, self.tx = quantization.arithmetic(self.run), optimizer.transform(run)
        self.order = layer_order.layer_order(run.model.layers, run.layout.pp, run.layout.vp)
        over_pp = lowering.embedding_sharded_over_pp(self.run)
        self.rules = RULES | ({"columns": RULES["stage_columns"]} if over_pp else {})
        self.places = self._places(self.order, self.rules)
        self.abstract = self._abstract(self.order, self.places)

    def _places(self, order, rules):
        init = functools.partial(layer_order.init, self.run.model, order=order)
        boxed = jax.eval_shape(init, jax.random.key(0))
        placed = lambda box: shard_weight(
            box.names, box.value.shape, self.mesh.shape, rules, box.gemm
        )
        return jax.tree.map(placed, boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))

    def _abstract(self, order, places):
        shapes = jax.eval_shape(functools.partial(self._init, order=order), jax.random.key(0))
        specs = jax.tree.map(lambda p: p.master_spec, places)
        by_slot = P(*jax.tree.leaves(specs["layers"])[0][:1])
        # Optimizer state holds trees like the weights: their leaves end in the weights' paths.
        by_path = {path: spec for path, spec in jax.tree_util.tree_leaves_with_path(specs)}

        def sharded(path, leaf):
            spec = by_slot if path[0].key == "fp8" else P()
            spec = next((by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path), spec)
            sharding = jax.sharding.NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(sharded, shapes)

    def _init(self, key, order):
        run = self.run
        params = optimizer.cast(
            nn.unbox(layer_order.init(run.model, key, order)), run.precision.weights
        )
        opt = self.tx.init(optimizer.cast(params, run.precision.moments))
        state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt": opt}
        if length := run.precision.amax_history_len:
            gemms = sum(bool(place.gemm) for place in jax.tree.leaves(self.places["layers"]))
            state["fp8"] = {"layers": fp8_per_tensor.init_amax_history(len(order), gemms, length)}
        return state

    def init(self):
        """A new state, made in place on every device; the same numbers on every mesh."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        # It runs once: XLA:CPU would take seconds to make the random numbers a little faster.
        options = {"xla_backend_optimization_level": 0} if self.platform == "cpu" else {}
        init = functools.partial(self._init, order=self.order)
        init = jax.jit(init, out_shardings=shardings, compiler_options=options)
        return init(jax.random.key(self.run.train.seed))

    def in_order(self, order):
        """The abstract state with its layers in another order, for reorder()."""
        # Its slots may not divide by pp: split other dims over it instead.
        return self._abstract(order, self._places(order, self.rules | {"layers": ()}))

    def reorder(self, state, order):
        """A state whose layers are in `order` -> the same state in the order of this step."""

        def take(path, x):
            keys = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            return layer_order.permute(x, self.order, order) if "layers" in keys else x

        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        reorder = lambda state: jax.tree_util.tree_map_with_path(take, state)
        return jax.jit(reorder, out_shardings=shardings, donate_argnums=0)(state)

    def lower(self):
        """The step, traced and lowered for the mesh."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        step = jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, None))
        return step.trace(self.abstract).lower()

    def compile(self, **more) -> tuple[jax.stages.Compiled, float, float]:
        """The step, compiled ahead of time, and the seconds that lowering and compiling took.

        `more` are compiler options beside those of the run.
        """
        start = time.perf_counter()
        lowered = self.lower()
        traced = time.perf_counter()
        options = xla_options.xla_options(self.platform, self.run) | more
        compiled = lowered.compile(compiler_options=options)
        return compiled, traced - start, time.perf_counter() - traced

    def _step(self, state):
        p = self.run.precision
        past = state["fp8"]["layers"] if p.amax_history_len else None
        grads, out, amax = self.gradients(state["params"], state["step"], past)
        # Computed in fp32, whatever it is kept in.
        grads, opt, params = (
            optimizer.cast(x, "fp32") for x in (grads, state["opt"], state["params"])
        )
        out["grad_norm"] = optax.tree.norm(grads)
        out["lr"] = optimizer.learning_rate(self.run)(state["step"])
        updates, opt = self.tx.update(grads, opt, params)
        params = optimizer.cast(optax.apply_updates(params, updates), p.weights)
        opt = optimizer.cast(opt, p.moments)
        state = {"step": state["step"] + 1, "params": params, "opt": opt}
        if p.amax_history_len:
            state["fp8"] = {"layers": fp8_per_tensor.update_amax_history(past, amax)}
        return state, out

    def gradients(self, params, step, past=None):
        """Gradients of the mean loss, placed as the master weights, and what is reported.

        With delayed scaling the past [slots, gemms, 3, history] decides the scales, and the third
        result is this step's largest magnitudes [slots, gemms, 3]; else it is None.
        """
        masters = jax.tree.map(lambda p: p.master_spec, self.places)
        by_slot = P(*jax.tree.leaves(masters["layers"])[0][:1])
        grads = jax.shard_map(
            self._local_grads,
            mesh=self.mesh,
            in_specs=(masters, P(), by_slot),
            out_specs=(masters, P(), by_slot),
            check_vma=False,
        )
        return grads(params, step, None if past is None else jnp.max(past, -1))

    def _local_grads(self, params, step, past):
        """One GPU's part of gradients(): the whole of the forward and backward pass."""
        run = self.run
        # The compute copy is gathered once, and gradients are reduced once, however many
        # microbatches there are. Cast first: half the bytes, and no casts to differentiate.
        cast = lambda place, w: w if place.full_precision else w.astype(DTYPES[run.format.compute])
        w, places = jax.tree.map(cast, self.places, params), self.places
        stacked = not lowering.layers_unrolled(run)
        if not stacked:
            w = w | {"layers": layer_stack.unstack(run.model, w["layers"])}
            layer = jax.tree.map(lambda place: place.layer, places["layers"])
            layers = layer_stack.repeat(run.model, layer, len(w["layers"]))
            places = places | {"layers": layers}
        layers = self.arithmetic, places["layers"], w["layers"]
        gathered = lambda name: jax.tree.map(gather_master, places[name], w[name])
        pieces = None
        if run.layout.pp > 1:
            head = None if run.model.tied else (places["head"]["w"], w["head"]["w"])
            pieces = ZeroOverlap(run, *layers[:2], params["layers"], cast, past, head)
            made, amax_w = pieces.start(), pieces.amax
            # The head is read last, when the fill is over: it comes when these have. If its weight
            # comes in parts, nothing reads what is gathered here, and XLA leaves it out.
            w["head"] = ordering.after(w["head"], ordering.token(made))
        else:
            scales, amax_w = quantization.scales(*layers, stacked, past)
            made = quantization.weights(*layers, scales, stacked)
        w = {name: gathered(name) for name in ("embed", "head")} | {"layers": made}
        zeros = grad_accumulation.zeros(w, DTYPES[run.precision.grads])

        def accumulate(sums, micro):
            objective = lambda sums: transformer.loss_fn(
                run, w, *data.batch(run, step, micro), sums
            )
            return jax.grad(objective, has_aux=True)(sums)

        count = run.layout.microbatches
        if lowering.overlaps_fwd_bwd(run):
            batch = functools.partial(data.batch, run, step)
            grads, out = executor.gradients(run, w, zeros, batch, pieces)
        elif count == 1:
            grads, out = accumulate(zeros, 0)
        else:
            grads, out = jax.lax.scan(accumulate, zeros, jnp.arange(count))
            out = jax.tree.map(jnp.sum, out)
        grads, amax = grad_accumulation.grads_of(grads), grad_accumulation.amaxes_of(grads, stacked)
        if amax is not None:
            amax = collectives.pmax(amax, *(axis for axis in AXES if axis != "pp"))
            amax = jnp.concatenate([amax, amax_w[..., None]], -1)
        reduced = lambda name: jax.tree.map(reduce_grad, places[name], grads[name])
        layers = pieces.finish(grads["layers"]) if pieces else reduced("layers")
        grads = {name: reduced(name) for name in ("embed", "head")} | {"layers": layers}
        if not stacked:
            grads["layers"] = layer_stack.stack(run.model, grads["layers"])
        return grads, jax.tree.map(lambda x: collectives.psum(x, *self.mesh.axis_names), out), amax
