"""What XLA is told beside the program: options by GPU type and workload.

They are given to the compiler with the program, not through XLA_FLAGS, where an unknown one would
end the process.
"""

from maxbench.config import lowering
from maxbench.config.run import Run
from maxbench.sharding import jax_compat

# Compiler options for GPUs: NVIDIA's recipe for Llama 2 on JAX, as far as today's XLA knows them.
XLA_OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_command_buffer": "",
    "xla_gpu_enable_highest_priority_async_stream": True,
    # Keys and values go round cp together: one after the other, the first would be waited for.
    "xla_gpu_collective_permute_combine_threshold_bytes": 1 << 30,
    "xla_gpu_enable_all_gather_combine_by_dim": False,
    "xla_gpu_enable_reduce_scatter_combine_by_dim": False,
    "xla_disable_hlo_passes": "rematerialization",
    # The scheduler hides no communication once it thinks that memory is short, and it counts a
    # pipeline's buffers several times. Whether a step fits is for the buffer assignment to say.
    "xla_gpu_memory_limit_slop_factor": 300,
}

# Bytes at which collectives are combined (all-reduce, all-gather, reduce-scatter) where the
# workload's file says nothing, train.collective_combine_bytes: NVIDIA's MaxText recipe for Llama 2, but for FP8's
# gathers, 512 MiB there: a layer's weights come at once, as they do in BF16.
COMBINE = {
    "fp8": (1 << 30, 1 << 30, 8 << 20),
    "bf16": (2 << 30, 2 << 30, 32 << 20),
}
MANY_NODES = 64  # from here on the recipes halve the reduce-scatter threshold


def xla_options(platform_name: str, run: Run) -> dict:
    """Compiler options for a platform as jax names it ('gpu', 'cpu'), by GPU type and workload."""
    if platform_name not in ("gpu", "cuda"):
        return {}
    options, gpu = dict(XLA_OPTIONS), run.gpu
    # Where weights are gathered layer by layer: gather the next layer's early, while the last
    # one's gradients are still reduced. Elsewhere XLA would pipeline the sequence's all-gathers
    # over microbatches, and run the forward pass twice to do so.
    gathers = run.layout.fsdp > 1
    options |= jax_compat.collective_pipelining(
        reduce_scatter=True, all_reduce=True, all_gather=gathers
    )
    # Saves copies from one iteration to the next, 3 to 7 % of Grok-1's and Nemotron's steps; where
    # a microbatch's code is long it saves nothing, and is compiled twice.
    long = run.layout.pp == 1 and not gathers and run.model.layers > 16
    options["xla_gpu_enable_while_loop_double_buffering"] = not long
    # Four: a layer's gradients are reduced while the next one's weights are gathered, and what a
    # stage sends travels beside work that has collectives of its own. With fewer, XLA waits for one
    # at once where the next must start.
    overlap = 4 if lowering.overlaps_fwd_bwd(run) or gathers else 1
    options["xla_gpu_experimental_parallel_collective_overlap_limit"] = overlap
    dtype = "fp8" if run.format.quantized else "bf16"
    reduce, gather, scatter = run.train.collective_combine_bytes or COMBINE[dtype]
    if run.layout.tp > 1:
        # Joined, a sequence's would wait for the last of them, and x's scale for that of dy; in FP8
        # without a pipeline that saves more launches than it waits.
        gather = scatter = 1
        reduce = 1 if run.layout.pp > 1 or not run.format.quantized else reduce
        if run.layout.pp > 1:  # less than two sequences: those of a piece's weights (pieces.py)
            tokens = run.layout.mbs * run.train.seq // run.layout.cp
            gather = int(tokens * run.model.embed * run.format.bytes)
            scatter = 2 * tokens * run.model.embed // run.layout.tp
    if run.layout.gpus // gpu.gpus_per_node >= MANY_NODES:
        scatter //= 2
    for name, size in (("all_reduce", reduce), ("all_gather", gather), ("reduce_scatter", scatter)):
        options[f"xla_gpu_{name}_combine_threshold_bytes"] = size
    options |= jax_compat.collective_kernels_off()
    options |= gpu.xla_options
    if run.layout.tp > 1 and not run.runtime.tp_overlap:
        options["xla_gpu_disable_async_collectives"] = "ALLGATHER,REDUCESCATTER"
    return options
