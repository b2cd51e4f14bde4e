"""Kinds of channels: the MLP and the mixture of experts. Needs no jax."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from maxbench.config.activations import GATED
from maxbench.config.errors import UserError, divisors
from maxbench.config.sublayers import EP, Saved, State, Sublayer, Weight, imported, register, unset

if TYPE_CHECKING:
    from maxbench.config.run import Run

# Up-projections of an MLP: 2 if gated.
MLP_INPUTS = property(lambda self: 2 if GATED[self.act] else 1)
FUSED = property(lambda self: {"mlp_inputs": (1,) * self.mlp_inputs})
# Whether experts have a fixed number of slots for the tokens of a GPU.
HAS_SLOTS = property(lambda self: self.capacity_factor > 0 or self.force_balance)


@register("mlp")
class Mlp(Sublayer):
    """An MLP, gated or not (layers.Mlp)."""

    mlp: int = unset()
    act: str = unset()
    mlp_bias: bool = unset()

    role = "channel"
    axes: ClassVar = {"mlp": ("tp",), "mlp_inputs": ()}
    module = "maxbench.model.layers:Mlp"
    hugging_face = "maxbench.model.hugging_face:mlp"
    mlp_inputs = MLP_INPUTS
    fused = FUSED

    def weight_axes(self) -> dict[str, str]:
        found = {"up/w": "embed -> mlp_inputs mlp", "down/w": "mlp -> embed"}
        biases = {"up_bias": "mlp_inputs mlp", "down_bias": "embed_replicated"}
        return found | (biases if self.mlp_bias else {})

    def counted_multiply_adds(self, silu_gates: bool) -> float:
        gates = self.embed * self.mlp * (self.mlp_inputs - 1)
        uncounted = gates if silu_gates and self.act != "swiglu" else 0
        return super().counted_multiply_adds(silu_gates) - uncounted

    def saved(self, run: "Run") -> tuple[Saved, ...]:
        tensors = (
            Saved("mlp_up", self.mlp_inputs * self.mlp, ("up/w",)),
            Saved("mlp_act", self.mlp, gemm_only=True),
        )
        # Only a second norm reads the output.
        return (*tensors, Saved("mlp_down", self.embed, ("down/w",)))[: 2 + run.model.post_norm]

    @property
    def activated(self) -> float:
        return self.mlp_inputs * self.mlp

    @property
    def zeros_stay(self) -> bool:
        return not self.mlp_bias

    def toy(self, model: Mapping[str, Any], has_dense: bool) -> "Sublayer":
        of_model: dict[str, Any] = {"mlp": None}
        return dataclasses.replace(self, **of_model)


class _SharedExpert(Mlp):
    """MLP of shared experts, which every token goes through. Not a registered kind."""

    settings: ClassVar = {"mlp": "shared_mlp"}


@register("experts")
class Experts(Sublayer):
    """Mixture of experts (model/experts.py).

    With expert_latent, a projection of each token precedes its dispatch, and one follows its
    experts: these, and what is sent to them and back, are narrower than the network.
    """

    experts: int = unset()
    mlp: int = unset()
    act: str = unset()
    mlp_bias: bool = unset()
    shared_mlp: int = unset()
    expert_latent: int = unset()
    top_k: int = unset()
    router: str = unset()
    router_bias: bool = unset()
    router_groups: int = unset()
    router_groups_top: int = unset()
    router_scale: float = unset()
    expert_bias_rate: float = unset()
    force_balance: bool = unset()
    capacity_factor: float = unset()
    dispatch_factor: float = unset()
    drop_policy: str = unset()
    aux_loss: float = unset()

    role = "channel"
    axes: ClassVar = Mlp.axes | {
        "experts": EP,
        "experts_replicated": (),
        "expert_embed": ("fsdp",),
        "expert_latent": ("fsdp",),
        "latent_width": (),
    }
    settings: ClassVar = {"latent_width": "expert_latent"}
    module = "maxbench.model.experts:Moe"
    hugging_face = "maxbench.model.hugging_face:experts"

    experts_replicated = property(lambda self: self.experts)
    latent_width = property(lambda self: self.expert_latent)
    expert_embed = property(lambda self: self.embed)
    # Logical axis of what experts read and write.
    outer = property(lambda self: "expert_latent" if self.expert_latent else "expert_embed")
    sent_width = property(lambda self: self.expert_latent or self.embed)
    mlp_inputs = MLP_INPUTS
    fused = FUSED
    has_slots = HAS_SLOTS
    first_rows_are_split = property(lambda self: self.expert_latent > 0)

    @functools.cached_property
    def shared(self) -> Mlp | None:
        """MLP of the shared experts; None without."""
        names = ("embed", "layers", "init_std", "norm_eps", "quantized", "act", "mlp_bias")
        same = {name: getattr(self, name) for name in names}
        return _SharedExpert(mlp=self.shared_mlp, **same) if self.shared_mlp else None

    def weight_axes(self) -> dict[str, str]:
        found = {
            "router/w": "embed_replicated -> experts_replicated",
            "up": f"experts, {self.outer} -> mlp_inputs mlp",
            "down": f"experts, mlp -> {self.outer}",
        }
        if self.expert_latent:
            found |= {"into/w": "embed -> latent_width", "out_of/w": "latent_width -> embed"}
        found |= {"router_bias": "experts_replicated"} if self.router_bias else {}
        biases = {"up_bias": "experts mlp_inputs mlp"}
        biases |= {"down_bias": "experts_replicated embed_replicated"}
        return found | (biases if self.mlp_bias else {})

    @functools.cached_property
    def weights(self) -> dict[str, Weight]:
        own = {path: Weight(axes, self) for path, axes in self.weight_axes().items()}
        own |= {path: own[path]._replace(copies=self.top_k) for path in ("up", "down")}
        own["router/w"] = own["router/w"]._replace(plain=True)
        shared = self.shared.weights if self.shared else {}
        return own | {f"shared_expert/{path}": w for path, w in shared.items()}

    @functools.cached_property
    def form(self) -> Any:
        return super().form, self.expert_bias_rate > 0, self.force_balance

    def counted_multiply_adds(self, silu_gates: bool) -> float:
        widths = self.sent_width * self.mlp * self.top_k + self.embed * self.shared_mlp
        gates = widths * (self.mlp_inputs - 1)
        uncounted = gates if silu_gates and self.act != "swiglu" else 0
        return super().counted_multiply_adds(silu_gates) - uncounted

    def saved(self, run: "Run") -> tuple[Saved, ...]:
        routed = self.rows(run.layout.ep) * self.slot_padding(run)
        width = routed * self.mlp + self.shared_mlp
        slots = routed if self.has_slots else 0
        into = ("into/w",) if self.expert_latent else ()
        again = ("up", "shared_expert/up/w") if self.shared else ("up",)
        tensors = [
            Saved("slots", slots * self.sent_width, into if slots else (), gemm_only=True),
            Saved("mlp_up", self.mlp_inputs * width, again),
            Saved("mlp_act", width, gemm_only=True),
        ]
        # The output of the experts is read by a second norm, and by the gradient of the weights
        # with which slots are combined (model/experts.py).
        if run.model.post_norm or (self.has_slots and not self.force_balance):
            tensors.append(Saved("mlp_down", (slots or 1) * self.sent_width, ("down",)))
        if self.expert_latent:  # the input of the projection from the latent
            tensors.append(Saved("mlp_down", self.expert_latent, ("down",)))
        if run.model.post_norm and self.shared:
            tensors.append(Saved("mlp_down", self.embed, ("shared_expert/down/w",)))
        return tuple(tensors)

    def states(self, run: "Run") -> tuple[State, ...]:
        found = []
        if rate := self.expert_bias_rate:
            # The bias of the choice of experts.
            update = lambda bias, tokens: imported("maxbench.model.router:update_bias")(
                bias, tokens, rate
            )
            found.append(State("expert_bias", (self.experts,), update))
        if self.force_balance:
            # The index of the layer, from which its random experts follow.
            found.append(State("layer", (1,), lambda layer, _: layer, is_layer=True))
        if self.bounds_rows(run.layout.ep):
            # Rows for which model.dispatch_factor was too small, over all steps.
            add = lambda before, rows: before + rows
            found.append(State("lost_rows", (1,), add, metric="lost_rows"))
        return tuple(found)

    @property
    def choices(self) -> int:
        return self.top_k

    @property
    def activated(self) -> float:
        return self.mlp_inputs * (self.top_k * self.mlp + self.shared_mlp)

    def reserved(self, ep: int) -> float:
        return self.mlp_inputs * self.mlp * self.rows(ep)

    def kept_if_unrolled(self, run: "Run") -> float:
        """As compiled programs keep (docs/plan.csv): XLA documents no rule for delayed wgrads."""
        a, halves = run.layout, run.train.two_batch_overlap
        several = self.experts > a.ep  # on a GPU
        up = self.sent_width + self.mlp_inputs * self.mlp / a.tp
        down = self.sent_width + self.mlp / a.tp
        if run.format.quantized or self.capacity_factor > 0:
            both = self.capacity_factor > 0 or self.mlp_bias or halves or not several
            elements = up + both * down
        else:  # wgrads add to their accumulators
            delayed = run.train.remat == "none" and several and not self.mlp_bias
            elements = delayed * up / (2 if halves else 1)
        return run.format.bytes * self.rows(a.ep) * elements

    @property
    def zeros_stay(self) -> bool:
        return not self.mlp_bias

    def toy(self, model: Mapping[str, Any], has_dense: bool) -> "Sublayer":
        """A quarter as wide as a dense MLP in a model that has both."""
        mlp = model["mlp"] // 4 if has_dense else None
        sizes: dict[str, Any] = {"experts": None, "mlp": mlp}
        return dataclasses.replace(self, **sizes)

    def without_state(self) -> "Sublayer":
        """Its experts receive all tokens: no count of rows that do not fit."""
        return dataclasses.replace(self, dispatch_factor=0.0)

    @property
    def balanced_window(self) -> int:
        """Consecutive positions that choose all experts equally often, with force_balance."""
        return self.experts // math.gcd(self.experts, self.top_k)

    @property
    def balanced_uses(self) -> int:
        """How often a window chooses each expert, with force_balance."""
        return self.top_k // math.gcd(self.experts, self.top_k)

    def capacity(self, tokens: int) -> int:
        """Slots of one expert for the tokens of one GPU; capacity_factor must not be 0."""
        return min(tokens, math.ceil(self.capacity_factor * tokens * self.top_k / self.experts))

    def balanced_windows(self, tokens: int, tp: int, cp: int) -> int:
        """The most windows that `tokens` of a sequence, which a GPU has, are in."""
        parts = 1 if cp == 1 else 2  # intervals of positions (sharding.mesh.token_positions)
        length = tokens * tp // parts
        whole = (length if tp == 1 else math.gcd(length, tokens)) % self.balanced_window == 0
        if whole or cp == tp == 1:
            return -(-tokens // self.balanced_window)
        return min(tokens, tokens // self.balanced_window + 2 * parts)

    def balanced_slots(self, batch: int, tokens: int, tp: int, cp: int, multiple: int) -> int:
        """Slots of an expert for a GPU's tokens with force_balance, each window having those of
        balanced_uses.

        Args:
          batch, tokens: the GPU's sequences, and its tokens of each.
          multiple: of the number format (Format.slot_multiple).
        """
        slots = batch * self.balanced_windows(tokens, tp, cp) * self.balanced_uses
        return -(-slots // multiple) * multiple

    def rows(self, ep: int) -> float:
        """Rows of the experts' GEMMs that memory is reserved for, per token of a GPU."""
        if self.force_balance:
            return self.top_k
        if self.dispatch_factor and not self.capacity_factor:
            return min(self.dispatch_factor * self.top_k, min(self.top_k * ep, self.experts))
        return self.capacity_factor * self.top_k or min(self.top_k * ep, self.experts)

    def bounds_rows(self, ep: int) -> bool:
        """Whether dropless experts receive tokens in buffers of dispatch_factor."""
        return self.dispatch_factor > 0 and ep > 1 and not self.has_slots

    def slot_padding(self, run: "Run") -> float:
        """Slots that a GPU reserves with force_balance, over those that it fills."""
        if not self.force_balance:
            return 1.0
        a = run.layout
        tokens = run.train.seq // (a.cp * a.tp)
        reserved = self.balanced_slots(a.mbs, tokens, a.tp, a.cp, run.format.slot_multiple)
        return reserved * self.balanced_window / (a.mbs * tokens * self.balanced_uses)

    def check(self) -> None:
        groups, top = self.router_groups, self.router_groups_top
        named = f"model.router_groups={groups} and model.router_groups_top={top}"
        if not self.experts:
            raise UserError("model.experts=0: a layer has experts; use an Mlp, or experts above 0")
        if self.experts < self.top_k:
            raise UserError(f"model.top_k={self.top_k} must be at most experts={self.experts}")
        if self.experts % groups:
            raise UserError(
                f"model.experts={self.experts} is not a multiple of model.router_groups={groups}; "
                f"router_groups that work: {divisors(self.experts)}"
            )
        if top > groups or top * (self.experts // groups) < self.top_k:
            raise UserError(
                f"{named}: a token chooses top_k={self.top_k} of experts={self.experts} from the "
                "top groups; router_groups_top must be at most router_groups, and have as many "
                "experts"
            )
        if groups > 1 and self.router != "sigmoid":
            raise UserError(f"{named} need model.router=sigmoid, and it is {self.router}")
        if self.expert_bias_rate and self.router != "sigmoid":
            raise UserError(
                f"model.expert_bias_rate={self.expert_bias_rate} needs model.router=sigmoid, whose "
                f"scores are between 0 and 1, and it is {self.router}; use model.aux_loss with it"
            )
        if self.expert_latent and self.mlp_bias:
            raise UserError(
                f"model.expert_latent={self.expert_latent}: experts in a latent have no biases; "
                "use model.mlp_bias=False"
            )
        if 0 < self.dispatch_factor < 1:
            raise UserError(
                f"model.dispatch_factor={self.dispatch_factor} is less than balanced routing "
                "needs; use at least 1, as 1.5, or 0 for any routing"
            )
        uneven = self.experts % self.top_k or self.top_k % top or groups % top
        if self.force_balance and groups > 1 and uneven:
            raise UserError(
                f"model.force_balance shares experts={self.experts} and router_groups={groups} out "
                f"evenly: top_k={self.top_k} must divide the experts, and router_groups_top={top} "
                f"must divide router_groups and top_k; top_k that work: {divisors(self.experts)}"
            )

    def refusal(self, run: "Run") -> str:
        """The rows of quantized GEMMs of experts are a multiple of the format's."""
        a, f, dtype = run.layout, run.format, run.precision.dtype
        if not (f.quantized and self.quantized) or self.force_balance:  # whose slots are blocks
            return ""
        if not self.has_slots:
            return (
                f"dtype={dtype!r} needs a fixed number of slots for each expert, and model."
                "capacity_factor=0 has none; capacity_factor=experts / top_k="
                f"{self.experts / self.top_k:g} drops no token either, and model.force_balance="
                "True needs no factor; or use dtype=bf16"
            )
        tokens = a.mbs * run.train.seq // (a.cp * a.tp)
        slots = self.capacity(tokens)
        gpus = 1 if f.blocks else a.ep * a.tp  # whose slots are rows of one GEMM, or of its blocks
        if slots * gpus % f.multiple == 0:
            return ""
        unit = f.multiple // math.gcd(gpus, f.multiple)
        # The factor for the next number of slots that works, minus a half slot: rounding up in
        # capacity() must not exceed it.
        factor = (-(-slots // unit) * unit - 0.5) * self.experts / (tokens * self.top_k)
        return (
            f"dtype={dtype!r} needs dims of GEMMs that are multiples of {f.multiple}: model."
            f"capacity_factor={self.capacity_factor} gives an expert {gpus} x {slots} slots; "
            f"nearest that works: {factor:.6g}"
        )
