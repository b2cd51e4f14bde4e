"""Layers, and the base class of their mixers and channels. Needs no jax.

A layer is a mixer, which moves information between tokens (attention), and a channel, which works
on each token (MLP, experts); either may be absent. Each has a norm before it and a residual
connection around it. A kind describes itself once: its weights by logical axes, hence its GEMMs;
the tensors that it saves; its scores; its non-trainable state; the layouts that it refuses.
Parameters, FLOPs, memory, recomputation, estimates and checks are sums over these descriptions
(metrics/flops.py, cost_model/, planning/search.py, config/run_checks.py).

A kind is a subclass of Sublayer under register(). Fields of the same name as a field of Model take
its value where they are not set.
"""

import dataclasses
import functools
import importlib
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from maxbench.config.errors import UserError, check_choice
from maxbench.config.validation import parse

if TYPE_CHECKING:
    from maxbench.config.model import Model
    from maxbench.config.run import Run

# Role of a sublayer -> its name in trees of weights: weights of its norm begin with the name, too.
KEYS = {"mixer": "attn", "channel": "mlp"}
ROLES = tuple(KEYS)

EP = ("ep_nodes", "ep")  # mesh axes of expert parallelism
# Mesh axes of ZeRO-3 for weights that experts share: for these, ep is data parallelism too.
FSDP = ("fsdp", *EP)
# Logical axis of a weight -> mesh axes that split it (mesh_axes()), the last one varying fastest.
# Kinds add their own axes.
RULES: dict[str, tuple[str, ...]] = {
    "layers": ("pp",),
    "embed": FSDP,
    "vocab": ("tp",),
    "embed_sharded": ("tp", *FSDP),
    "embed_sharded_pp": ("tp", *FSDP, "pp"),  # if Layout.embedding_over_pp
    # replicated
    "vocab_replicated": (),
    "embed_replicated": (),
    "mtp_inputs": (),
}


def mesh_axes(rule: tuple[str, ...], size: Callable[[str], int]) -> tuple[str, ...]:
    """The mesh axes of a rule that have more than one GPU. Without fsdp, each rank of ep has whole
    compute weights of what experts share.

    Args:
      size: GPUs along a mesh axis.
    """
    if "fsdp" in rule and size("fsdp") == 1:
        rule = tuple(axis for axis in rule if axis not in EP)
    return tuple(axis for axis in rule if size(axis) > 1)


REGISTRY: dict[str, type["Sublayer"]] = {}
Kind = TypeVar("Kind", bound="Sublayer")


class Ends(NamedTuple):
    """A value for each of the two GEMMs of a sublayer that have collectives over tp: its first one,
    whose input is all-gathered, and its last one, whose output is reduce-scattered."""

    last: Any
    first: Any


class ByRole(NamedTuple):
    """A value for each sublayer of a layer."""

    mixer: Any
    channel: Any


class Weight(NamedTuple):
    """A weight of a sublayer.

    Attributes:
      axes: logical axes, of a GEMM's weight 'ins -> outs', or 'batch, ins -> outs' for experts.
      owner: the object that has the size of each axis as an attribute.
      copies: GEMMs with different weights per token (top_k of the experts).
      plain: of a small GEMM that is never quantized, and that FLOPs conventions leave out.
    """

    axes: str
    owner: Any
    copies: float = 1
    plain: bool = False

    @property
    def is_gemm(self) -> bool:
        return "->" in self.axes

    @property
    def sides(self) -> tuple[tuple[str, ...], ...]:
        """Names of the batch axes, of those that the GEMM sums over, and of its output's."""
        return axes_of(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return sum(self.sides, ())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self.owner, name) for name in self.names)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def fused(self) -> tuple[int, tuple[int, ...]]:
        """The dim along which matrices are fused, and the size of each; (0, ()) of one matrix."""
        axes = self.owner.fused
        return next(((i, axes[name]) for i, name in enumerate(self.names) if name in axes), (0, ()))

    @property
    def multiply_adds(self) -> float:
        """Of its GEMM's forward pass, per token."""
        _, ins, outs = self.sides
        return self.copies * math.prod(getattr(self.owner, name) for name in (*ins, *outs))


@functools.cache
def axes_of(axes: str) -> tuple[tuple[str, ...], ...]:
    """Names of Weight.axes: of the batch, the ins and the outs; of a weight of no GEMM all are
    outs."""
    left, arrow, outs = axes.partition("->")
    if not arrow:
        return (), (), tuple(left.split())
    batch, comma, ins = left.partition(",")
    batch, ins = (batch, ins) if comma else ("", batch)
    return tuple(batch.split()), tuple(ins.split()), tuple(outs.split())


