"""Ahead-of-time compilation of a run's step by XLA's GPU compiler, without GPUs.

The Step is that of training, on compile-only devices.
"""

import resource

import jax

from maxbench.config.number_formats import FORMATS
from maxbench.config.run import Run
from maxbench.cost_model import absent_gpus, compile_cache, memory, stub_libcuda
from maxbench.sharding import mesh, rules
from maxbench.step.train_step import Step


def compile_run(run: Run) -> compile_cache.CompiledStep:
    """Compiles the run's step for its GPUs.

    Raises:
      UserError: Transformer Engine is needed and does not load.
    """
    if run.precision.backend == "te":
        stub_libcuda.install(run.gpu.chip)
    step = Step(run, mesh.make_mesh(run.layout, absent_gpus.devices(run.gpu, run.layout.gpus)))
    with absent_gpus.no_persistent_cache():
        compiled, lower_s, compile_s = step.compile(**absent_gpus.PROGRAM_ONLY)
    text, sizes = compiled.as_text(), compiled.memory_analysis()
    assert text is not None  # XLA's compilers have both
    assert sizes is not None
    parts = {name: round(rules.size_gib(tree) * 2**30) for name, tree in step.abstract.items()}

    def local_shape(weight, leaf):  # of a compute weight on one GPU
        sharding = jax.sharding.NamedSharding(
            step.mesh, jax.sharding.PartitionSpec(*weight.compute_axes)
        )
        return jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)

    weights = jax.tree.map(local_shape, step.shardings, step.abstract["params"])
    count = lambda tree: sum(w.size for w in jax.tree.leaves(tree))
    elements, layers = count(weights), count(weights["layers"])
    return compile_cache.CompiledStep(
        text=text,
        weights=parts["params"],
        optimizer=parts["opt"],
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        host=sizes.host_temp_size_in_bytes,
        copy=int(memory.compute_weight_bytes(run, layers, elements - layers)),
        gradients=elements * FORMATS[run.precision.grads].bytes,
        attention=step.run.train.attention,
        lower_s=lower_s,
        compile_s=compile_s,
        peak_rss_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
