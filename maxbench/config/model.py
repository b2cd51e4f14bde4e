"""The dimensions and options of a transformer, checked.

Size fields of Model (embed, heads, ...) are also names of logical axes: a weight is declared by its
axes, Model has the size of each axis, sharding.rules.RULES its mesh axes.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from maxbench.config.activations import GATED
from maxbench.config.errors import UserError, divisors
from maxbench.config.validation import field, parse, validate


class LayerKind(NamedTuple):
    """The sizes in which layers of one model differ."""

    mlp: int
    experts: int = 0  # 0 = one dense MLP
    window: int = 0  # as Model.window
    quantized: int = 1  # 0: GEMMs compute in Format.compute, whatever the run's number format


class LayerGroup(NamedTuple):
    """Consecutive layers whose kinds repeat: `count` times the cycle."""

    count: int  # type: ignore[assignment]  # a tuple's method of this name is not used
    cycle: tuple[LayerKind, ...]


MAX_LAYERS = 10_000  # of a model with layer groups, which are listed one by one
NAME = (re.compile(r"\w[\w.+-]*", re.ASCII).fullmatch, "letters, digits, and . + - _ between them")
LAYER_GROUPS = (
    lambda groups: (
        sum(g.count * len(g.cycle) for g in groups) <= MAX_LAYERS
        and all(g.count > 0 and g.cycle for g in groups)
        and all(
            k.mlp > 0 <= min(k) and max(k) < 2**31 and k.quantized < 2
            for g in groups
            for k in g.cycle
        )
    ),
    "groups (count, (kind, ...)) of consecutive layers, each kind (mlp, experts, window), at least "
    "(1, 0, 0), as ((3, ((18432,),)), (58, ((2048, 256),)))",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The dimensions and options of a transformer.

    They are all that defines a model family: no code branches on its name.
    """

    name: str = field(check=NAME)
    size: str = field(check=NAME)
    layers: int = field(at_least=1)
    embed: int = field(at_least=1)
    heads: int = field(at_least=1)
    kv_heads: int = field(at_least=1)
    head_dim: int = field(at_least=1)  # heads x head_dim may differ from embed
    mlp: int = field(at_least=1)
    vocab: int = field(at_least=1)
    value_dim: int = field(0, at_least=0)  # width of a value head; 0 = head_dim
    # First to last; () if all layers are alike. With fewer `layers`, the first ones of the groups.
    layer_groups: tuple[LayerGroup, ...] = field((), check=LAYER_GROUPS)
    window: int = field(0, at_least=0)  # tokens that a query attends to, itself included; 0 = all
    quantized: bool = True  # as LayerKind.quantized
    act: str = field("swiglu", options=GATED)
    mlp_bias: bool = False  # biases of the MLP's or the experts' projections
    # layernorm1p: its weight is stored minus one
    norm: str = field("rmsnorm", options=("rmsnorm", "layernorm1p"))
    norm_eps: float = field(1e-5, above=0)
    post_norm: bool = False  # a second norm after attention and after the MLP
    tied: bool = False  # the LM head is the embedding table
    rope_base: float = field(10_000.0, above=0)
    rope_fraction: float = field(1.0, above=0, at_most=1)  # of head_dim that is rotated
    # Low frequencies are divided by rope_factor, for sequences longer than rope_context: as
    # Llama 3.1 does, or by YaRN (layers.rope_angles). A factor of 1 = off
    rope_scaling: str = field("llama3", options=("llama3", "yarn"))
    rope_factor: float = field(1.0, above=0)
    rope_context: int = field(8192, at_least=1)
    rope_low: float = field(1.0, above=0)  # llama3: periods in rope_context, scaled below
    rope_high: float = field(4.0, above=0)  # and unscaled above
    rope_beta_fast: float = field(32.0, above=0)  # yarn: the same, unscaled above
    rope_beta_slow: float = field(1.0, above=0)  # and scaled below
    rope_truncate: bool = True  # yarn: the dims of both limits are rounded
    # yarn: 0 = cos and sin are multiplied by 0.1 ln(factor) + 1; otherwise all attention logits by
    # (0.1 rope_mscale ln(factor) + 1)^2
    rope_mscale: float = field(0.0, at_least=0)
    softcap: float = field(0.0, at_least=0)  # cap of attention logits; 0 = off
    qk_norm: bool = False  # RMSNorm of each query and key over head_dim, before RoPE
    attention_bias: bool = False  # of the projections before and after attention
    sinks: bool = False  # a logit per head joins the softmax's denominator
    # Multi-head latent attention (layers.LatentAttention) if set, all three: widths of the latents
    # of queries and of keys and values, and the last dims of a head, those that RoPE rotates
    q_rank: int = field(0, at_least=0)
    kv_rank: int = field(0, at_least=0)
    rope_head_dim: int = field(0, at_least=0)
    embed_multiplier: float = field(1.0, above=0)
    output_multiplier: float = field(1.0, above=0)
    init_std: float = field(0.02, at_least=0)
    experts: int = field(0, at_least=0)  # 0 = one dense MLP; with layer groups, their maximum
    top_k: int = field(2, at_least=1)
    # softmax_topk: softmax over all experts, then top-k; topk_softmax: the reverse; sigmoid: top-k
    # of sigmoids, whose weights are normalized to a sum of 1
    router: str = field("topk_softmax", options=("topk_softmax", "softmax_topk", "sigmoid"))
    router_bias: bool = False  # of the router's projection
    router_groups: int = field(1, at_least=1)  # of consecutive experts
    router_groups_top: int = field(1, at_least=1)  # groups that a token chooses its experts from
    router_scale: float = field(1.0, above=0)  # multiplies the weights of the chosen experts
    # Step of the bias that balances the choice of experts (arXiv:2412.19437); 0 = no bias
    expert_bias_rate: float = field(0.0, at_least=0)
    # Tokens choose experts at random, all equally often, as in NVIDIA's benchmarks
    force_balance: bool = False
    shared_mlp: int = field(0, at_least=0)  # width of an MLP beside the experts; 0 = none
    capacity_factor: float = field(1.0, at_least=0)  # 0 = dropless
    # Rows of dropless experts that memory is reserved for, over those of balanced routing, if each
    # token is sent to the GPUs of its experts only; 0 = to all GPUs of ep, for any routing
    dispatch_factor: float = field(0.0, at_least=0)
    # tokens that an expert drops beyond its capacity: the least probable, or the last
    drop_policy: str = field("probs", options=("probs", "position"))
    aux_loss: float = field(0.0, at_least=0)  # coefficient of the load-balancing loss
    # Multi-token prediction: a layer that predicts the token after the next; its loss' coefficient
    mtp_layers: int = field(0, at_least=0, at_most=1)
    mtp_loss: float = field(0.1, at_least=0)

    # Logical axes that are no fields: fused projections.
    @property
    def qkv(self) -> int:
        """Heads per KV group in the fused projection: its queries, one key, one value."""
        return self.heads // self.kv_heads + 2

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.value_dim or self.head_dim

    @property
    def group_width(self) -> int:
        """Width of a KV group in the fused projection if value_dim differs from head_dim."""
        return (self.heads // self.kv_heads + 1) * self.head_dim + self.value_width

    @property
    def latents(self) -> int:
        """Width of the down-projection of latent attention: both latents and the shared key."""
        return self.q_rank + self.kv_rank + self.rope_head_dim

    @property
    def kv_up_width(self) -> int:
        """Width per head of the up-projection of keys and values in latent attention."""
        return self.head_dim - self.rope_head_dim + self.value_width

    @property
    def mlp_inputs(self) -> int:
        """Up-projections of the MLP: 2 if gated."""
        return 2 if GATED[self.act] else 1

    @property
    def rope_dims(self) -> int:
        """Dims of a head that RoPE rotates."""
        return self.rope_head_dim or int(self.head_dim * self.rope_fraction)

    @property
    def logit_scale(self) -> float:
        """Factor of the products of queries and keys."""
        yarn = self.rope_scaling == "yarn" and self.rope_mscale
        scale = 0.1 * self.rope_mscale * math.log(self.rope_factor) + 1 if yarn else 1.0
        return scale * scale / math.sqrt(self.head_dim)

    mtp_inputs = property(lambda self: 2)  # a hidden state and an embedding (model/mtp.py)

    # The same sizes under other names, for weights with another sharding (sharding.rules.RULES).
    # An untied embedding table:
    vocab_replicated = property(lambda self: self.vocab)
    embed_sharded = embed_sharded_pp = property(lambda self: self.embed)
    # Norms, biases and the router:
    embed_replicated = property(lambda self: self.embed)
    q_rank_replicated = property(lambda self: self.q_rank)
    kv_rank_replicated = property(lambda self: self.kv_rank)
    experts_replicated = property(lambda self: self.experts)

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, tuple["Model", ...]], ...]:
        """The layer groups, with the Model of a layer of each kind: (count, cycle)."""

        @functools.cache
        def layer(kind: LayerKind) -> "Model":
            sizes = kind._asdict() | {"quantized": bool(kind.quantized)}
            return dataclasses.replace(self, layer_groups=(), **sizes)

        groups = ((g.count, tuple(map(layer, g.cycle))) for g in self.layer_groups)
        return tuple(groups) or ((self.layers, (self,)),)

    @functools.cached_property
    def per_layer(self) -> tuple["Model", ...]:
        """The Model of each layer."""
        return sum((count * cycle for count, cycle in self.groups), ())

    @functools.cached_property
    def kinds(self) -> tuple[tuple[int, "Model"], ...]:
        """The kinds of layers: how many there are, and the Model of one."""
        counts = collections.Counter[Model]()
        for count, cycle in self.groups:
            for kind in cycle:
                counts[kind] += count
        return tuple((n, kind) for kind, n in counts.items())

    @property
    def has_slots(self) -> bool:
        """Whether experts have a fixed number of slots for the tokens of a GPU."""
        return self.capacity_factor > 0 or self.force_balance

    def bounds_rows(self, ep: int) -> bool:
        """Whether dropless experts receive tokens in buffers of dispatch_factor."""
        return self.dispatch_factor > 0 and ep > 1 and not self.has_slots

    @property
    def balanced_window(self) -> int:
        """Consecutive positions that choose each expert once, with force_balance."""
        return self.experts // self.top_k

    def with_bf16_layers(self, first: int, last: int) -> "Model":
        """The model with its first and last layers not quantized."""
        if not first + last:
            return self
        kind = lambda m: LayerKind(m.mlp, m.experts, m.window, int(m.quantized))
        kinds = list(map(kind, self.per_layer))
        for i in (*range(first), *range(self.layers - last, self.layers)):
            kinds[i] = kinds[i]._replace(quantized=0)
        return dataclasses.replace(self, layer_groups=tuple(LayerGroup(1, (k,)) for k in kinds))

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
        """Slots of an expert for a GPU's tokens with force_balance, each window having one.

        Args:
          batch, tokens: the GPU's sequences, and its tokens of each.
          multiple: of the number format (Format.slot_multiple).
        """
        return -(-batch * self.balanced_windows(tokens, tp, cp) // multiple) * multiple

    def rows(self, ep: int) -> float:
        """Rows of the MLP's GEMMs that memory is reserved for, per token of a GPU."""
        if not self.experts:
            return 1
        if self.force_balance:
            return self.top_k
        if self.dispatch_factor and not self.capacity_factor:
            return min(self.dispatch_factor * self.top_k, min(self.top_k * ep, self.experts))
        return self.capacity_factor * self.top_k or min(self.top_k * ep, self.experts)

    def __post_init__(self):
        constraints = self.__dataclass_fields__["layer_groups"]
        groups = parse(
            "model.layer_groups", constraints.type, self.layer_groups, constraints.metadata
        )
        object.__setattr__(self, "layer_groups", groups)
        validate(self, "model.")
        self._check_layer_groups()
        if self.heads % self.kv_heads:
            raise UserError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}; "
                f"kv_heads that work: {divisors(self.heads)}"
            )
        self._check_latents()
        if self.rope_dims % 2 or not self.rope_dims:
            raise UserError(
                f"model.rope_fraction={self.rope_fraction} of model.head_dim={self.head_dim} must "
                "be an even number of dims, at least 2; rope_fraction=1.0 or 0.5 usually works"
            )
        self._check_rope_scaling()
        if 0 < self.experts < self.top_k:
            raise UserError(f"model.top_k={self.top_k} must be at most experts={self.experts}")
        if self.experts:
            self._check_router()

    def _check_router(self) -> None:
        m, groups, top = self, self.router_groups, self.router_groups_top
        named = f"model.router_groups={groups} and model.router_groups_top={top}"
        if m.experts % groups:
            raise UserError(
                f"model.experts={m.experts} is not a multiple of model.router_groups={groups}; "
                f"router_groups that work: {divisors(m.experts)}"
            )
        if top > groups or top * (m.experts // groups) < m.top_k:
            raise UserError(
                f"{named}: a token chooses top_k={m.top_k} of experts={m.experts} from the top "
                "groups; router_groups_top must be at most router_groups, and have as many experts"
            )
        if groups > 1 and m.router != "sigmoid":
            raise UserError(f"{named} need model.router=sigmoid, and it is {m.router}")
        if m.expert_bias_rate and m.router != "sigmoid":
            raise UserError(
                f"model.expert_bias_rate={m.expert_bias_rate} needs model.router=sigmoid, whose "
                f"scores are between 0 and 1, and it is {m.router}; use model.aux_loss with it"
            )
        if 0 < m.dispatch_factor < 1:
            raise UserError(
                f"model.dispatch_factor={m.dispatch_factor} is less than balanced routing needs; "
                "use at least 1, as 1.5, or 0 for any routing"
            )
        if m.force_balance and (m.experts % m.top_k or m.top_k % top or groups % top):
            raise UserError(
                f"model.force_balance shares experts={m.experts} and router_groups={groups} out "
                f"evenly: top_k={m.top_k} must divide the experts, and router_groups_top={top} "
                f"must divide router_groups and top_k; top_k that work: {divisors(m.experts)}"
            )

    def _check_latents(self) -> None:
        names = ("q_rank", "kv_rank", "rope_head_dim")
        if not any(getattr(self, name) for name in names):
            return
        if zero := [name for name in names if not getattr(self, name)]:
            raise UserError(
                f"model.{zero[0]}=0: latent attention needs all of {', '.join(names)} above 0; "
                "leave all of them out for grouped-query attention"
            )
        if self.rope_head_dim >= self.head_dim or self.rope_head_dim % 2:
            raise UserError(
                f"model.rope_head_dim={self.rope_head_dim} must be an even number of dims below "
                f"model.head_dim={self.head_dim}, the others of which RoPE does not rotate"
            )
        if self.kv_heads != self.heads:
            raise UserError(
                f"model.kv_heads={self.kv_heads}: latent attention (model.kv_rank={self.kv_rank}) "
                f"has keys and values for each head; use kv_heads={self.heads}"
            )
        if self.qk_norm:
            raise UserError(
                f"model.qk_norm=True: latent attention (model.kv_rank={self.kv_rank}) normalizes "
                "its latents instead; leave qk_norm out"
            )
        if self.rope_fraction != 1:
            raise UserError(
                f"model.rope_fraction={self.rope_fraction}: latent attention rotates "
                f"model.rope_head_dim={self.rope_head_dim} dims of a head; leave rope_fraction out"
            )

    def _check_rope_scaling(self) -> None:
        if self.rope_factor == 1:
            return
        llama3 = self.rope_scaling == "llama3"
        low, high = ("rope_low", "rope_high") if llama3 else ("rope_beta_slow", "rope_beta_fast")
        below, above = getattr(self, low), getattr(self, high)
        if below > above or (llama3 and below == above):
            raise UserError(f"model.{low}={below} must be below model.{high}={above}")
        if self.rope_scaling == "yarn" and self.rope_factor < 1:
            raise UserError(
                f"model.rope_factor={self.rope_factor} shortens the context, and YaRN lengthens "
                "it; use a factor above 1, or 1 for none"
            )

    def _check_layer_groups(self) -> None:
        """Checks the totals, leaves out layers after the first `layers`, and groups the layers
        anew, so that equal models have equal groups; a model whose layers are alike has ()."""
        if not self.layer_groups:
            return
        kinds = [kind for g in self.layer_groups for kind in g.count * g.cycle]
        given = tuple((g.count, tuple(map(tuple, g.cycle))) for g in self.layer_groups)
        if self.layers > len(kinds):
            raise UserError(
                f"model.layers={self.layers} is more than the layers={len(kinds)} of model."
                f"layer_groups={given}; give at most as many"
            )
        experts = max(kind.experts for kind in kinds)
        kinds = kinds[: self.layers]
        kept = max(kind.experts for kind in kinds)
        if self.experts not in (experts, kept):
            raise UserError(
                f"model.experts={self.experts} differs from the experts={experts} of "
                f"model.layer_groups={given}; give the same in both"
            )
        groups, sizes = group_layers(kinds), {"experts": kept}
        if len(groups) == 1 and len(groups[0].cycle) == 1:
            sizes = {**kinds[0]._asdict(), "quantized": bool(kinds[0].quantized)}
            groups = ()
        for name, value in {**sizes, "layer_groups": groups}.items():
            object.__setattr__(self, name, value)


def group_layers(kinds: Sequence[LayerKind]) -> tuple[LayerGroup, ...]:
    """Groups consecutive layers: the cycle that covers most of the next layers, then the next; of
    equally long ones the shortest cycle. Layers that repeat nothing are groups of one."""
    groups, start = [], 0
    while start < len(kinds):
        best, longest = LayerGroup(1, (kinds[start],)), 1
        for period in range(1, (len(kinds) - start) // 2 + 1):
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            count = (end - start) // period
            if count > 1 and count * period > longest:
                best = LayerGroup(count, tuple(kinds[start : start + period]))
                longest = count * period
            if end == len(kinds):
                break  # a longer cycle covers no more
        groups.append(best)
        start += longest
    return tuple(groups)