class Saved(NamedTuple):
    """A tensor that a remat policy may save for the backward pass.

    Attributes:
      name: its checkpoint_name, one of config.run.TENSORS.
      elements: per token of a GPU, over all GPUs of tp, which split them.
      recompute: paths of the weights whose GEMMs run again if it is not saved; 'scores' are those
        of scores().
      gemm_only: only a GEMM's backward pass reads it, in the number format of GEMMs.
    """

    name: str
    elements: float
    recompute: tuple[str, ...] = ()
    gemm_only: bool = False


class State(NamedTuple):
    """A non-trainable array of a sublayer (step/state.py), fp32.

    Attributes:
      name: its key beside the sublayer's weights.
      shape: of one layer's.
      update: (value, statistic of a step) -> the next value.
      reduce: how the statistic is counted over microbatches and over GPUs: 'max' or 'sum'.
      is_layer: the array is the index of the layer, from the start.
      metric: the name of the sum of the statistic in the metrics of a step, or ''.
    """

    name: str
    shape: tuple[int, ...]
    update: Callable[[Any, Any], Any]
    reduce: str = "sum"
    is_layer: bool = False
    metric: str = ""


class Context(NamedTuple):
    """Inputs of a sublayer besides its activation.

    Attributes:
      rope: layers.rope_angles() of this GPU's tokens.
      attention: key of attention.KERNELS.
      documents_bt: number of each token's document in its sequence (data.documents), or None.
    """

    rope: Any
    attention: str = "xla"
    documents_bt: Any = None


def imported(name: str) -> Any:
    """The object 'module:object', whose module (and jax) is imported now."""
    module, _, found = name.partition(":")
    return getattr(importlib.import_module(module), found)


