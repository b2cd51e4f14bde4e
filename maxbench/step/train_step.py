"""The training state, and the training step, compiled once ahead of time.

    state = {'step': int32, 'params': master weights, 'opt': optimizer state}
            with non-trainable state of layers also 'layer_state' (step/state.py)
    state, out = step(state, batch)     donates the state; step/data.py has the batch

Training and planning build the step by the same code; only the devices differ.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from absl import logging
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxbench import quantization
from maxbench.config import loop_lengths, resolve
from maxbench.config.run import AXES, DTYPES, Device, Run
from maxbench.model import attention, grad_accumulation, layer_stack, transformer
from maxbench.pipeline import layer_order
from maxbench.pipeline.gradients import executor
from maxbench.pipeline.zero_overlap import ZeroOverlap
from maxbench.quantization import transformer_engine
from maxbench.sharding import collectives, ordering
from maxbench.sharding.rules import RULES, gather_master, reduce_grad, shard_weight
from maxbench.step import data, muon, optimizer, state, xla_options


class _ComputeWeights(NamedTuple):
    """One GPU's compute weights, and what reducing their gradients needs."""

    weights: dict  # {'embed': ..., 'layers': ..., 'head': ...}
    shardings: dict  # tree of WeightSharding like weights
    # In a pipeline the all-gathers and reduce-scatters of layers, and of which stacks; the first is
    # communicated in slices.
    overlaps: list[tuple[tuple[str, ...], ZeroOverlap]]
    amaxes: list  # of each stack's weights, fp32 [slots, gemms], with per-tensor scales, or None


def on_device(run: Run, device: jax.Device) -> Run:
    """The run resolved for a device that is present.

    Raises:
      UserError: the given attention kernel does not support the model on this device.
    """
    platform = "cpu" if device.platform == "cpu" else "gpu"
    major, _, minor = getattr(device, "compute_capability", "0.0").partition(".")
    present = Device(platform, (int(major), int(minor)))
    run = resolve.resolve(run.config, run.hardware, present)
    if run.train.attention != "xla" and (error := attention.compile_error(run)):
        run = resolve.resolve(run.config, run.hardware, present._replace(cudnn=False))
        logging.warning("attention uses the slower XLA kernel%s", error)
    return run


