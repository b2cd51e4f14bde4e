"""The training state, and the training step, compiled once ahead of time.

    state = {'step': int32, 'params': master weights, 'opt': optimizer state}
            with delayed scaling also 'fp8': {'layers': amax history [slots, gemms, 3, steps]}
    state, out = step(state)        donates the state, and generates the batch on the device

Training and planning build the step by the same code; only the devices differ.
"""

import dataclasses
import functools
import time
from typing import Any, NamedTuple

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
from maxbench.pipeline import layer_order
from maxbench.pipeline.gradients import gradients
from maxbench.pipeline.zero_overlap import ZeroOverlap
from maxbench.quantization import fp8_per_tensor, transformer_engine
from maxbench.sharding import collectives, ordering
from maxbench.sharding.rules import RULES, gather_master, reduce_grad, shard_weight
from maxbench.step import data, optimizer, xla_options


class _ComputeWeights(NamedTuple):
    """One GPU's compute weights, and what reducing their gradients needs."""

    weights: dict  # {'embed': ..., 'layers': ..., 'head': ...}
    shardings: dict  # tree of WeightSharding like weights
    overlap: ZeroOverlap | None  # in a pipeline: layers' all-gathers and reduce-scatters
    amax: jax.Array | None  # of layers' weights, fp32 [layers, gemms], with per-tensor scales