def unset(**constraints: Any) -> Any:
    """A field of a kind whose default is the value of Model of that name."""
    return dataclasses.field(default=None, metadata=constraints)


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def register(name: str) -> Callable[[type[Kind]], type[Kind]]:
    """Class decorator: a kind that workload files can name, a frozen dataclass.

    Args:
      name: of the kind where a layer is written as text.
    """

    def add(cls: Any) -> Any:
        assert name not in REGISTRY, f"two kinds of sublayers are named {name!r}"
        for axis, mesh_axes in cls.axes.items():
            assert RULES.setdefault(axis, mesh_axes) == mesh_axes, f"two rules for axis {axis!r}"
        cls.__annotations__["kind"] = str
        cls.kind = dataclasses.field(default=name, init=False)
        REGISTRY[name] = dataclasses.dataclass(frozen=True, kw_only=True, repr=False)(cls)
        return cls

    return add


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Sublayer:
    """A mixer or a channel. Subclasses declare a kind.

    Fields are None until complete() has taken those of the Model. A complete sublayer has the size
    of each of its logical axes as an attribute.
    """

    kind: str = dataclasses.field(default="", init=False)
    # Of the network: not to be set in a layer.
    embed: int = unset()
    layers: int = unset()
    init_std: float = unset()
    norm_eps: float = unset()
    quantized: bool = unset()

    role: ClassVar[str]  # 'mixer' or 'channel'
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # rules of its logical axes, as in RULES
    # Logical axis -> the setting of Model that its size follows from, if that has another name.
    settings: ClassVar[Mapping[str, str]] = {}
    # The Flax module that applies it, 'module:class', with the complete sublayer as field `model`.
    # Of layers.Applied, its apply() is the body.
    module: ClassVar[str] = "maxbench.model.layers:Applied"
    hugging_face: ClassVar[str] = ""  # 'module:function' that yields its tensors (hugging_face.py)
    # Whether a mixer keeps Context.documents_bt apart.
    masks_documents: ClassVar[bool] = False
    first_rows_are_split: ClassVar[bool] = False  # its first GEMM has this GPU's 1/tp of the tokens

    embed_replicated = property(lambda self: self.embed)

    def __repr__(self) -> str:
        set_fields = [f.name for f in dataclasses.fields(self) if f.init]
        values = {name: getattr(self, name) for name in set_fields}
        shown = [f"{name}={value!r}" for name, value in values.items() if value is not None]
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def rope_dims(self) -> int:
        """Dims of a head that RoPE rotates: Model.rope_dims, or 0."""
        return 0

    @property
    def fused(self) -> Mapping[str, tuple[int, ...]]:
        """Logical axis along which weights fuse several matrices -> the size of each, for Muon."""
        return {}

    def weight_axes(self) -> dict[str, str]:
        """Path of each weight in the sublayer's tree -> Weight.axes."""
        raise NotImplementedError

    @functools.cached_property
    def weights(self) -> dict[str, Weight]:
        """Path of each weight in the sublayer's tree, as 'qkv/w' -> the weight."""
        return {path: Weight(axes, self) for path, axes in self.weight_axes().items()}

    @functools.cached_property
    def gemms(self) -> dict[str, float]:
        """Path of each GEMM's weight -> Weight.multiply_adds."""
        return {path: w.multiply_adds for path, w in self.weights.items() if w.is_gemm}

    @functools.cached_property
    def routed_params(self) -> int:
        """Weights of experts, which ep splits."""
        return sum(w.size for w in self.weights.values() if w.is_gemm and w.sides[0])

    @functools.cached_property
    def form(self) -> Any:
        """Equal for sublayers that can be in one stack: same weights, number format and state."""
        shapes = tuple((path, w.axes, w.shape) for path, w in self.weights.items())
        return self.kind, self.quantized, shapes

    def counted_multiply_adds(self, silu_gates: bool) -> float:
        """Multiply-adds per token, forward pass, of the GEMMs that conventions count.

        Args:
          silu_gates: as metrics.flops.Convention.
        """
        return sum(w.multiply_adds for w in self.weights.values() if w.is_gemm and not w.plain)

    def scores(self, seq: int, causal: bool = True, windows: bool = True) -> float:
        """Multiply-adds per token, forward pass, of products without a weight: the mean over a
        sequence.

        Args:
          causal: only the scores that a causal mask keeps.
          windows: only those inside a layer's window.
        """
        return 0.0

    def saved(self, run: "Run") -> tuple[Saved, ...]:
        """Tensors that remat policies may save."""
        return ()

    def states(self, run: "Run") -> tuple[State, ...]:
        """Non-trainable arrays."""
        return ()

    # For estimates of layouts without a compiled program (planning/search.py):

    @property
    def choices(self) -> int:
        """GPUs of ep that each token is sent to, and back from; 0 if it stays where it is."""
        return 0

    sent_width = property(lambda self: self.embed)  # elements that are sent of a token
    has_slots = property(lambda self: False)  # whether the tokens that are sent have slots

    @property
    def activated(self) -> float:
        """Elements per token that its first GEMM writes for an activation function."""
        return 0

    def reserved(self, ep: int) -> float:
        """activated, with all rows that memory is reserved for."""
        return self.activated

    def kept_if_unrolled(self, run: "Run") -> float:
        """Bytes per token of a GPU, in addition to saved(), that XLA keeps if layers are unrolled:
        intermediates, and operands of wgrads that it delays to the end of the backward pass. An
        estimate."""
        return 0

    @property
    def zeros_stay(self) -> bool:
        """Whether weights of zeros add nothing to the input, and their gradients are zeros: an
        empty slot of a pipeline then needs no branch."""
        return False

    def setting(self, axis: str) -> str:
        """The setting from which the size of a logical axis follows."""
        name = self.settings.get(axis, axis)
        own = {f.name for f in dataclasses.fields(self) if f.default is not None}
        return f"{self.kind}.{name}" if name in own else f"model.{name}"

    def check(self) -> None:
        """Checks a complete sublayer.

        Raises:
          UserError: sizes contradict each other.
        """

    def refusal(self, run: "Run") -> str:
        """The reason why it cannot run in this layout or format, with one that works; '' if it can.
        Dims that mesh axes and number formats divide are checked by config.run_checks."""
        return ""

    def toy(self, model: Mapping[str, Any], has_dense: bool) -> "Sublayer":
        """The sublayer of a toy, as a workload file writes it.

        Args:
          model: fields of the toy's Model, whose sizes it takes.
          has_dense: layers without experts are among the model's.
        """
        return self

    def without_state(self) -> "Sublayer":
        """The sublayer with no need of states(): that of the layer of multi-token prediction."""
        return self

    def apply(self, module: Any, x_bud: Any, context: Context, orders: Any) -> Any:
        """The sublayer inside a Flax module (layers.Applied), in which it declares its weights.

        Args:
          x_bud: normalized input; tp splits the sequence.
          orders: Ends of linear.CommOrder.

        Returns:
          y_bud, Ends of the tokens that the first and the last GEMM return, and the auxiliary loss
          or None.
        """
        raise NotImplementedError


