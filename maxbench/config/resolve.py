"""From a RunConfig to a Run: every setting that was not given, and what follows from others.

resolve() is the only function that creates a Run. It needs no jax: the device may be absent.
"""

import functools
import itertools
from collections.abc import Mapping
from typing import Any

from maxbench.config import number_formats, pipeline_layout, run_checks
from maxbench.config.channels import Experts
from maxbench.config.errors import UserError, check_choice, divisors, nearest
from maxbench.config.mixers import Attention
from maxbench.config.model import Model
from maxbench.config.number_formats import Format
from maxbench.config.run import (
    Device,
    Layout,
    LayoutConfig,
    Precision,
    Run,
    RunConfig,
    Train,
    TrainConfig,
)
from maxbench.hardware.gpus import Gpu, GpuTypes
from maxbench.host import environment

# Transformer Engine 2.17: the first whose attention runs inside shard_map. 2.14: the first that
# supports JAX > 0.9.1.
TE_OLDEST = (2, 17)
MAX_OVERLAPPED_LAYERS = 16  # of a chunk outside of a pipeline: more take too long to compile
MAX_UNROLLED_LAYERS = 40  # on a GPU; a CPU unrolls none
# Bytes up to which collectives are combined (all-reduce, all-gather, reduce-scatter): NVIDIA's
# MaxText recipe for Llama 2, except for FP8's all-gathers (512 MiB there), which combine the
# weights of a layer as in BF16.
COMBINE = {
    "fp8": (1 << 30, 1 << 30, 8 << 20),
    "bf16": (2 << 30, 2 << 30, 32 << 20),
}
# Bytes of the fp32 logits of one chunk of the loss; on a CPU, of its cache.
LOGITS_BYTES = {"gpu": 1 << 30, "cpu": 32 << 20}
# Value dims that cuDNN's backward pass supports with keys of 192 dims on Blackwell.
VALUE_SLICE = 128
# Compute capabilities, major, on which cuDNN's sequence packing is used: JAX has tests of it there.
PACKING = (9, 10)


def resolve(config: RunConfig, hardware: GpuTypes, device: Device | None = None) -> Run:
    """The run of a config.

    Args:
      hardware: the GPU types that layout.gpu_type may name.
      device: that the step runs on; default: expected_device().

    Raises:
      UserError: a run that cannot be; with the setting, the reason, and what would work.
    """
    p = config.precision
    check_choice("gpu_type", config.layout.gpu_type, hardware)
    gpu = hardware[config.layout.gpu_type]
    device = device or expected_device(config, gpu)
    fmt = number_formats.resolve_format(p.dtype, p.scaling, config.layout.gpu_type, hardware)
    if fmt.quantized:
        run_checks.check_bf16_layers(config)
    model = _network(config.model, p.bf16_layers if fmt.quantized else (0, 0))
    layout = _layout(config, model, gpu)
    run = Run(
        config=config,
        hardware=hardware,
        device=device,
        model=model,
        layout=layout,
        train=_train(config, model, layout, fmt, device),
        optim=config.optim,
        precision=_precision(config, fmt, device),
        output=config.output,
        runtime=config.runtime,
        profile=config.profile.of_steps(config.train.steps),
        format=fmt,
    )
    run_checks.check(run)
    return run


def changed(run: Run, **sections: Mapping[str, Any]) -> Run:
    """The run of another config on the same hardware: changed(run, layout={'mbs': 2}).

    Raises:
      UserError: a run that cannot be.
    """
    return resolve(run.config.changed(**sections), run.hardware, run.device)


def expected_device(config: RunConfig, gpu: Gpu) -> Device:
    """The device that a config asks for: a CPU for virtual devices, else the layout's GPU."""
    if config.runtime.cpu_devices:
        return Device("cpu")
    return Device("gpu", gpu.chip.capability)


@functools.lru_cache(64)  # a search asks for the same one of thousands of layouts
def _network(model: Model, bf16_layers: tuple[int, int]) -> Model:
    return model.with_bf16_layers(*bf16_layers)


def _layout(config: RunConfig, model: Model, gpu: Gpu) -> Layout:
    a = config.layout
    step = a.mbs * a.shards
    gbs = a.gbs or step
    if gbs % step:
        raise UserError(
            f"gbs={gbs} is not a multiple of mbs x dp x fsdp x ep = {a.mbs} x {a.dp} x {a.fsdp} x "
            f"{a.ep} = {step}; nearest that works: {nearest(gbs, step)}"
        )
    ep_nodes = a.ep_nodes or _nodes_of_ep(a, gpu, model)
    if a.ep % ep_nodes:
        raise UserError(
            f"ep_nodes={ep_nodes} does not divide ep={a.ep}; ep_nodes that works: {divisors(a.ep)}"
        )
    given = {name: getattr(a, name) for name in a.__dataclass_fields__}
    return Layout(**given | {
        "gbs": gbs,
        "ep_nodes": ep_nodes,
        "parts": _parts(a, model.layers),
        "embedding_over_pp": _embedding_over_pp(a, gbs, config.train.seq, model),
    })  # fmt: skip