def for_device(run: Run, device: Any) -> Run:
    """The run with its automatic settings resolved for a device: attention kernel, number format,
    chunk size of the loss, and how many layers are unrolled.

    Raises:
      UserError: Transformer Engine is selected and absent, too old, or does not load; the selected
        attention kernel does not support the model on this device.
    """
    t, gpu = run.train, device.platform in ("gpu", "cuda")
    logits_bytes = 1 << 30 if gpu else 32 << 20  # of one chunk's fp32 logits; a CPU's cache size
    # A power of two, as token counts mostly are: no chunk is padded, and no smaller one remains.
    tokens = max(1, logits_bytes // (4 * run.model.vocab // run.layout.tp))
    chunk = 1 << (tokens.bit_length() - 1)
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
    """The training step of a run on a mesh: shardings, initial state, and the compiled program.

    The constructor allocates no device memory and compiles nothing.

    Attributes:
      run: resolved by for_device.
      stacks: the stacks of the layers' weights, and the layer in each of their slots.
      shardings: tree of WeightSharding like the weights.
      abstract: the state as ShapeDtypeStructs with their NamedShardings.
    """

    def __init__(self, run: Run, devices: Mesh):
        device = devices.devices.flat[0]
        self.platform = device.platform
        self.run, self.mesh = for_device(run, device), devices
        self.arithmetic, self.tx = quantization.arithmetic(self.run), optimizer.transform(run)
        self.stacks = layer_order.stacks(self.run)
        over_pp = lowering.embedding_sharded_over_pp(self.run)
        self.rules = RULES | ({"embed_sharded": RULES["embed_sharded_pp"]} if over_pp else {})
        self.shardings = self._shardings(self.stacks, self.rules)
        self.abstract = self._abstract(self.stacks, self.shardings)

    def _shardings(self, stacks, rules):
        init = functools.partial(transformer.init, self.run.model, table=stacks)
        boxed = jax.eval_shape(init, jax.random.key(0))
        shard = lambda box: shard_weight(
            box.names, box.value.shape, self.mesh.shape, rules, box.gemm
        )
        return jax.tree.map(shard, boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))

    def _abstract(self, stacks, shardings):
        shapes = jax.eval_shape(functools.partial(self._init, stacks=stacks), jax.random.key(0))
        specs = jax.tree.map(lambda s: s.master_spec, shardings)
        by_slot = P(*jax.tree.leaves(specs["layers"])[0][:1])
        # Optimizer state contains trees like the weights, so its paths end in paths of weights.
        by_path = {path: spec for path, spec in jax.tree_util.tree_leaves_with_path(specs)}

        def sharded(path, leaf):
            spec = by_slot if path[0].key == "fp8" else P()
            spec = next((by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path), spec)
            sharding = jax.sharding.NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(sharded, shapes)

    def _init(self, key, stacks):
        run = self.run
        params = nn.unbox(transformer.init(run.model, key, stacks))
        params |= {"layers": layer_stack.zero_empty(params["layers"], stacks)}
        params = optimizer.cast(params, run.precision.weights)
        opt = self.tx.init(optimizer.cast(params, run.precision.moments))
        state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt": opt}
        if length := run.precision.amax_history_len:
            gemms = sum(bool(s.gemm) for s in jax.tree.leaves(self.shardings["layers"]))
            slots = len(stacks[0].slots)
            state["fp8"] = {"layers": fp8_per_tensor.init_amax_history(slots, gemms, length)}
        return state

    def init(self) -> Any:
        """The initial state, created sharded on the devices; the same numbers on every mesh."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        # It runs once: on a CPU, optimizing the program takes longer than running it.
        options = {"xla_backend_optimization_level": 0} if self.platform == "cpu" else {}
        fresh = functools.partial(self._init, stacks=self.stacks)
        init = jax.jit(fresh, out_shardings=shardings, compiler_options=options)
        return init(jax.random.key(self.run.train.seed))

    def with_stacks(self, stacks: layer_stack.Stacks) -> Any:
        """The abstract state with the layers in other stacks, for restack()."""
        # The number of slots may not divide by pp: shard other dims over pp instead.
        return self._abstract(stacks, self._shardings(stacks, self.rules | {"layers": ()}))

    def restack(self, state: Any, stacks: layer_stack.Stacks) -> Any:
        """The layers of a state from other stacks in this step's stacks. Donates the state."""
        has_layers = lambda x: isinstance(x, dict) and "layers" in x

        def permute(x):
            if not has_layers(x):
                return x
            return x | {"layers": layer_stack.permute(x["layers"], self.stacks, stacks)}

        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        restack = lambda state: jax.tree.map(permute, state, is_leaf=has_layers)
        return jax.jit(restack, out_shardings=shardings, donate_argnums=0)(state)

    def lower(self) -> jax.stages.Lowered:
        """The step as jax.stages.Lowered, for the mesh."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        step = jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, None))
        return step.trace(self.abstract).lower()

    def compile(self, **compiler_options: Any) -> tuple[jax.stages.Compiled, float, float]:
        """The compiled step, the seconds of tracing and lowering, and the seconds of compilation.

        compiler_options override those of xla_options().
        """
        start = time.perf_counter()
        lowered = self.lower()
        traced = time.perf_counter()
        options = xla_options.xla_options(self.platform, self.run) | compiler_options
        compiled = lowered.compile(compiler_options=options)
        return compiled, traced - start, time.perf_counter() - traced

    def _step(self, state):
        p = self.run.precision
        history = state["fp8"]["layers"] if p.amax_history_len else None
        grads, out, amax = self.gradients(state["params"], state["step"], history)
        # The update is computed in fp32, whatever the dtypes of the state.
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
            state["fp8"] = {"layers": fp8_per_tensor.update_amax_history(history, amax)}
        return state, out

    def gradients(self, params: Any, step: Any, history: Any = None) -> Any:
        """Gradients of the mean loss over the global batch, and the metrics of the step.

        Args:
          params: master weights.
          step: its number, which determines the batch.
          history: with delayed scaling, the amax history [slots, gemms, 3, steps], from which the
            scales follow.

        Returns:
          Gradients, sharded as the master weights; {'loss', 'aux'}, fp32 scalars; with delayed
          scaling this step's amax [slots, gemms, 3], else None.
        """
        masters = jax.tree.map(lambda s: s.master_spec, self.shardings)
        by_slot = P(*jax.tree.leaves(masters["layers"])[0][:1])
        grads = jax.shard_map(
            self._local_grads,
            mesh=self.mesh,
            in_specs=(masters, P(), by_slot),
            out_specs=(masters, P(), by_slot),
            check_vma=False,
        )
        return grads(params, step, None if history is None else jnp.max(history, -1))

    def _local_grads(self, params, step, past):
        """gradients() on one GPU, inside shard_map; `past` is the history's maximum over steps."""
        with ordering.enabled(self.run.train.order == "auto"):
            return self._local_grads_in_order(params, step, past)

    def _local_grads_in_order(self, params, step, past):
        w, shardings, overlap, amax_w = self._compute_weights(params, past)
        grads, out = self._accumulated_grads(w, step, overlap)
        stacked = not lowering.layers_unrolled(self.run)
        grads, amax = grad_accumulation.grads_of(grads), grad_accumulation.amaxes_of(grads, stacked)
        if amax is not None:
            amax = collectives.pmax(amax, *(axis for axis in AXES if axis != "pp"))
            amax = jnp.concatenate([amax, amax_w[..., None]], -1)
        reduced = lambda name: jax.tree.map(reduce_grad, shardings[name], grads[name])
        layers = overlap.reduce_rest(grads["layers"]) if overlap else reduced("layers")
        grads = {name: reduced(name) for name in ("embed", "head")} | {"layers": layers}
        if not stacked:
            grads["layers"] = layer_stack.stack(self.run.model, grads["layers"])
        return grads, jax.tree.map(lambda x: collectives.psum(x, *self.mesh.axis_names), out), amax

    def _compute_weights(self, params, past) -> _ComputeWeights:
        """All-gathers (and quantizes) the compute weights from this GPU's master shards.

        Once per step, as the reduction of the gradients is, however many microbatches there are.
        """
        run = self.run
        # Cast before the all-gather: half the bytes, and no cast to differentiate.
        cast = lambda s, w: w if s.full_precision else w.astype(DTYPES[run.format.compute])
        w, shardings = jax.tree.map(cast, self.shardings, params), self.shardings
        stacked = not lowering.layers_unrolled(run)
        if not stacked:
            w = w | {"layers": layer_stack.unstack(run.model, w["layers"])}
            layer = jax.tree.map(lambda s: s.layer, shardings["layers"])
            layers = layer_stack.repeat(run.model, layer)
            shardings = shardings | {"layers": layers}
        args = self.arithmetic, shardings["layers"], w["layers"]
        overlap = None
        if run.layout.pp > 1:
            head = None if run.model.tied else (shardings["head"]["w"], w["head"]["w"])
            overlap = ZeroOverlap(run, *args[:2], params["layers"], cast, past, head)
            layers, amax = overlap.initial_weights(), overlap.amax
            # The head is read last, after the warm-up: its all-gather follows those of the layers.
            # If ZeroOverlap gathers it in slices, nothing reads this result, and XLA drops it.
            w["head"] = ordering.after(w["head"], ordering.token(layers))
        else:
            scales, amax = quantization.scales(*args, stacked, past)
            layers = quantization.weights(*args, scales, stacked)
        gathered = lambda name: jax.tree.map(gather_master, shardings[name], w[name])
        weights = {name: gathered(name) for name in ("embed", "head")} | {"layers": layers}
        return _ComputeWeights(weights, shardings, overlap, amax)

    def _accumulated_grads(self, w, step, overlap: ZeroOverlap | None):
        """Gradient accumulators after all microbatches, and this GPU's shares of the metrics."""
        run = self.run
        zeros = grad_accumulation.zeros(w, DTYPES[run.precision.grads])
        if lowering.overlaps_fwd_bwd(run):
            batch = functools.partial(data.batch, run, step)
            return gradients(run, self.platform, w, zeros, batch, overlap)

        def accumulate(accumulators, micro):
            loss = lambda accumulators: transformer.loss_fn(
                run, w, *data.batch(run, step, micro), accumulators
            )
            return jax.grad(loss, has_aux=True)(accumulators)

        count = run.layout.microbatches
        if count == 1:
            return accumulate(zeros, 0)
        if count == 2:
            return self._two_microbatches(accumulate, zeros, step)
        grads, out = jax.lax.scan(accumulate, zeros, jnp.arange(count))
        return grads, jax.tree.map(jnp.sum, out)

    @staticmethod
    def _two_microbatches(accumulate, zeros, step):
        """A loop over two microbatches with a trip count that XLA does not know.

        Of a loop over two, double buffering leaves no loop, and XLA would run both microbatches at
        once, with two activation stashes.
        """

        def add(micro, state):
            grads, sums = state
            grads, out = accumulate(grads, micro)
            return grads, jax.tree.map(jnp.add, sums, out)

        sums = jax.tree.map(lambda s: jnp.zeros(s.shape), jax.eval_shape(accumulate, zeros, 0)[1])
        with jax.named_scope("about_2_trips"):  # cost_model/hlo.py reads it
            return jax.lax.fori_loop(0, 2 + jnp.minimum(step, 0), add, (zeros, sums))
