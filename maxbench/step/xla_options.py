"""XLA compiler options of the step, by GPU type, layout and version of XLA.

They are passed to the compiler with the program. In XLA_FLAGS an unknown option would abort the
process.
"""

from maxbench.config.run import Run
from maxbench.sharding import jax_compat

# For every GPU program: NVIDIA's JAX recipe for Llama 2, except options that XLA has removed.
XLA_OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_command_buffer": "",
    "xla_gpu_enable_highest_priority_async_stream": True,
    # Combines the permutes of keys and values over cp: separate, the second would wait.
    "xla_gpu_collective_permute_combine_threshold_bytes": 1 << 30,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    "xla_disable_hlo_passes": "rematerialization",
    # The scheduler stops overlapping communication when its memory estimate exceeds a limit, and it
    # counts a pipeline's buffers several times. Buffer assignment decides whether a step fits.
    "xla_gpu_memory_limit_slop_factor": 300,
}

# With XLA:CPU's scheduler for concurrency, its default, devices start collectives of one program in
# different orders and deadlock (jax 0.12: 5 of 5 processes within 300 steps of Llama on tp=2).
CPU_XLA_OPTIONS = {"xla_cpu_enable_concurrency_optimized_scheduler": False}

MANY_NODES = 64  # from here on the recipes halve the reduce-scatter threshold


def xla_options(platform_name: str, run: Run) -> dict:
    """Compiler options of a run on a platform, as JAX names it ('gpu', 'cuda', 'cpu')."""
    if platform_name not in ("gpu", "cuda"):
        return dict(CPU_XLA_OPTIONS)
    options = dict(XLA_OPTIONS)
    # With fsdp, pipelined all-gathers prefetch the next layer's weights while the previous layer's
    # gradients are reduced. Without, XLA would pipeline tp's all-gathers of activations over
    # microbatches, and run the forward pass twice to do so.
    fsdp = run.layout.fsdp > 1
    options |= jax_compat.collective_pipelining(
        reduce_scatter=True, all_reduce=True, all_gather=fsdp
    )
    # Avoids copies between loop iterations, 3 to 7 % of the steps of Grok-1 and Nemotron. A long
    # loop body has no such copies, and would be compiled twice.
    long_body = run.layout.pp == 1 and not fsdp and run.model.layers > 16
    options["xla_gpu_enable_while_loop_double_buffering"] = not long_body
    # Collectives in flight at once: reduce-scatters of a layer and all-gathers of the next one; a
    # stage's sends, and collectives of the layers that those overlap; the two roundings of what the
    # halves of a microbatch send to experts, and their scales. With a lower limit XLA waits for one
    # collective where the next must start.
    in_flight = 4 if run.train.overlapped or run.train.two_batch_overlap or fsdp else 1
    options["xla_gpu_experimental_parallel_collective_overlap_limit"] = in_flight
    for kind, size in _combine_thresholds(run).items():
        options[f"xla_gpu_{kind}_combine_threshold_bytes"] = size
    options |= jax_compat.collective_kernels_off()
    options |= run.gpu.xla_options
    if run.layout.tp > 1 and not run.runtime.tp_overlap:
        options["xla_gpu_disable_async_collectives"] = "ALLGATHER,REDUCESCATTER"
    return options


def _combine_thresholds(run: Run) -> dict[str, int]:
    """Bytes up to which XLA combines collectives of each kind."""
    a, m = run.layout, run.model
    reduce, gather, scatter = run.train.collective_combine_bytes
    if a.tp > 1:
        # A combined collective starts when the last of its operands is computed. Those of
        # activations over tp are not combined, so that each overlaps the next GEMM. Nor are
        # all-reduces, of which FP8 has one for each scale of x and of dy; except in FP8 without a
        # pipeline, where fewer launches save more time than the wait takes.
        gather = scatter = 1
        reduce = 1 if a.pp > 1 or not run.format.quantized else reduce
        if a.pp > 1:
            # Less than two sequences: combines ZeRO's slices of a tick (pipeline/zero_overlap.py)
            # and no two of tp's collectives.
            tokens = a.mbs * run.train.seq // a.cp
            gather = int(tokens * m.embed * run.format.bytes)
            scatter = 2 * tokens * m.embed // a.tp
    if a.gpus // run.gpu.gpus_per_node >= MANY_NODES:
        scatter //= 2
    return {"all_reduce": reduce, "all_gather": gather, "reduce_scatter": scatter}