class Step:
    """The training step of a run on a mesh: shardings, initial state, and the compiled program.

    The constructor allocates no device memory and compiles nothing.

    Raises:
      UserError: Transformer Engine is selected and absent, too old, or does not load.

    Attributes:
      stacks: the stacks of the layers' weights, and the layer in each of their slots.
      shardings: tree of WeightSharding like the weights.
      abstract: the state as ShapeDtypeStructs with their NamedShardings.
    """

    def __init__(self, run: Run, devices: Mesh):
        self.platform = devices.devices.flat[0].platform
        assert (self.platform == "cpu") == (run.device.platform == "cpu")
        if run.precision.backend == "te":
            transformer_engine.load()
        self.run, self.mesh = run, devices
        self.arithmetic = quantization.arithmetic(self.run)
        self.stacks = layer_order.stacks(self.run)
        over_pp = run.layout.embedding_over_pp
        self.rules = RULES | ({"embed_sharded": RULES["embed_sharded_pp"]} if over_pp else {})
        self.shardings = self._shardings(self.stacks, self.rules)
        self.tx = self._optimizer(self.stacks, self.shardings)
        self.abstract = self._abstract(self.stacks, self.shardings)

    def _shardings(self, stacks, rules):
        init = functools.partial(transformer.init, self.run.model, table=stacks)
        boxed = jax.eval_shape(init, jax.random.key(0))
        whole = {"layers", *muon.unsplit_axes(self.run)}
        shard = lambda box: shard_weight(
            box.names, box.value.shape, self.mesh.shape, rules, box.gemm, whole
        )
        return jax.tree.map(shard, boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))

    def _optimizer(self, stacks, shardings):
        is_muon = self.run.optim.name == "muon"
        matrices = muon.Muon(self.run, self.mesh, stacks, shardings) if is_muon else None
        return optimizer.transform(self.run, matrices)

    def _abstract(self, stacks, shardings):
        shapes = jax.eval_shape(
            functools.partial(self._init, stacks=stacks, shardings=shardings), jax.random.key(0)
        )
        specs = jax.tree.map(lambda s: s.master_spec, shardings)
        by_slot = P(*jax.tree.leaves(specs["layers"])[0][:1])
        # Optimizer state contains trees like the weights, so its paths end in paths of weights.
        by_path = {path: spec for path, spec in jax.tree_util.tree_leaves_with_path(specs)}

        def sharded(path, leaf):
            spec = by_slot if path[0].key == state.KEY else P()
            spec = next((by_path[path[i:]] for i in range(len(path)) if path[i:] in by_path), spec)
            sharding = jax.sharding.NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(sharded, shapes)

    def _init(self, key, stacks, shardings):
        run = self.run
        params = nn.unbox(transformer.init(run.model, key, stacks))
        params |= {"layers": layer_stack.zero_empty(params["layers"], stacks)}
        params = optimizer.cast(params, run.precision.weights)
        tx = self._optimizer(stacks, shardings)
        opt = tx.init(optimizer.cast(params, run.precision.moments))
        result = {"step": jnp.zeros((), jnp.int32), "params": params, "opt": opt}
        if layer_state := state.init(run, stacks, shardings["layers"]):
            result[state.KEY] = layer_state
        return result

    def init(self) -> Any:
        """The initial state, created sharded on the devices; the same numbers on every mesh."""
        return self.compile_init()()

    def compile_init(self) -> Callable[[], Any]:
        """init() as a compiled function, which allocates nothing before it is called."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        # It runs once: on a CPU, optimizing the program takes longer than running it.
        options: Any = {"xla_backend_optimization_level": 0} if self.platform == "cpu" else {}
        fresh = functools.partial(self._init, stacks=self.stacks, shardings=self.shardings)
        key = jax.random.key(self.run.train.seed)
        lowered = jax.jit(fresh, out_shardings=shardings).lower(key)
        return functools.partial(lowered.compile(compiler_options=options), key)

    def with_stacks(self, stacks: layer_stack.Stacks) -> Any:
        """The abstract state with the layers in other stacks, for restack()."""
        # The number of slots may not divide by pp: shard other dims over pp instead.
        return self._abstract(stacks, self._shardings(stacks, self.rules | {"layers": ()}))

    def restack(self, before: Any, stacks: layer_stack.Stacks) -> Any:
        """The layers of a state from other stacks in this step's stacks. Deletes the state."""
        has_layers = lambda x: isinstance(x, dict) and "layers" in x
        source = self._shardings(stacks, self.rules | {"layers": ()})["layers"]

        def permute(x):
            if not has_layers(x):
                return x
            return x | {"layers": layer_stack.permute(x["layers"], self.stacks, stacks)}

        def restack(before):
            after = {k: v for k, v in before.items() if k != state.KEY}
            after = jax.tree.map(permute, after, is_leaf=has_layers)
            if state.KEY in before:
                layers = before[state.KEY]["layers"]
                layers = state.permute(layers, self.stacks, stacks, source)
                after[state.KEY] = {"layers": layers}
            return after

        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        # Arrays of other shapes cannot be written in place.
        shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
        in_place = shapes(before) == shapes(self.abstract)
        after = jax.jit(restack, out_shardings=shardings, donate_argnums=(0,) if in_place else ())(
            before
        )
        jax.block_until_ready(after)
        jax.tree.map(lambda x: x.is_deleted() or x.delete(), before)
        return after

    def lower(self) -> jax.stages.Lowered:
        """The step as jax.stages.Lowered, for the mesh."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        step = jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, None))
        return step.trace(self.abstract, data.abstract(self.run, self.mesh)).lower()

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

    def lower_loss(self) -> jax.stages.Lowered:
        """The program (state, batch) -> mean loss of the batch, and the number of its targets,
        fp32, as jax.stages.Lowered."""

        def loss(before, batch):
            mean = self.loss(before["params"], batch, before.get(state.KEY))
            return mean, data.targets(self.run, batch)

        return jax.jit(loss).trace(self.abstract, data.abstract(self.run, self.mesh)).lower()

    def loss(self, params: Any, batch: jax.Array, layer_state: Any = None) -> jax.Array:
        """The mean loss over the global batch, fp32. Arguments as those of gradients().

        A pipeline runs the forward passes of its schedule.
        """
        masters, by_slot = self._specs()
        pipeline = self.run.layout.pp > 1
        loss = jax.shard_map(
            self._local_pipeline_loss if pipeline else self._local_loss,
            mesh=self.mesh,
            in_specs=(masters, data.SPEC, by_slot),
            out_specs=P(),
            check_vma=False,
        )
        return loss(params, batch, layer_state and state.read(layer_state))

    def _local_pipeline_loss(self, params, batch, layer_state):
        """loss() on one GPU of a pipeline, inside shard_map."""
        with ordering.enabled(self.run.train.order == "auto"):
            w, _, overlaps, _ = self._compute_weights(params, layer_state)
            share = data.share(self.run, batch)
            zeros = grad_accumulation.zeros(w, DTYPES[self.run.precision.grads])
            out = self._executor(w, batch, overlaps[0][1], share).metrics(zeros)
        return collectives.psum(out["loss"], *self.mesh.axis_names)

    def _local_loss(self, params, batch, layer_state):
        """loss() on one GPU, inside shard_map."""
        run = self.run
        w = self._compute_weights(params, layer_state).weights

        share = data.share(run, batch)

        def of_microbatch(micro):
            tokens_bt, targets_bt, *_ = data.microbatch(run, batch, micro)
            documents_bt = data.documents(run, tokens_bt)
            x_bud, _ = transformer.forward(run, w, tokens_bt, documents_bt=documents_bt)
            return transformer.lm_loss(run, w, x_bud, targets_bt, share=share)

        losses = jax.lax.map(of_microbatch, jnp.arange(run.layout.microbatches))
        return collectives.psum(jnp.sum(losses), *self.mesh.axis_names)

    def _step(self, before, batch):
        p = self.run.precision
        layer_state = before.get(state.KEY)
        grads, out, statistics = self.gradients(before["params"], batch, layer_state)
        # The update is computed in fp32, whatever the dtypes of the state.
        grads, opt, params = (
            optimizer.cast(x, "fp32") for x in (grads, before["opt"], before["params"])
        )
        out["lr"] = optimizer.learning_rate(self.run)(before["step"])
        updates, opt = self.tx.update(grads, opt, params, norm=out["grad_norm"])
        params = optimizer.cast(optax.apply_updates(params, updates), p.weights)
        opt = optimizer.cast(opt, p.moments)
        after = {"step": before["step"] + 1, "params": params, "opt": opt}
        if layer_state:
            after[state.KEY] = state.update(self.run, self.stacks, layer_state, statistics)
        return after, out

    def gradients(self, params: Any, batch: jax.Array, layer_state: Any = None) -> Any:
        """Gradients of the mean loss over the global batch, and the metrics of the step.

        Args:
          params: master weights.
          batch: int32, as step/data.py has it.
          layer_state: non-trainable state of layers (step/state.py), or None.

        Returns:
          Gradients, sharded as the master weights; {'loss', 'aux', 'grad_norm'} and the metrics of
          layers' state, fp32 scalars; the statistics of this step, a tree like layer_state, or
          None.
        """
        masters, by_slot = self._specs()
        grads = jax.shard_map(
            self.local_gradients,
            mesh=self.mesh,
            in_specs=(masters, data.SPEC, by_slot),
            out_specs=(masters, P(), by_slot),
            check_vma=False,
        )
        return grads(params, batch, layer_state and state.read(layer_state))

    def _specs(self):
        """PartitionSpecs of the master weights, and of what has a value for each slot."""
        masters = jax.tree.map(lambda s: s.master_spec, self.shardings)
        return masters, P(*jax.tree.leaves(masters["layers"])[0][:1])

    def local_gradients(self, params: Any, batch: jax.Array, layer_state: Any) -> Any:
        """gradients() on one GPU, inside shard_map; layer_state is what state.read() returns."""
        with ordering.enabled(self.run.train.order == "auto"):
            return self._local_grads_in_order(params, batch, layer_state)

    def _local_grads_in_order(self, params, batch, layer_state):
        w, shardings, overlaps, amaxes = self._compute_weights(params, layer_state)
        sums, out = self._accumulated_grads(w, batch, overlaps[0][1] if overlaps else None)
        stacked = not self.run.train.unrolled
        statistics = layer_state and self._statistics(layer_state, sums["layers"], amaxes)
        grads = grad_accumulation.grads_of(sums)
        reduced = lambda name: jax.tree.map(reduce_grad, shardings[name], grads[name])
        layers = self._reduce_stages(overlaps, grads["layers"]) if overlaps else reduced("layers")
        grads = {name: reduced(name) for name in grads if name != "layers"} | {"layers": layers}
        if not stacked:
            grads["layers"] = layer_stack.stack(self.run.model, grads["layers"])
        out = jax.tree.map(lambda x: collectives.psum(x, *self.mesh.axis_names), out)
        out["grad_norm"] = optimizer.global_norm(self.shardings, grads)
        if statistics:
            out |= state.metrics(self.run, self.stacks, statistics)
        return grads, out, statistics

    def _statistics(self, layer_state, sums, amaxes):
        """Statistics for state.update(), from gradient accumulators and amaxes of weights."""
        unrolled = self.run.train.unrolled
        trees = layer_stack.split(self.stacks, layer_state["layers"])
        statistics = []
        sums = layer_stack.by_stack(self.stacks, sums)
        for stack, tree, layers, amax_w in zip(self.stacks, trees, sums, amaxes, strict=True):
            amax = grad_accumulation.amaxes_of(layers, not unrolled)
            if amax is not None:
                amax = collectives.pmax(amax, *(axis for axis in AXES if axis != "pp"))
                amax = jnp.concatenate([amax, amax_w[..., None]], -1)
            if unrolled:
                counted = map(grad_accumulation.statistics_of, layers)
                counted = jax.tree.map(lambda *x: jnp.stack(x), *counted)
            else:
                counted = grad_accumulation.statistics_of(layers)
            statistics.append(state.statistics(self.run, stack, tree, counted, amax))
        return {"layers": layer_stack.join(self.stacks, statistics)}

    def _compute_weights(self, params, layer_state) -> _ComputeWeights:
        """All-gathers (and quantizes) the compute weights from this GPU's master shards.

        Once per step, as the reduction of the gradients is, however many microbatches there are.
        """
        run = self.run
        # Cast before the all-gather: half the bytes, and no cast to differentiate.
        cast = lambda s, w: w if s.full_precision else w.astype(DTYPES[run.format.compute])
        w, shardings = jax.tree.map(cast, self.shardings, params), self.shardings
        stacked = not run.train.unrolled
        if not stacked:
            w = w | {"layers": layer_stack.unstack(run.model, w["layers"])}
            layer = jax.tree.map(lambda s: s.layer, shardings["layers"])
            layers = layer_stack.repeat(run.model, layer)
            shardings = shardings | {"layers": layers}
        trees: list = [{}] * len(self.stacks)
        if layer_state:
            trees = layer_stack.split(self.stacks, layer_state["layers"])
        pasts = [tree.get("amax") for tree in trees]
        overlaps: list = []
        if run.layout.pp > 1:
            head = None if run.model.tied else (shardings["head"]["w"], w["head"]["w"])
            layers, amaxes, overlaps = self._all_gather_stages(
                shardings["layers"], params["layers"], cast, pasts, head
            )
            # The head is read last, after the warm-up: its all-gather follows those of the layers.
            # If ZeroOverlap gathers it in slices, nothing reads this result, and XLA drops it.
            w["head"] = ordering.after(w["head"], ordering.token(layers))
        else:
            layers, amaxes = self._quantize(shardings["layers"], w["layers"], pasts)
        if layer_state:
            layers = self._with_state(layers, trees)
        gathered = lambda name: jax.tree.map(gather_master, shardings[name], w[name])
        weights = {name: gathered(name) for name in w if name != "layers"} | {"layers": layers}
        return _ComputeWeights(weights, shardings, overlaps, amaxes)

    def _all_gather_stages(self, shardings, masters, cast, pasts, head):
        """Compute weights of a pipeline's layers, amaxes of each stack, and the ZeroOverlaps."""
        sliced = layer_order.placement(self.run).sliced
        rest = [(s.name,) for s in self.stacks if s.name not in sliced]
        names = [sliced, *rest] if sliced else rest
        past_of = {s.name: past for s, past in zip(self.stacks, pasts, strict=True)}
        layers, amax_of, overlaps = {}, {}, []
        for i, group in enumerate(names):
            trees = [_stacks_of(group, tree) for tree in (shardings, masters)]
            past = [past_of[name] for name in group if past_of[name] is not None]
            overlap = ZeroOverlap(
                self.run, self.arithmetic, *trees, cast, _concatenate(past),
                head=head if i == 0 and sliced else None, sliced=group == sliced,
            )  # fmt: skip
            overlaps.append((group, overlap))
            weights = overlap.initial_weights()
            layers |= {"": weights} if group == ("",) else weights
            first = 0
            for name in group:
                leaves = jax.tree.leaves(_stacks_of((name,), shardings))
                gemms = sum(bool(s.gemm) for s in leaves)
                amax = overlap.amax
                cut = amax is not None and len(group) > 1
                amax_of[name] = amax[:, first : first + gemms] if cut else amax
                first += gemms
        amaxes = [amax_of[s.name] for s in self.stacks]
        return layers.get("", layers), amaxes, overlaps

    @staticmethod
    def _reduce_stages(overlaps, grads):
        layers: dict = {}
        for group, overlap in overlaps:
            reduced = overlap.reduce_rest(_stacks_of(group, grads))
            layers |= {"": reduced} if group == ("",) else reduced
        return layers.get("", layers)

    def _quantize(self, shardings, masters, pasts):
        """Compute weights of layers, and amaxes of each stack."""
        stacked, stacks = not self.run.train.unrolled, []
        of_stacks = (layer_stack.by_stack(self.stacks, tree) for tree in (shardings, masters))
        for *args, past in zip(*of_stacks, pasts, strict=True):
            scales, amax = quantization.scales(self.arithmetic, *args, stacked, past)
            weights = quantization.weights(self.arithmetic, *args, scales, stacked)
            stacks.append((weights, amax))
        weights, amaxes = zip(*stacks, strict=True)
        return layer_stack.from_stacks(self.stacks, weights), list(amaxes)

    def _with_state(self, layers, trees):
        """Layers with the state that they read; `trees` is the state of each stack."""
        merge = lambda layer, w, tree: _merge(w, state.for_layers(self.run, layer, tree))
        if isinstance(layers, tuple):
            tree = layer_stack.unstack(self.run.model, layer_stack.join(self.stacks, trees))
            return tuple(map(merge, self.run.model.per_layer, layers, tree))
        stacks = layer_stack.split(self.stacks, layers)
        merged = map(merge, (stack.layer for stack in self.stacks), stacks, trees)
        return layer_stack.join(self.stacks, list(merged))

    def _accumulated_grads(self, w, batch, overlap: ZeroOverlap | None):
        """Gradient accumulators after all microbatches, and this GPU's shares of the metrics."""
        run = self.run
        zeros = grad_accumulation.zeros(w, DTYPES[run.precision.grads])
        share = data.share(run, batch)
        if run.train.overlapped:
            return self._executor(w, batch, overlap, share).gradients(zeros)

        def accumulate(accumulators, micro):
            tokens_bt, targets_bt, *after = data.microbatch(run, batch, micro)
            more = {"documents_bt": data.documents(run, tokens_bt), "share": share}
            loss = lambda accumulators: transformer.loss_fn(
                run, w, tokens_bt, targets_bt, accumulators, *after, **more
            )
            return jax.grad(loss, has_aux=True)(accumulators)

        count = run.layout.microbatches
        if count == 1:
            return accumulate(zeros, 0)
        if count == 2 or run.layout.fsdp > 1:
            return self._loop_of_unknown_length(accumulate, zeros, batch, count)
        grads, out = jax.lax.scan(accumulate, zeros, jnp.arange(count))
        return grads, jax.tree.map(jnp.sum, out)

    def _executor(self, w, batch, overlap: ZeroOverlap | None, share):
        microbatch = functools.partial(data.microbatch, self.run, batch)
        documents = functools.partial(data.documents, self.run)
        return executor(self.run, w, microbatch, overlap, documents, share)

    @staticmethod
    def _loop_of_unknown_length(accumulate, zeros, batch, count):
        """A loop over microbatches with a trip count that XLA does not know: it is not
        double-buffered.

        Of a loop over two, double buffering leaves no loop, and XLA would run both microbatches at
        once, with two activation stashes. With fsdp, XLA allocates most of the stash of an
        iteration's second microbatch before the backward pass of the first.
        """

        def add(micro, state):
            grads, sums = state
            grads, out = accumulate(grads, micro)
            return grads, jax.tree.map(jnp.add, sums, out)

        sums = jax.tree.map(lambda s: jnp.zeros(s.shape), jax.eval_shape(accumulate, zeros, 0)[1])
        with jax.named_scope(loop_lengths.MICROBATCHES):
            zero = jnp.minimum(batch[0, 0, 0], 0)  # no token is negative, which XLA does not know
            return jax.lax.fori_loop(0, count + zero, add, (zeros, sums))


def _stacks_of(names, layers):
    """Some stacks of a tree of layers."""
    return layers if names == ("",) else {name: layers[name] for name in names}


def _concatenate(pasts):
    """Amax histories of several stacks, [slots, gemms, 3], as one; None if there is none."""
    return jnp.concatenate(pasts, 1) if len(pasts) > 1 else next(iter(pasts), None)


def _merge(tree, more):
    """A nested dict with the entries of another."""
    inner = {k: _merge(tree[k], v) for k, v in more.items() if isinstance(v, dict)}
    return tree | more | inner