def _parts(a: LayoutConfig, layers: int) -> tuple[int, ...]:
    """Layout.parts."""
    if a.pp == 1:
        return (layers,)
    if a.stages:
        parts = pipeline_layout.layers_of_parts(a.stages)
        if sum(parts) != layers:
            raise UserError(
                f"layout.stages={a.stages[:60]!r} has {sum(parts)} layers, and model.layers="
                f"{layers}; give {layers}"
            )
        return parts
    chunks = a.pp * a.vp
    if parts := pipeline_layout.even(layers, chunks):
        return parts
    slots = -(-layers // chunks) * chunks
    works = lambda n: pipeline_layout.even(n, chunks)
    near = [*filter(works, range(layers, 0, -1))][:1]
    near += [next(filter(works, itertools.count(layers)))]
    raise UserError(
        f"layers={layers} leave {slots - layers} of {slots} slots of pp={a.pp} x vp={a.vp} = "
        f"{chunks} chunks empty, and at most {pipeline_layout.most_empty(slots)} may be; nearest "
        f"layers that work: {' or '.join(map(str, near))}, or give the layers of each part in "
        "layout.stages"
    )


def _nodes_of_ep(a: LayoutConfig, gpu: Gpu, m: Model) -> int:
    """layout.ep_nodes where it is not given.

    With n nodes a token crosses the network n - 1 times in each direction, in 16 bits; sent to the
    GPUs of its experts at once, top_k (n - 1) / n times, of which the way there is in the number
    format of the GEMMs: 3/4 of the bytes in 8 bits.
    """
    domain, neighbors = gpu.nvlink_domain(a.gpus), a.cp * a.tp
    nodes = a.ep * neighbors // domain
    if domain % neighbors or nodes < 2 or a.ep % nodes or not (m.has_slots or m.dispatch_factor):
        return 1
    return nodes if nodes < 3 / 4 * m.top_k else 1


def _embedding_over_pp(a: LayoutConfig, gbs: int, seq: int, m: Model) -> bool:
    """Whether the embedding table is sharded over pp: an all-gather of embedded tokens then moves
    less than one of the table, because a GPU has fewer tokens in a step than the table rows."""
    fewer = gbs // a.shards * seq // a.cp < m.vocab
    return a.pp > 1 and fewer and not m.tied and m.embed % (a.tp * a.dense_shards * a.pp) == 0


def _train(config: RunConfig, m: Model, a: Layout, fmt: Format, device: Device) -> Train:
    t = config.train
    # A power of two, as token counts mostly are: no chunk is padded, and no smaller one remains.
    tokens = max(1, LOGITS_BYTES[device.platform] // (4 * m.vocab // a.tp))
    remat_layers = m.layers if a.pp > 1 else min(t.remat_layers or m.layers, m.layers)
    unroll_layers = MAX_UNROLLED_LAYERS if device.platform == "gpu" else 0
    if t.unroll_layers is not None:
        unroll_layers = t.unroll_layers
    unrolled = layers_unrolled(config, m, unroll_layers, remat_layers == m.layers)
    given = {name: getattr(t, name) for name in t.__dataclass_fields__}
    return Train(**given | {
        "microbatch_group_size": max(t.microbatch_group_size or a.pp, a.pp),
        "remat_layers": remat_layers,
        "attention": attention_kernel(t, m, fmt.compute, device),
        "loss_chunk": t.loss_chunk or 1 << (tokens.bit_length() - 1),
        "collective_combine_bytes": t.collective_combine_bytes
        or COMBINE["fp8" if fmt.quantized else "bf16"],
        "unroll_layers": unroll_layers,
        "unrolled": unrolled,
        "overlapped": _overlaps_fwd_bwd(a, m, unrolled),
        "two_batch_overlap": t.two_batch_overlap and overlaps_halves(a, m),
    })  # fmt: skip


def layers_unrolled(config: RunConfig, m: Model, most: int, one_policy: bool) -> bool:
    """Whether the program has code for every layer (on a GPU) instead of a scan over layers.

    Never with fsdp: XLA would all-gather the weights of many layers ahead of their use. Nor with
    offload, which XLA supports in loops only, nor in a pipeline, which selects the layers of a
    chunk when its stage switches to it.

    Args:
      most: layers that are unrolled at most.
      one_policy: whether all layers have the same remat policy.
    """
    a = config.layout
    alone = a.pp == a.fsdp == 1
    return alone and m.layers <= most and not config.train.offload and one_policy


def _overlaps_fwd_bwd(a: Layout, m: Model, unrolled: bool) -> bool:
    """Whether the TP collectives of a microbatch's forward pass overlap GEMMs of another's backward
    pass, and the reverse.

    Always in a pipeline. Elsewhere if layers are unrolled, few enough to compile for three phases,
    and tp has collectives to overlap. Not with experts, whose all-to-alls would be in the way.
    """
    overlappable = a.tp > 1 and a.microbatches > 1 and m.layers <= MAX_OVERLAPPED_LAYERS
    return a.pp > 1 or (overlappable and not m.has_experts and unrolled)


def overlaps_halves(a: LayoutConfig, m: Model) -> bool:
    """Whether the halves of a microbatch can run in turn (model/two_batches.py).

    Slots of experts have a fixed size; no collectives over tp, cp and fsdp are in the way.
    """
    kinds = [layer.channel for _, layer in m.kinds]
    slots = [x.has_slots for x in kinds if isinstance(x, Experts)]
    sends = a.ep > 1 and bool(slots) and all(slots)
    return sends and a.pp == a.fsdp == a.tp == a.cp == 1 and a.mbs % 2 == 0


def attention_kernel(t: TrainConfig, m: Model, dtype: str, device: Device) -> str:
    """The key of model.attention.KERNELS for a device.

    Raises:
      UserError: a kernel of cuDNN is given, and cuDNN does not support this attention.
    """
    given, documents = t.attention, t.document_end is not None
    mixers = [layer.mixer for layer in m.all_layers if isinstance(layer.mixer, Attention)]
    if not mixers:
        return "xla"
    kernels = ("cudnn", "cudnn_split", "xla")
    has_cudnn = device.platform == "gpu" and device.cudnn
    of = lambda x: cudnn_kernel(x, dtype, device.capability, documents) if has_cudnn else "xla"
    slowest = max(mixers, key=lambda x: kernels.index(of(x)))
    fastest = of(slowest)
    if given in (None, fastest) or given == "xla":
        return given or fastest
    if fastest != "xla":
        return fastest
    raise UserError(
        f"train.attention={given!r}: cuDNN has no attention for {dtype}, heads of "
        f"{slowest.head_dim} with values of {slowest.value_width}"
        f"{f', softcap {slowest.softcap}' if slowest.softcap else ''}"
        f"{f', documents apart (train.document_end={t.document_end})' if documents else ''} on a "
        f"{device.platform} of compute capability {'.'.join(map(str, device.capability))}; use "
        "train.attention=xla"
    )


def cudnn_kernel(
    m: Attention, dtype: str, capability: tuple[int, int], documents: bool = False
) -> str:
    """The fastest of model.attention.KERNELS for attention on a GPU, by its compute capability.

    The limits are those of cuDNN's backward pass since 9.12; its forward pass supports more.

    Args:
      documents: whether attention is confined to packed documents.
    """
    keys, values = m.head_dim, m.value_width
    if dtype != "bf16" or m.softcap or capability < (8, 0) or keys % 8 or values % 8:
        return "xla"
    if max(keys, values) <= (256 if capability[0] == 9 else 128):
        return "cudnn" if not documents or capability[0] in PACKING else "xla"
    # With packing, XLA tells cuDNN one offset of keys and values, which have one width then.
    if capability[0] == 10 and keys == 192 and values >= VALUE_SLICE and not documents:
        return "cudnn" if values == VALUE_SLICE else "cudnn_split"
    return "xla"


def _precision(config: RunConfig, fmt: Format, device: Device) -> Precision:
    p = config.precision
    given = {name: getattr(p, name) for name in p.__dataclass_fields__}
    backend = gemm_backend(p.backend, fmt, device.platform)
    return Precision(**given | {"backend": backend, "scaling": fmt.name})


def gemm_backend(given: str | None, fmt: Format, platform: str) -> str:
    """The library of quantized GEMMs: Transformer Engine on a GPU where it is installed, new
    enough, and has the GEMMs of the format; else XLA.

    XLA where no GEMM is quantized, so that such a program has one key in the compile cache.
    """
    if not fmt.quantized:
        return "xla"
    if given:
        return given
    version = environment.version("transformer-engine")
    new_enough = version and tuple(map(int, version.split(".")[:2])) >= TE_OLDEST
    return "te" if platform == "gpu" and new_enough and "te" in fmt.backends else "xla"
