"""What a run is: frozen dataclasses, checked once, here, before anything touches a device.

Every check says what was given, why it cannot be, and what would work.
"""

import dataclasses
import itertools
import math

from maxbench.config import number_formats
from maxbench.config.errors import UserError, check_choice, divisors, nearest
from maxbench.config.model import Model
from maxbench.config.number_formats import FORMATS, Format
from maxbench.config.validation import ADDRESS, COMBINE, RANKS, WINDOW, field, validate
from maxbench.hardware.gpus import GPU_TYPES, Gpu, GpuTypes

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")  # mesh axes: slowest links first, fastest last
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
SCHEDULES = ("1f1b", "gpipe")  # of a pipeline

# Tensors of a block that a remat policy may keep, in the order they are made.
TENSORS = ("query", "key", "value", "context", "attn_out", "slots", "mlp_up", "mlp_act", "mlp_down")
# What the backward pass finds saved; everything else it computes again.
REMATS = {
    "full": (),
    "none": TENSORS,  # and every other intermediate but gathered weights and sequences
    "save_gemms_only": TENSORS,  # and none of the others; as none where layers are no code
    "save_gemms_recompute_act": tuple(
        t for t in TENSORS if t != "mlp_act"
    ),  # none of them is made again
    "selective": ("query", "key", "value", "attn_out", "mlp_up", "mlp_act", "mlp_down"),
    "save_qkv_proj": ("query", "key", "value"),
    "save_dot_except_mlp": ("query", "key", "value", "attn_out"),
    "save_dot_except_mlpwi": ("query", "key", "value", "attn_out", "mlp_down"),
    "save_context": ("context",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How the work is spread: the degree of each mesh axis, and the batch."""

    gpu_type: str = "h100"  # a name of Run.gpu_types
    pp: int = field(1, at_least=1)
    vp: int = field(1, at_least=1)  # virtual stages (chunks of layers) per pipeline stage
    dp: int = field(1, at_least=1)
    fsdp: int = field(1, at_least=1)
    ep: int = field(1, at_least=1)
    cp: int = field(1, at_least=1)
    tp: int = field(1, at_least=1)
    mbs: int = field(1, at_least=1)  # sequences per data-parallel GPU and microbatch
    # sequences per step over all GPUs; 0 = mbs x dp x fsdp x ep
    gbs: int = field(0, at_least=0)

    @property
    def gpus(self) -> int:
        """GPUs the layout needs."""
        return self.pp * self.shards * self.cp * self.tp

    @property
    def shards(self) -> int:
        """GPUs (or groups of pp x cp x tp) that work on different sequences."""
        return self.dp * self.fsdp * self.ep

    @property
    def microbatches(self) -> int:
        """Gradient accumulation: microbatches per step on each data-parallel GPU."""
        return self.gbs // (self.mbs * self.shards)

    def describe(self) -> str:
        """One line: '16 devices, fsdp 8 x tp 2, mbs 1, gbs 32 (4 microbatches)'."""
        axes = [f"{a} {getattr(self, a)}" for a in AXES if getattr(self, a) > 1]
        if self.vp > 1:
            axes.insert(1, f"vp {self.vp}")
        devices = f"{self.gpus} devices, {' x '.join(axes)}" if axes else "1 device"
        micro = f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)}"
        return f"{devices}, mbs {self.mbs}, gbs {self.gbs} ({micro})"

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
        if self.vp > 1 and self.pp == 1:
            raise UserError(f"vp={self.vp} needs pp > 1: virtual stages divide a pipeline's stages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The step and its memory."""

    seq: int = field(at_least=1)  # tokens per sequence
    steps: int = field(50, at_least=1)
    seed: int = field(0, at_least=0)
    # random tokens | markov: text of a fixed source, which can be learned
    data: str = field("random", options=("random", "markov"))
    schedule: str = field("1f1b", options=SCHEDULES)  # of a pipeline; interleaved when vp > 1
    # microbatches that a chunk of layers takes at a time, at least pp: fewer turns, more memory
    microbatch_group_size: int = field(0, at_least=0)
    remat: str = "full"  # a name of REMATS, or names of TENSORS joined by commas
    # layers that it is for, the first of a loop; the others are of products. 0 = for all
    remat_layers: int = field(0, at_least=0)
    offload: str = ""  # what of them waits in the host's memory: all, or names joined by commas
    # auto: the fastest of model/attention.KERNELS that the GPU has
    attention: str = field("auto", options=("auto", "xla", "cudnn", "cudnn_split"))
    # tokens whose logits stand in memory at once; 0 = 1 GiB, CPU 32 MiB
    loss_chunk: int = field(0, at_least=0)
    # bytes at which collectives are joined: step/compiler.COMBINE
    collective_combine_bytes: tuple[int, ...] = field((), at_least=0, at_most=2**40, check=COMBINE)
    # up to so many layers are code (model/layer_stack.py); -1 = a GPU 40, a CPU 0
    unroll_layers: int = field(-1, at_least=-1)
    z_loss: float = field(0.0, at_least=0)  # weight of mean(logsumexp^2)
    # steps that count, inclusive; a shorter run: its last half
    window: tuple[int, int] = field((35, 44), at_least=0, check=WINDOW)

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the tensors that the backward pass finds saved."""
        return REMATS.get(self.remat) or tuple(t for t in self.remat.split(",") if t in TENSORS)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Those of them that are kept in the host's memory."""
        return self.saved if self.offload == "all" else tuple(filter(None, self.offload.split(",")))

    @property
    def keeps(self) -> str:
        """'none', or with a part in the host's memory 'none offload mlp_up', or of some layers."""
        some = f" of {self.remat_layers} layers" * bool(self.remat_layers)
        return self.remat + some + f" offload {self.offload}" * bool(self.offload)

    def __post_init__(self):
        validate(self, "train.")
        for tensor in self.offloaded:
            check_choice("train.offload", tensor, (*self.saved, "all"))
        for tensor in [] if self.remat in REMATS else self.remat.split(","):
            check_choice("train.remat", tensor, (*REMATS, *TENSORS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optim:
    """AdamW and its learning rate: linear warmup, cosine to lr_min, a constant part at the end."""

    lr: float = field(at_least=0)
    lr_min: float = field(at_least=0)
    warmup: float = field(at_least=0)  # steps; below 1, a fraction of train.steps
    # step i of a warmup of n has rate lr (i + offset) / (n + offset)
    warmup_offset: int = field(1, at_least=0)
    constant_steps: int = field(0, at_least=0)  # last steps, at lr_min
    b1: float = field(0.9, at_least=0, below=1)
    b2: float = field(0.95, at_least=0, below=1)
    eps: float = field(1e-8, above=0)
    weight_decay: float = field(0.1, at_least=0)
    decay_norms: bool = False  # weights of norms too
    clip: float = field(1.0, above=0)  # global norm of the gradient

    def __post_init__(self):
        validate(self, "optim.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats. The published recipes: bf16 compute, fp32 master weights and moments."""

    dtype: str = "bf16"  # of the forward and backward pass: bf16 | fp32 | fp8 (layers' GEMMs)
    weights: str = field("fp32", options=DTYPES)  # master copy
    moments: str = field("fp32", options=DTYPES)  # Adam's two averages
    grads: str = field("bf16", options=DTYPES)  # summed over microbatches and over GPUs
    # Of dtype=fp8. te: Transformer Engine; scaling auto: mxfp8 on Blackwell, current before it.
    backend: str = field("xla", options=("xla", "te"))
    scaling: str = field("auto", options=("auto", *number_formats.SCALINGS))
    history: int = field(1024, at_least=1)  # steps that delayed scaling looks back

    @property
    def amax_history_len(self) -> int:
        """Steps of largest magnitudes in the state: 0 but for delayed scaling."""
        f = FORMATS.get(self.scaling)
        return self.history if f and f.amax_history and f.dtype == self.dtype else 0

    def __post_init__(self):
        check_choice("dtype", self.dtype, number_formats.DTYPES)
        validate(self, "precision.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Where results go, and checkpoints."""

    dir: str = "."
    tensorboard: bool = True  # an event file in the run's folder
    wandb: bool = False  # to Weights & Biases, where that is installed
    openmetrics: str = ""  # file of the last step for Prometheus; '' = metrics.prom there
    checkpoint: bool = False  # save at the end
    checkpoint_every: int = field(0, at_least=0)  # and every so many steps
    max_to_keep: int = field(2, at_least=1)  # checkpoints of a run, the last ones;
    keep_period: int = field(0, at_least=0)  # and those of every so many steps; 0 = no others
    resume: str = ""  # a checkpoint to start from, a run's folder, or several, with commas
    # of the run's folder, <name>_<stamp>; 0 = the time at which it starts
    stamp: int = field(0, at_least=0, at_most=2**40)

    def __post_init__(self):
        validate(self, "output.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runtime:
    """Processes and devices."""

    # virtual CPU devices; 0 = whatever JAX finds
    cpu_devices: int = field(0, at_least=0, at_most=8192)
    mock_gpus: int = field(0, at_least=0)  # one GPU runs its share of a step on so many
    any_device: bool = False  # a CPU will do where there is no GPU
    tp_overlap: bool = True  # tp's gathers and reduce-scatters run beside kernels where XLA can
    coordinator: str = field("", check=ADDRESS)  # host:port of process 0
    processes: int = field(0, at_least=0)
    process: int = field(-1, at_least=-1)
    # seconds to wait until all processes are there; 0 = 60, and a quarter for each process
    rendezvous_timeout_s: int = field(0, at_least=0)

    def __post_init__(self):
        validate(self)
        if self.cpu_devices and self.mock_gpus:
            raise UserError("cpu_devices and mock_gpus exclude each other: mocking needs a GPU")
        given = (bool(self.coordinator), self.processes > 0, self.process >= 0)
        if any(given) and not all(given):
            raise UserError(
                f"coordinator={self.coordinator!r}, processes={self.processes} and "
                f"process={self.process} belong together: give all three, or none"
            )
        if all(given) and self.process >= self.processes:
            raise UserError(f"process={self.process} must be below processes={self.processes}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A look inside some steps. Its overhead spoils figures, so such a run is named after it."""

    # nsys is started by launch.sh
    tool: str = field("", options=("", "nsys", "xplane", "nccltrace"))
    start: int = field(20, at_least=0)  # first step in the profile
    stop: int = field(25, at_least=1)  # first step not in it
    ranks: str = field("0", check=RANKS)  # processes that are profiled

    def __post_init__(self):
        validate(self, "profile.")
        if self.start >= self.stop:
            raise UserError(
                f"profile.start={self.start} and profile.stop={self.stop}: the first step in the "
                "profile must be below the first step after it"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run, whole: built once from config and flags, then passed down."""

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

    @property
    def format(self) -> Format:
        """The number format of layers' GEMMs, settled."""
        return number_formats.resolve_format(
            self.precision.dtype, self.precision.scaling, self.layout.gpu_type, self.gpu_types
        )

    def asdict(self) -> dict:
        """All sections as nested plain dicts, for JSON; GPU types only by the layout's name."""
        return {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}

    def __post_init__(self):
        check_choice("gpu_type", self.layout.gpu_type, self.gpu_types)
        m, a, t, o = self.model, self.layout, self.train, self.output
        if self.runtime.mock_gpus and (o.checkpoint or o.checkpoint_every or o.resume):
            raise UserError("mock_gpus holds a part of the state alone; leave checkpoints out")
        self._pipelines()
        if a.ep > 1 and not m.experts:
            raise UserError(
                f"ep={a.ep} needs experts, and {m.name} {m.size} has none; use fsdp or dp instead"
            )
        split = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("tp",))
        split |= {"embed": ("fsdp",) if m.tied else ("tp", "fsdp"), "experts": ("ep",)}
        for (_, kind), (name, axes) in itertools.product(m.stacks, split.items()):
            degrees = {axis: n for axis in axes if (n := getattr(a, axis)) > 1}
            if (value := getattr(kind, name)) % math.prod(degrees.values()):
                given = " x ".join(f"{axis}={n}" for axis, n in degrees.items())
                raise UserError(
                    f"{given} does not divide model.{name}={value}; "
                    f"{' x '.join(degrees)} that works: {divisors(value)}"
                )
        parts = (2 * a.cp if a.cp > 1 else 1) * a.tp
        if t.seq % parts:
            why = " x ".join(["2 x cp"] * (a.cp > 1) + ["tp"] * (a.tp > 1))
            raise UserError(
                f"train.seq={t.seq} does not divide into {why} = {parts} parts (cp={a.cp}, "
                f"tp={a.tp}); nearest that works: {nearest(t.seq, parts)}"
            )
        if self.format.quantized:
            self._fills_gemms()

    def _fills_gemms(self) -> None:
        """Every dim is a multiple of what GEMMs of the format take, and no block is cut."""
        m, a, seq = self.model, self.layout, self.train.seq
        heads, groups = m.heads // a.tp, m.kv_heads // a.tp
        multiple, blocks, dtype = self.format.multiple, self.format.blocks, self.precision.dtype
        if m.layer_groups:
            raise UserError(
                f"dtype={dtype!r} is for layers of one kind (model.layer_groups); use dtype=bf16"
            )
        fsdp, tp = (a.fsdp, a.tp) if blocks else (1, 1)
        qkv = f"({heads} heads + 2 x {groups} kv_heads) x it"
        out = ("model.head_dim", m.head_dim)
        if m.value_width != m.head_dim:
            qkv = f"({heads} heads + {groups} kv_heads) x it + {groups} x value_dim={m.value_dim}"
            out = ("model.value_dim", m.value_dim)
        rows = f"mbs={a.mbs} x seq / cp={a.cp}"
        for name, value, split, how, dim in (
            ("model.embed", m.embed, fsdp, f"embed / fsdp={fsdp}", m.embed // fsdp),
            ("model.mlp", m.mlp, a.tp, f"mlp / tp={a.tp}", m.mlp // a.tp),
            (*out, 1, f"{heads} heads x it", heads * m.value_width),
            ("model.head_dim", m.head_dim, 1, qkv, groups * m.group_width),
            ("train.seq", seq, a.cp * tp, f"seq / cp={a.cp} / tp={tp}", seq // a.cp // tp)
            if blocks
            else ("train.seq", seq, a.cp, rows, a.mbs * seq // a.cp),
        ):
            if dim % multiple:
                raise UserError(
                    f"dtype={dtype!r} needs dims of GEMMs that are multiples of {multiple}: "
                    f"{name}={value} makes {how} = {dim}; nearest that works: "
                    f"{nearest(value, split * multiple)}"
                )
        if m.experts and not m.capacity_factor:
            raise UserError(
                f"dtype={dtype!r} needs a fixed number of slots for each expert, and model."
                "capacity_factor=0 has none; capacity_factor=experts / top_k="
                f"{m.experts / m.top_k:g} drops no token either, or use dtype=bf16"
            )
        tokens = a.mbs * seq // (a.cp * a.tp)
        slots = m.capacity(tokens) if m.experts else 0
        gpus = 1 if blocks else a.ep * a.tp  # whose slots are rows of one GEMM, or of its blocks
        if slots * gpus % multiple:
            unit = multiple // math.gcd(gpus, multiple)
            # Of the next number of slots that works; a half stays clear of rounding up again.
            factor = (-(-slots // unit) * unit - 0.5) * m.experts / (tokens * m.top_k)
            raise UserError(
                f"dtype={dtype!r} needs dims of GEMMs that are multiples of {multiple}: model."
                f"capacity_factor={m.capacity_factor} gives an expert {gpus} x {slots} slots; "
                f"nearest that works: {factor:.6g}"
            )

    def _pipelines(self) -> None:
        a, layers, parts = self.layout, self.model.layers, self.layout.pp * self.layout.vp
        if a.pp == 1:
            return
        if self.train.offload:
            raise UserError(
                f"pp={a.pp} keeps what is saved on the GPU, in slots, and train.offload="
                f"{self.train.offload!r} asks for the host's memory; leave one of them out"
            )
        if self.model.layer_groups:
            raise UserError(
                f"pp={a.pp} needs layers of one kind, and model.layer_groups are {len(self.model.layer_groups)}; "
                "use pp=1 with fsdp, ep or tp"
            )
        if layers % parts and (layers + 2) % parts:
            below, above = layers // parts * parts, -(-layers // parts) * parts
            near = sorted({n for n in (below, above - 2, above) if n > 0})
            raise UserError(
                f"layers={layers} does not divide into pp={a.pp} x vp={a.vp} = {parts} parts, nor "
                f"does {layers} + 2 (one slot each for embedding and loss); nearest layers that "
                f"work: {' or '.join(map(str, near))}"
            )
        if a.microbatches < a.pp:
            raise UserError(
                f"gbs={a.gbs} is {a.microbatches} microbatches, too few for pp={a.pp} stages to "
                f"work at once; nearest that works: gbs={a.mbs * a.shards * a.pp}"
            )


SECTIONS = {f.name: f.type for f in dataclasses.fields(Run) if f.type is not GpuTypes}
