"""The two descriptions of a run: RunConfig, as written, and Run, as it is computed.

In a RunConfig, None is a setting that was not given. A Run has a value for each; resolve.resolve()
computes it. Both are frozen. Every check raises UserError with the value, why it is invalid, and
what would work.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxbench.config import number_formats, pipeline_layout
from maxbench.config.errors import UserError, check_choice
from maxbench.config.model import Model
from maxbench.config.number_formats import FORMATS, Format
from maxbench.config.validation import ADDRESS, COMBINE, RANKS, WINDOW, build, field, validate
from maxbench.hardware.gpus import Gpu, GpuTypes

DEGREES = ("pp", "dp", "fsdp", "ep", "cp", "tp")  # of parallelism
# Mesh axes, from the slowest links to the fastest: the GPUs of ep are ep_nodes x ep.
AXES = ("pp", "dp", "fsdp", "ep_nodes", "ep", "cp", "tp")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
MAX_GPUS = 1 << 17  # twice the 65,536 of the largest plans
SCHEDULES = ("1f1b", "gpipe")  # pipeline schedules
SYNTHETIC = ("uniform", "bigram")  # data that are drawn on the devices

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


def saved_tensors(remat: str) -> tuple[str, ...]:
    """The tensors that a remat policy saves for the backward pass."""
    return REMATS.get(remat) or tuple(t for t in remat.split(",") if t in TENSORS)


LAYERS = "layers"  # named scope of the scan over layers in the compiled program


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Degrees of parallelism, and the batch."""

    gpu_type: str = "h100"  # a name of Run.hardware
    pp: int = field(1, at_least=1)
    vp: int = field(1, at_least=1)  # virtual stages (model chunks) per pipeline stage
    dp: int = field(1, at_least=1)
    fsdp: int = field(1, at_least=1)
    ep: int = field(1, at_least=1)
    cp: int = field(1, at_least=1)
    tp: int = field(1, at_least=1)
    # Nodes (NVLink domains) that ep spans: a token is sent once to each of them, and there to the
    # GPUs of its experts (model/dispatch_nodes.py). 1: to the GPUs of its experts at once. auto:
    # the one of these two that sends less over the network
    ep_nodes: int | None = field(None, at_least=1)
    mbs: int = field(1, at_least=1)  # sequences per microbatch and data-parallel GPU
    # Layers of each of the pp x vp parts of a pipeline, in Megatron's notation
    # (config/pipeline_layout.py); auto: equal numbers, or one less in parts at both ends
    stages: str | None = None
    # sequences per step over all GPUs; auto: mbs x dp x fsdp x ep
    gbs: int | None = field(None, at_least=1)

    @property
    def shards(self) -> int:
        """Data-parallel size: groups of pp x cp x tp GPUs with different sequences."""
        return self.dp * self.fsdp * self.ep

    @property
    def dense_shards(self) -> int:
        """GPUs over which fsdp shards the weights that experts share: those of ep too."""
        return self.fsdp * self.ep if self.fsdp > 1 else 1

    @property
    def gpus(self) -> int:
        """GPUs of the mesh."""
        return self.pp * self.shards * self.cp * self.tp

    def __post_init__(self):
        validate(self)
        if self.gpus > MAX_GPUS:
            axes = " x ".join(f"{x}={n}" for x in DEGREES if (n := getattr(self, x)) > 1)
            raise UserError(f"{axes} are {self.gpus} GPUs; give at most {MAX_GPUS}")
        if self.stages:
            parts = pipeline_layout.layers_of_parts(self.stages)
            if self.pp > 1 and len(parts) != self.pp * self.vp:
                raise UserError(
                    f"layout.stages={self.stages[:60]!r} has {len(parts)} parts, and pp={self.pp} "
                    f"x vp={self.vp} are {self.pp * self.vp}; give as many"
                )
        if self.vp > 1 and self.pp == 1:
            raise UserError(f"vp={self.vp} needs pp > 1: virtual stages divide a pipeline's stages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(LayoutConfig):
    """LayoutConfig, resolved.

    Attributes:
      parts: layers of each of the pp x vp parts of the network; of the one part without a pipeline.
      embedding_over_pp: whether the embedding table's columns are sharded over pp too. Embedded
        tokens are then all-gathered over pp.
    """

    ep_nodes: int = 1
    gbs: int = dataclasses.field()
    parts: tuple[int, ...]
    embedding_over_pp: bool = False

    def __post_init__(self):
        """Checked as a LayoutConfig already."""

    @property
    def mesh_shape(self) -> dict[str, int]:
        """GPUs along each mesh axis."""
        axes = {axis: getattr(self, axis) for axis in AXES}
        return axes | {"ep": self.ep // self.ep_nodes}

    @property
    def microbatches(self) -> int:
        """Microbatches per step of each data-parallel group (gradient accumulation)."""
        return self.gbs // (self.mbs * self.shards)

    @property
    def even(self) -> bool:
        """Whether the parts are those of pipeline_layout.even()."""
        return self.parts == pipeline_layout.even(sum(self.parts), len(self.parts))

    def describe(self) -> str:
        """One line: '16 devices, fsdp 8 x tp 2, mbs 1, gbs 32 (4 microbatches)'."""
        axes = [f"{a} {getattr(self, a)}" for a in DEGREES if getattr(self, a) > 1]
        if self.vp > 1:
            axes.insert(1, f"vp {self.vp}")
        devices = f"{self.gpus} devices, {' x '.join(axes)}" if axes else "1 device"
        microbatches = f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"
        return f"{devices}, mbs {self.mbs}, gbs {self.gbs} ({microbatches})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The train step: data, pipeline schedule, recompute and memory, XLA's choices."""

    seq: int = field(at_least=1)  # tokens per sequence
    steps: int = field(50, at_least=1)
    seed: int = field(0, at_least=0)
    # uniform: random tokens; bigram: each follows the one before by a fixed table, so that the loss
    # falls; or the path of token files or texts (step/token_files.py). tiny and proxy: bigram
    data: str = field("uniform", check=(bool, "uniform, bigram or a path"))
    # Token that ends a document: neither attention nor the loss crosses it. auto: both cross the
    # borders of documents, as by default in Megatron
    document_end: int | None = field(None, at_least=0)
    eval_data: str = ""  # path of held-out files, as data; '' = no evaluation
    eval_every: int = field(0, at_least=0)  # steps; 0 = after the last step alone
    # batches of an evaluation, the first of eval_data; auto: all that it has
    eval_steps: int | None = field(None, at_least=1)
    target_loss: float | None = field(None, above=0)  # of an evaluation, which ends the run
    schedule: str = field("1f1b", options=SCHEDULES)  # of a pipeline; interleaved if vp > 1
    # Consecutive microbatches that a model chunk runs before its stage switches to the next chunk:
    # Megatron's microbatch_group_size_per_vp_stage. At least pp, which smaller values mean, and
    # auto; more gives fewer chunk switches and stashes more activations.
    microbatch_group_size: int | None = field(None, at_least=1)
    # auto: collectives wait for GEMMs as pipeline/tick_order.py says; off: XLA's scheduler decides
    order: str = field("auto", options=("auto", "off"))
    remat: str = "full"  # a policy of REMATS, or names of TENSORS to save, joined by commas
    # First layers that `remat` applies to; the others use save_gemms_recompute_act. auto: all
    remat_layers: int | None = field(None, at_least=1)
    offload: str = ""  # saved tensors that move to host memory: all, or names joined by commas
    # auto: the fastest of model/attention.KERNELS that runs on the GPU
    attention: str | None = field(None, options=("xla", "cudnn", "cudnn_split"))
    # tokens whose logits are in memory at a time; auto: as many as fit 1 GiB, on a CPU 32 MiB
    loss_chunk: int | None = field(None, at_least=1)
    # thresholds in bytes for all-reduce, all-gather, reduce-scatter; auto: resolve.COMBINE
    collective_combine_bytes: tuple[int, int, int] | None = field(
        None, at_least=0, at_most=2**40, check=COMBINE
    )
    # unroll the layers if there are at most this many (resolve.layers_unrolled); auto: 40 on a
    # GPU, none on a CPU
    unroll_layers: int | None = field(None, at_least=0)
    # run the halves of a microbatch in turn, so that the all-to-alls of each overlap kernels of the
    # other, where it is possible (resolve.overlaps_halves)
    two_batch_overlap: bool = False
    z_loss: float = field(0.0, at_least=0)  # coefficient of mean(logsumexp^2)
    # first and last step of the measured window; in a shorter run, its last half
    window: tuple[int, int] = field((35, 44), at_least=0, check=WINDOW)

    @property
    def reads_files(self) -> bool:
        """Whether `data` is a path."""
        return self.data not in SYNTHETIC

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the tensors that the remat policy saves for the backward pass."""
        return saved_tensors(self.remat)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Names of the saved tensors in host memory."""
        return self.saved if self.offload == "all" else tuple(filter(None, self.offload.split(",")))

    def __post_init__(self):
        validate(self, "train.")
        for tensor in [] if self.remat in REMATS else self.remat.split(","):
            check_choice("train.remat", tensor, (*REMATS, *TENSORS))
        for tensor in self.offloaded:
            check_choice("train.offload", tensor, (*TENSORS, "all"))
            if tensor not in (*self.saved, "all"):
                saving = " or ".join(name for name in REMATS if tensor in REMATS[name])
                raise UserError(
                    f"train.offload={tensor!r}: train.remat={self.remat!r} does not save it; use "
                    f"train.remat={saving}, or offload {', '.join((*self.saved, 'all'))}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(TrainConfig):
    """TrainConfig, resolved.

    Attributes:
      remat_layers: number of first layers with the policy `remat`.
      attention: a key of model.attention.KERNELS.
      unrolled: whether the program has code for every layer instead of a scan over layers.
      overlapped: whether the forward pass of a microbatch and the backward pass of another are
        interleaved (pipeline/executor.py).
      two_batch_overlap: whether the halves of a microbatch run in turn (model/two_batches.py).
    """

    microbatch_group_size: int = dataclasses.field()
    remat_layers: int = dataclasses.field()
    attention: str = dataclasses.field()
    loss_chunk: int = dataclasses.field()
    collective_combine_bytes: tuple[int, int, int] = dataclasses.field()
    unroll_layers: int = dataclasses.field()
    unrolled: bool
    overlapped: bool

    def __post_init__(self):
        """Checked as a TrainConfig already."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer, and a learning rate with linear warmup, cosine decay to lr_min, and a constant
    end."""

    # muon: of the matrices of layers (step/muon.py), and AdamW of all other weights
    name: str = field("adamw", options=("adamw", "muon"))
    lr: float = field(at_least=0)
    lr_min: float = field(at_least=0)
    warmup: float = field(at_least=0)  # steps; below 1, a fraction of train.steps
    # step i of a warmup over n steps has the rate lr (i + offset) / (n + offset)
    warmup_offset: int = field(1, at_least=0)
    constant_steps: int = field(0, at_least=0)  # last steps, at lr_min
    momentum: float = field(0.95, at_least=0, below=1)  # Muon's
    b1: float = field(0.9, at_least=0, below=1)
    b2: float = field(0.95, at_least=0, below=1)
    eps: float = field(1e-8, above=0)
    weight_decay: float = field(0.1, at_least=0)
    decay_norms: bool = False  # weight decay of norm weights too
    clip: float = field(1.0, above=0)  # global gradient norm

    def __post_init__(self):
        validate(self, "optim.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. The published recipes use bf16 compute with fp32 weights and moments."""

    # Of forward and backward pass: bf16 | fp32. Of the GEMMs of layers alone: fp8 | nvfp4.
    dtype: str = "bf16"
    weights: str = field("fp32", options=DTYPES)  # master weights
    moments: str = field("fp32", options=DTYPES)  # of the optimizer
    grads: str = field("bf16", options=DTYPES)  # accumulated over microbatches, reduced over GPUs
    # Of dtype=fp8. te: Transformer Engine; auto: te on GPUs where it is installed, else xla.
    # scaling auto: mxfp8 on Blackwell, current on Hopper.
    backend: str | None = field(None, options=("xla", "te"))
    scaling: str | None = field(None, options=number_formats.SCALINGS)
    history: int = field(1024, at_least=1)  # length of the amax history of delayed scaling
    # First and last layers whose GEMMs are not quantized (Megatron's first_last_layers_bf16)
    bf16_layers: tuple[int, int] = field((0, 0), at_least=0)

    def __post_init__(self):
        check_choice("dtype", self.dtype, number_formats.DTYPES)
        validate(self, "precision.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision(PrecisionConfig):
    """PrecisionConfig, resolved; scaling is the name of Run.format."""

    backend: str = dataclasses.field()
    scaling: str = dataclasses.field()

    @property
    def amax_history_len(self) -> int:
        """Length of the amax history in the train state; 0 unless scaling is delayed."""
        return self.history if FORMATS[self.scaling].amax_history else 0

    def __post_init__(self):
        """Checked as a PrecisionConfig already; `scaling` has further names here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Destinations of results, metrics and checkpoints."""

    dir: str = "."
    tensorboard: bool = True  # write an event file to the run folder
    wandb: bool = False  # send metrics to Weights & Biases, if it is installed
    # Benchmark of MLPerf Training whose lines (run/mllog.py) the log has; '' = none
    mllog: str = field("", options=("", "llama31_8b", "gpt_oss_20b"))
    submitter: str = "unnamed"  # submission_org of these lines
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
    # steps between comparisons of the weights' copies on all GPUs, which end the run if bits
    # differ; 0 = never
    compare_replicas_every: int = field(100, at_least=0)

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
    # first step in the profile; default: stop - 5
    start: int | None = field(None, at_least=0)
    # first step after it; default: 25, or the end of a shorter run
    stop: int | None = field(None, at_least=1)
    ranks: str = field("0", check=RANKS)  # processes to profile

    def __post_init__(self):
        validate(self, "profile.")
        if self.start is not None and self.stop is not None and self.start >= self.stop:
            raise UserError(
                f"profile.start={self.start} and profile.stop={self.stop}: the first step in the "
                "profile must be below the first step after it"
            )

    def of_steps(self, steps: int) -> "Profile":
        """The profile of a run of this many steps, with both ends.

        Raises:
          UserError: no step of the run is in it.
        """
        if self.tool in ("nsys", "xplane") and (self.start or 0) >= steps:
            raise UserError(
                f"profile.start={self.start} profiles no step: the run has steps={steps}; leave it "
                "out, or train more steps"
            )
        stop = self.stop
        if stop is None:
            stop = min(25, steps) if self.start is None else self.start + 5
        start = max(0, stop - 5) if self.start is None else self.start
        return dataclasses.replace(self, start=start, stop=stop)


SECTIONS: dict[str, Any] = {  # name of a section of RunConfig -> its class
    "model": Model,
    "layout": LayoutConfig,
    "train": TrainConfig,
    "optim": Optim,
    "precision": PrecisionConfig,
    "output": Output,
    "runtime": Runtime,
    "profile": Profile,
}


def given_fields(section: Any) -> dict[str, Any]:
    """A dataclass as nested dicts, without fields that are None: those were not given."""
    keep = lambda pairs: {name: value for name, value in pairs if value is not None}
    return dataclasses.asdict(section, dict_factory=keep)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run as it was written: by a workload file and flags."""

    model: Model
    layout: LayoutConfig
    train: TrainConfig
    optim: Optim
    precision: PrecisionConfig = PrecisionConfig()
    output: Output = Output()
    runtime: Runtime = Runtime()
    profile: Profile = Profile()

    @classmethod
    def from_dict(cls, sections: Mapping[str, Mapping[str, Any]]) -> "RunConfig":
        """The config of nested dicts, as asdict() returns them; absent fields are not given.

        Raises:
          UserError: a value is invalid, or a section or field is unknown.
        """
        for name in sections:
            check_choice("section", name, SECTIONS)
        parts = {name: build(SECTIONS[name], name, part) for name, part in sections.items()}
        return cls(**parts)

    def asdict(self) -> dict[str, dict[str, Any]]:
        """All sections as nested dicts, for JSON."""
        return {name: given_fields(getattr(self, name)) for name in SECTIONS}

    def changed(self, **sections: Mapping[str, Any]) -> "RunConfig":
        """The config with other fields: changed(layout={'mbs': 2})."""
        replace = dataclasses.replace
        parts = {name: replace(getattr(self, name), **new) for name, new in sections.items()}
        return replace(self, **parts)


class Device(NamedTuple):
    """The device that a run is resolved for; it may be absent.

    Attributes:
      platform: 'gpu' or 'cpu'.
      capability: compute capability of a GPU.
      cudnn: False if its cuDNN cannot compile the run's attention.
    """

    platform: str
    capability: tuple[int, int] = (0, 0)
    cudnn: bool = True


EVALUATION = ("eval_data", "eval_every", "eval_steps", "target_loss")
_WORK = ("name", "decay_norms")  # fields of Optim that change the work of a step
# Fields that change neither the work of a step nor its program, but for constants.
_CONSTANTS = {
    "train": ("steps", "seed", "window", "data", *EVALUATION),
    "optim": tuple(f.name for f in dataclasses.fields(Optim) if f.name not in _WORK),
}
# Fields that depend on the machine that resolves them.
_BY_DEVICE = {
    "train": ("attention", "loss_chunk", "unroll_layers", "unrolled", "overlapped"),
    "precision": ("backend",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run as it is computed: complete, and checked. resolve.resolve() creates it.

    Attributes:
      config: the RunConfig that resolve() completed.
      model: the network; layers of precision.bf16_layers are not quantized.
      hardware: the GPU types that layout.gpu_type may name.
      device: the kind of device that resolve() chose kernels for.
      format: the number format of the GEMMs of layers.
    """

    config: RunConfig
    hardware: GpuTypes
    device: Device
    model: Model
    layout: Layout
    train: Train
    optim: Optim
    precision: Precision
    output: Output
    runtime: Runtime
    profile: Profile
    format: Format

    @property
    def gpu(self) -> Gpu:
        """The record of the layout's GPU type."""
        return self.hardware[self.layout.gpu_type]

    @functools.cached_property
    def name(self) -> str:
        """pretrain_<model>_<size>_<dtype>_gpus<N>_..., the pattern that log parsers know, with the
        start of a hash of all that changes the work, the data or the program. Equal names are
        repeats."""
        m, a = self.model, self.layout
        work = self.program()
        for section, names in _BY_DEVICE.items():  # as they were asked for
            for field_name in names:
                work[section][field_name] = getattr(getattr(self.config, section), field_name, None)
        work["runtime"] = {"tp_overlap": self.runtime.tp_overlap}
        work["train"]["data"] = self.train.data
        digest = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
        return (
            f"pretrain_{m.name}_{m.size}_{self.precision.dtype}_gpus{a.gpus}_tp{a.tp}_pp{a.pp}"
            f"_cp{a.cp}_vp{a.vp}_mbs{a.mbs}_gbs{a.gbs}_{digest[:6]}"
            + (f"_{self.profile.tool}" if self.profile.tool else "")
        )

    @property
    def remat_summary(self) -> str:
        """The remat settings in words: 'none', 'full of 70 layers', 'none offload mlp_up'."""
        t = self.train
        layers = f" of {t.remat_layers} layers" if t.remat_layers < self.model.layers else ""
        return t.remat + layers + (f" offload {t.offload}" if t.offload else "")

    def saved_on_device(
        self, saved: tuple[str, ...], offloaded: tuple[str, ...] | None = None
    ) -> set[str]:
        """The tensors of a remat policy that are saved in GPU memory.

        In a pipeline a saved tensor is copied into its stash slot and out of it: two reads, two
        writes. An MLP's activation is recomputed where that moves fewer bytes: it reads the outputs
        of all up-projections and writes one tensor.
        """
        offloaded = self.train.offloaded if offloaded is None else offloaded
        names, width = {*saved} - {*offloaded}, self.format.bytes
        read = self.model.mlp_inputs * FORMATS[self.format.compute].bytes
        recompute = read + width < 4 * width
        in_pipeline = self.layout.pp > 1 and recompute and "mlp_up" in names
        return names - {"mlp_act"} if in_pipeline else names

    def program(self) -> dict[str, dict[str, Any]]:
        """The fields that change the work or the program, by section, for JSON."""
        fields = {
            name: given_fields(getattr(self, name))
            for name in ("model", "layout", "train", "optim", "precision")
        }
        for section, names in _CONSTANTS.items():
            for field_name in names:
                fields[section].pop(field_name, None)
        return fields

    def asdict(self) -> dict[str, dict[str, Any]]:
        """All sections as nested dicts, for JSON."""
        return {name: given_fields(getattr(self, name)) for name in SECTIONS}
