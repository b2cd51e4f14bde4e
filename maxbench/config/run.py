"""The description of a run: frozen dataclasses, checked when built, before any device work.

Every check raises UserError with the value, why it is invalid, and what would work.
"""

import copy
import dataclasses
import functools
from typing import Any

from maxbench.config import number_formats, pipeline_layout, run_checks
from maxbench.config.errors import UserError, check_choice, divisors, nearest
from maxbench.config.model import Model
from maxbench.config.number_formats import FORMATS, Format
from maxbench.config.validation import ADDRESS, COMBINE, RANKS, WINDOW, field, validate
from maxbench.hardware.gpus import GPU_TYPES, Gpu, GpuTypes

DEGREES = ("pp", "dp", "fsdp", "ep", "cp", "tp")  # of parallelism
# Mesh axes, from the slowest links to the fastest: the GPUs of ep are ep_nodes x ep.
AXES = ("pp", "dp", "fsdp", "ep_nodes", "ep", "cp", "tp")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
SCHEDULES = ("1f1b", "gpipe")  # pipeline schedules

# Tensors of a layer that a remat policy may save, in the order of the forward pass.
TENSORS = (
    "latent", "query", "key", "value", "context", "attn_out", "slots", "mlp_up", "mlp_act",
    "mlp_down",
)  # fmt: skip
# Remat policy -> tensors saved for the backward pass, which recomputes all others.
REMATS = {
    "full": (),
    "none": TENSORS,  # and every intermediate but gathered weights and gathered sequences
    "save_gemms_only": TENSORS,  # no other intermediate; equals 'none' if layers are not unrolled
    "save_gemms_recompute_act": tuple(t for t in TENSORS if t != "mlp_act"),  # likewise
    # latent attention: recomputes the up-projections (Megatron's recompute_modules mla_up_proj)
    "save_gemms_recompute_mla_up": tuple(t for t in TENSORS if t not in ("query", "key", "value")),
    # and the up-projection of MLP and experts, of which the inputs are saved
    "save_gemms_recompute_mla_up_and_mlp": ("latent", "context", "attn_out", "slots", "mlp_down"),
    "selective": ("latent", "query", "key", "value", "attn_out", "mlp_up", "mlp_act", "mlp_down"),
    "save_qkv_proj": ("latent", "query", "key", "value"),
    "save_dot_except_mlp": ("latent", "query", "key", "value", "attn_out"),
    "save_dot_except_mlpwi": ("latent", "query", "key", "value", "attn_out", "mlp_down"),
    "save_context": ("context",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism, and the batch."""

    gpu_type: str = "h100"  # a name of Run.gpu_types
    pp: int = field(1, at_least=1)
    vp: int = field(1, at_least=1)  # virtual stages (model chunks) per pipeline stage
    dp: int = field(1, at_least=1)
    fsdp: int = field(1, at_least=1)
    ep: int = field(1, at_least=1)
    cp: int = field(1, at_least=1)
    tp: int = field(1, at_least=1)
    # Nodes (NVLink domains) that ep spans: a token is sent once to each of them, and there to the
    # GPUs of its experts (model/dispatch_nodes.py). 1 = to the GPUs of its experts at once. 0 = the
    # one of these two that sends less over the network
    ep_nodes: int = field(0, at_least=0)
    mbs: int = field(1, at_least=1)  # sequences per microbatch and data-parallel GPU
    # Layers of each of the pp x vp parts of a pipeline, in Megatron's notation
    # (config/pipeline_layout.py); '' or even = evenly
    stages: str = ""
    # sequences per step over all GPUs; 0 = mbs x dp x fsdp x ep
    gbs: int = field(0, at_least=0)

    @property
    def gpus(self) -> int:
        """GPUs of the mesh."""
        return self.pp * self.shards * self.cp * self.tp

    @property
    def mesh_shape(self) -> dict[str, int]:
        """GPUs along each mesh axis."""
        nodes = self.ep_nodes or 1
        axes = {axis: getattr(self, axis) for axis in AXES}
        return axes | {"ep_nodes": nodes, "ep": self.ep // nodes}

    @property
    def shards(self) -> int:
        """Data-parallel size: groups of pp x cp x tp GPUs with different sequences."""
        return self.dp * self.fsdp * self.ep

    @property
    def microbatches(self) -> int:
        """Microbatches per step of each data-parallel group (gradient accumulation)."""
        return self.gbs // (self.mbs * self.shards)

    def describe(self) -> str:
        """One line: '16 devices, fsdp 8 x tp 2, mbs 1, gbs 32 (4 microbatches)'."""
        axes = [f"{a} {getattr(self, a)}" for a in DEGREES if getattr(self, a) > 1]
        if self.vp > 1:
            axes.insert(1, f"vp {self.vp}")
        devices = f"{self.gpus} devices, {' x '.join(axes)}" if axes else "1 device"
        microbatches = f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)}"
        return f"{devices}, mbs {self.mbs}, gbs {self.gbs} ({microbatches})"

    def __post_init__(self):
        validate(self)
        step = self.mbs * self.shards
        if self.gbs == 0:
            object.__setattr__(self, "gbs", step)
        if self.gbs % step:
            raise UserError(
                f"gbs={self.gbs} is not a multiple of mbs x dp x fsdp x ep = {self.mbs} x {self.dp}"
                f" x {self.fsdp} x {self.ep} = {step}; nearest that works: "
                f"{nearest(self.gbs, step)}"
            )
        if self.ep % (self.ep_nodes or 1):
            raise UserError(
                f"ep_nodes={self.ep_nodes} does not divide ep={self.ep}; ep_nodes that works: "
                f"{divisors(self.ep)}"
            )
        if self.stages == "even":
            object.__setattr__(self, "stages", "")
        parts = pipeline_layout.layers_of_parts(self.stages) if self.stages else ()
        if parts and self.pp > 1 and len(parts) != self.pp * self.vp:
            raise UserError(
                f"layout.stages={self.stages[:60]!r} has {len(parts)} parts, and pp={self.pp} x "
                f"vp={self.vp} are {self.pp * self.vp}; give as many"
            )
        if self.vp > 1 and self.pp == 1:
            raise UserError(f"vp={self.vp} needs pp > 1: virtual stages divide a pipeline's stages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The train step: data, pipeline schedule, recompute and memory, XLA's choices."""

    seq: int = field(at_least=1)  # tokens per sequence
    steps: int = field(50, at_least=1)
    seed: int = field(0, at_least=0)
    # random: random tokens; markov: text of a fixed Markov chain, which a model can learn
    data: str = field("random", options=("random", "markov"))
    schedule: str = field("1f1b", options=SCHEDULES)  # of a pipeline; interleaved if vp > 1
    # Consecutive microbatches that a model chunk runs before its stage switches to the next chunk:
    # Megatron's microbatch_group_size_per_vp_stage. At least pp, which smaller values mean; more
    # gives fewer chunk switches and stashes more activations.
    microbatch_group_size: int = field(0, at_least=0)
    # auto: collectives wait for GEMMs as pipeline/tick_order.py says; off: XLA's scheduler decides
    order: str = field("auto", options=("auto", "off"))
    remat: str = "full"  # a policy of REMATS, or names of TENSORS to save, joined by commas
    # First layers that `remat` applies to; the others use save_gemms_recompute_act. 0 = all layers
    remat_layers: int = field(0, at_least=0)
    offload: str = ""  # saved tensors that move to host memory: all, or names joined by commas
    # auto: the fastest of model/attention.KERNELS that runs on the GPU
    attention: str = field("auto", options=("auto", "xla", "cudnn", "cudnn_split"))
    # tokens whose logits are in memory at a time; 0 = as many as fit 1 GiB, on a CPU 32 MiB
    loss_chunk: int = field(0, at_least=0)
    # thresholds in bytes for all-reduce, all-gather, reduce-scatter; () = step/xla_options.COMBINE
    collective_combine_bytes: tuple[int, ...] = field((), at_least=0, at_most=2**40, check=COMBINE)
    # unroll the layers if there are at most this many (config/lowering.py); -1 = GPU 40, CPU 0
    unroll_layers: int = field(-1, at_least=-1)
    z_loss: float = field(0.0, at_least=0)  # coefficient of mean(logsumexp^2)
    # first and last step of the measured window; in a shorter run, its last half
    window: tuple[int, int] = field((35, 44), at_least=0, check=WINDOW)

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the tensors that the remat policy saves for the backward pass."""
        return REMATS.get(self.remat) or tuple(t for t in self.remat.split(",") if t in TENSORS)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Names of the saved tensors in host memory."""
        return self.saved if self.offload == "all" else tuple(filter(None, self.offload.split(",")))

    @property
    def remat_summary(self) -> str:
        """The remat settings in words: 'none', 'full of 70 layers', 'none offload mlp_up'."""
        layers = f" of {self.remat_layers} layers" * bool(self.remat_layers)
        return self.remat + layers + f" offload {self.offload}" * bool(self.offload)

    def __post_init__(self):
        validate(self, "train.")
        for tensor in self.offloaded:
            check_choice("train.offload", tensor, (*self.saved, "all"))
        for tensor in [] if self.remat in REMATS else self.remat.split(","):
            check_choice("train.remat", tensor, (*REMATS, *TENSORS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optim:
    """AdamW, and a learning rate with linear warmup, cosine decay to lr_min, and a constant end."""

    lr: float = field(at_least=0)
    lr_min: float = field(at_least=0)
    warmup: float = field(at_least=0)  # steps; below 1, a fraction of train.steps
    # step i of a warmup over n steps has the rate lr (i + offset) / (n + offset)
    warmup_offset: int = field(1, at_least=0)
    constant_steps: int = field(0, at_least=0)  # last steps, at lr_min
    b1: float = field(0.9, at_least=0, below=1)
    b2: float = field(0.95, at_least=0, below=1)
    eps: float = field(1e-8, above=0)
    weight_decay: float = field(0.1, at_least=0)
    decay_norms: bool = False  # weight decay of norm weights too
    clip: float = field(1.0, above=0)  # global gradient norm

    def __post_init__(self):
        validate(self, "optim.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats. The published recipes use bf16 compute with fp32 weights and moments."""

    # Of forward and backward pass: bf16 | fp32. Of the GEMMs of layers alone: fp8 | nvfp4.
    dtype: str = "bf16"
    weights: str = field("fp32", options=DTYPES)  # master weights
    moments: str = field("fp32", options=DTYPES)  # Adam's first and second moment
    grads: str = field("bf16", options=DTYPES)  # accumulated over microbatches, reduced over GPUs
    # Of dtype=fp8. te: Transformer Engine; auto: te on GPUs where it is installed, else xla.
    # scaling auto: mxfp8 on Blackwell, current on Hopper.
    backend: str = field("auto", options=("auto", "xla", "te"))
    scaling: str = field("auto", options=("auto", *number_formats.SCALINGS))
    history: int = field(1024, at_least=1)  # length of the amax history of delayed scaling
    # First and last layers whose GEMMs are not quantized (Megatron's first_last_layers_bf16)
    bf16_layers: tuple[int, int] = field((0, 0), at_least=0)

    @property
    def amax_history_len(self) -> int:
        """Length of the amax history in the train state; 0 unless scaling is delayed."""
        f = FORMATS.get(self.scaling)
        return self.history if f and f.amax_history and f.dtype == self.dtype else 0

    def __post_init__(self):
        check_choice("dtype", self.dtype, number_formats.DTYPES)
        validate(self, "precision.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Destinations of results, metrics and checkpoints."""

    dir: str = "."
    tensorboard: bool = True  # write an event file to the run folder
    wandb: bool = False  # send metrics to Weights & Biases, if it is installed
    openmetrics: str = ""  # file with the last step for Prometheus; '' = metrics.prom in the folder
    checkpoint: bool = False  # save at the end
    checkpoint_every: int = field(0, at_least=0)  # save every N steps; 0 = never
    max_to_keep: int = field(2, at_least=1)  # newest checkpoints of a run that are kept
    keep_period: int = field(0, at_least=0)  # also keep those of every N steps; 0 = none
    resume: str = ""  # checkpoint to start from, or a run folder; several are joined by commas
    # timestamp in the name of the run folder, <name>_<stamp>; 0 = the start time
    stamp: int = field(0, at_least=0, at_most=2**40)

    def __post_init__(self):
        validate(self, "output.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """Processes and devices."""

    # virtual CPU devices; 0 = the devices that JAX finds
    cpu_devices: int = field(0, at_least=0, at_most=8192)
    mock_gpus: int = field(0, at_least=0)  # one GPU runs its share of a step on this many GPUs
    any_device: bool = False  # run on CPUs if there is no GPU
    tp_overlap: bool = True  # overlap TP collectives with GEMMs where XLA can
    coordinator: str = field("", check=ADDRESS)  # host:port of process 0
    processes: int = field(0, at_least=0)
    process: int = field(-1, at_least=-1)  # index of this process
    # seconds to wait for all processes; 0 = 60 s + 0.25 s per process
    rendezvous_timeout_s: int = field(0, at_least=0)
    # seconds of silence of a process, or without the end of a step (at least 10 median steps),
    # after which the frozen or stuck processes are named; 0 = never
    hang_timeout_s: int = field(60, at_least=0)
    on_hang: str = field("exit", options=("exit", "continue"))  # exit: with code 75

    def __post_init__(self):
        validate(self)
        if self.cpu_devices and self.mock_gpus:
            raise UserError("cpu_devices and mock_gpus exclude each other: mocking needs a GPU")
        is_set = (bool(self.coordinator), self.processes > 0, self.process >= 0)
        if any(is_set) and not all(is_set):
            raise UserError(
                f"coordinator={self.coordinator!r}, processes={self.processes} and "
                f"process={self.process} belong together: give all three, or none"
            )
        if all(is_set) and self.process >= self.processes:
            raise UserError(f"process={self.process} must be below processes={self.processes}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile of some steps. It slows them down, so the run's name contains the tool."""

    # nsys is started by launch.sh
    tool: str = field("", options=("", "nsys", "xplane", "nccltrace"))
    start: int = field(20, at_least=0)  # first step in the profile
    stop: int = field(25, at_least=1)  # first step after it
    ranks: str = field("0", check=RANKS)  # processes to profile

    def __post_init__(self):
        validate(self, "profile.")
        if self.start >= self.stop:
            raise UserError(
                f"profile.start={self.start} and profile.stop={self.stop}: the first step in the "
                "profile must be below the first step after it"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The description of a run, built once from a workload and flags.

    Attributes:
      gpu_types: that layout.gpu_type may name. A file of --hardware, or plan's flags of the
        cluster, replace records here.
    """

    model: Model
    layout: Layout
    train: Train
    optim: Optim
    precision: Precision = Precision()
    output: Output = Output()
    runtime: Runtime = Runtime()
    profile: Profile = Profile()
    gpu_types: GpuTypes = GPU_TYPES

    @property
    def gpu(self) -> Gpu:
        """The record of the layout's GPU type."""
        return self.gpu_types[self.layout.gpu_type]

    @property
    def name(self) -> str:
        """pretrain_<model>_<size>_<dtype>_gpus<N>_..., the pattern that log parsers know."""
        m, a = self.model, self.layout
        return (
            f"pretrain_{m.name}_{m.size}_{self.precision.dtype}_gpus{a.gpus}_tp{a.tp}_pp{a.pp}"
            f"_cp{a.cp}_vp{a.vp}_mbs{a.mbs}_gbs{a.gbs}"
            + (f"_{self.profile.tool}" if self.profile.tool else "")
        )

    @functools.cached_property
    def format(self) -> Format:
        """The number format of the GEMMs of layers, with 'auto' resolved."""
        return number_formats.resolve_format(
            self.precision.dtype, self.precision.scaling, self.layout.gpu_type, self.gpu_types
        )

    @property
    def network(self) -> Model:
        """The model as it is computed: layers of precision.bf16_layers are not quantized."""
        first, last = self.precision.bf16_layers
        return self.model.with_bf16_layers(first, last) if self.format.quantized else self.model

    def asdict(self) -> dict:
        """All sections as nested plain dicts, for JSON, without fields of layers that are not set.
        The GPU type is the layout's name alone."""
        fields = lambda pairs: {name: value for name, value in pairs if value is not None}
        section = lambda name: dataclasses.asdict(getattr(self, name), dict_factory=fields)
        return {name: section(name) for name in SECTIONS}

    def __post_init__(self):
        check_choice("gpu_type", self.layout.gpu_type, self.gpu_types)
        if not self.layout.ep_nodes:
            layout = copy.copy(self.layout)  # valid: dataclasses.replace would check it again
            nodes = _nodes_of_ep(layout, self.gpu, self.model)
            object.__setattr__(layout, "ep_nodes", nodes)
            object.__setattr__(self, "layout", layout)
        run_checks.check(self)


def _nodes_of_ep(a: Layout, gpu: Gpu, m: Model) -> int:
    """The value of layout.ep_nodes if it is 0.

    With n nodes a token crosses the network n - 1 times in each direction, in 16 bits; sent to the
    GPUs of its experts at once, top_k (n - 1) / n times, of which the way there is in the number
    format of the GEMMs: 3/4 of the bytes in 8 bits.
    """
    domain, neighbors = gpu.nvlink_domain(a.gpus), a.cp * a.tp
    nodes = a.ep * neighbors // domain
    if domain % neighbors or nodes < 2 or a.ep % nodes or not (m.has_slots or m.dispatch_factor):
        return 1
    return nodes if nodes < 3 / 4 * m.top_k else 1


SECTIONS: dict[str, Any] = {  # name of a section of Run -> its class
    "model": Model,
    "layout": Layout,
    "train": Train,
    "optim": Optim,
    "precision": Precision,
    "output": Output,
    "runtime": Runtime,
    "profile": Profile,
}