NETWORK_FIELDS = tuple(f.name for f in dataclasses.fields(Sublayer) if f.name != "kind")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a network.

    Attributes:
      mixer, channel: None: the layer has none.
      quantized: whether its GEMMs compute in the run's number format, or in Format.compute.
    """

    mixer: Sublayer | None = None
    channel: Sublayer | None = None
    quantized: bool = True

    def __repr__(self) -> str:
        quantized = "" if self.quantized else ", quantized=False"
        return f"Layer(mixer={self.mixer!r}, channel={self.channel!r}{quantized})"

    def __post_init__(self):
        for role, sublayer in self.parts():
            if not isinstance(sublayer, Sublayer) or sublayer.role != role:
                having = [name for name, kind in REGISTRY.items() if kind.role == role]
                raise UserError(f"{role}={sublayer!r} of a layer must be one of {having}, or None")
        if not (self.mixer or self.channel):
            raise UserError("a layer has neither a mixer nor a channel; give one of them")

    def parts(self) -> Iterator[tuple[str, Sublayer]]:
        """The role of each sublayer, and the sublayer, in the order of the forward pass."""
        found = (("mixer", self.mixer), ("channel", self.channel))
        return ((role, sublayer) for role, sublayer in found if sublayer is not None)

    def saved(self, sublayer: Sublayer, run: "Run") -> tuple[Saved, ...]:
        """Sublayer.saved() of one of its sublayers, without what nothing reads: the output of a
        mixer, if neither a channel nor a second norm follows it."""
        is_read = self.channel or run.model.post_norm
        return tuple(t for t in sublayer.saved(run) if is_read or t.name != "attn_out")

    def part(self, role: str) -> Sublayer | None:
        """The sublayer of a role."""
        return getattr(self, role)

    def map(self, change: Callable[[Sublayer], Sublayer], **fields: Any) -> "Layer":
        """The layer with other sublayers, and other fields."""
        return Layer(
            **{"quantized": self.quantized} | fields | {r: change(s) for r, s in self.parts()}
        )

    @classmethod
    def alone(cls, role: str, sublayer: Sublayer) -> "Layer":
        """A layer of one sublayer."""
        return cls(mixer=sublayer) if role == "mixer" else cls(channel=sublayer)

    @property
    def has_experts(self) -> bool:
        """Whether ep splits weights of the layer."""
        return any(sublayer.routed_params for _, sublayer in self.parts())

    @classmethod
    def from_written(cls, raw: Any) -> "Layer":
        """A layer from a workload file, or from the dict that dataclasses.asdict() makes of it.

        Raises:
          TypeError: it is neither.
          UserError: a kind or a field has no such name.
        """
        if isinstance(raw, cls):
            return raw
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(raw, Mapping) or not {*raw} <= names:
            raise TypeError
        quantized = raw.get("quantized", True)
        if type(quantized) is not bool:
            raise TypeError
        return cls(quantized=quantized, **{role: _from_dict(raw.get(role)) for role in ROLES})


def _from_dict(raw: Any) -> Sublayer | None:
    if raw is None or isinstance(raw, Sublayer):
        return raw
    if not isinstance(raw, Mapping):
        raise TypeError
    values = dict(raw)
    check_choice("kind of a sublayer", kind := values.pop("kind", None), REGISTRY)
    names = [f.name for f in dataclasses.fields(REGISTRY[kind]) if f.init]
    for name in values:
        check_choice(f"{kind}: a field", name, names)
    return REGISTRY[kind](**values)


def as_written(sublayer: Sublayer, model: "Model") -> Sublayer:
    """The sublayer, checked, with no field that repeats the Model's.

    Raises:
      UserError: a field has an invalid value, or is the network's.
    """
    of_model = {f.name: f for f in dataclasses.fields(model)}
    values: dict[str, Any] = {}
    for own in dataclasses.fields(sublayer):
        name, value = own.name, getattr(sublayer, own.name)
        if value is None or not own.init:
            continue
        if name in NETWORK_FIELDS:
            raise UserError(f"{name}={value} is of the whole network; set model.{name}")
        field = of_model.get(name, own)
        value = parse(f"model.{name}", field.type, value, field.metadata)
        same = hasattr(model, name) and getattr(model, name) == value
        values[name] = None if same else value
    return dataclasses.replace(sublayer, **values)


def complete(layer: Layer, model: "Model") -> Layer:
    """The layer with all fields of its sublayers set, checked."""
    quantized = layer.quantized and model.quantized

    def sizes(sublayer):
        names = [f.name for f in dataclasses.fields(sublayer) if f.init]
        unset = [name for name in names if getattr(sublayer, name) is None]
        if missing := [name for name in unset if not hasattr(model, name)]:
            raise UserError(f"{sublayer!r} of a layer needs {missing[0]}, which has no default")
        values = {n: quantized if n == "quantized" else getattr(model, n) for n in unset}
        found = dataclasses.replace(sublayer, **values)
        found.check()
        return found

    return layer.map(sizes, quantized=quantized)
