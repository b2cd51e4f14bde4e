"""The dimensions and options of a transformer, checked.

A layer is a mixer of config/mixers.py and a channel of config/channels.py, whose fields default to
those of Model. Its own size fields (embed, vocab) are names of logical axes too, as those of kinds.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from maxbench.config import channels, sublayers
from maxbench.config.activations import GATED
from maxbench.config.channels import Experts, Mlp
from maxbench.config.errors import UserError
from maxbench.config.mixers import Attention, LatentAttention
from maxbench.config.sublayers import Layer, Weight
from maxbench.config.validation import field, parse, validate


class LayerGroup(NamedTuple):
    """Consecutive layers whose kinds repeat: `count` times the cycle."""

    count: int  # type: ignore[assignment]  # a tuple's method of this name is not used
    cycle: tuple[Layer, ...]


MAX_LAYERS = 10_000  # of a model with layer groups, which are listed one by one
NAME = (re.compile(r"\w[\w.+-]*", re.ASCII).fullmatch, "letters, digits, and . + - _ between them")
LAYER_GROUPS = (
    lambda groups: (
        sum(g.count * len(g.cycle) for g in groups) <= MAX_LAYERS
        and all(g.count > 0 and g.cycle for g in groups)
    ),
    "groups (count, (layer, ...)) of consecutive layers, each Layer(mixer=..., channel=...), as "
    "((3, (Layer(mixer=Attention(), channel=Mlp(mlp=18432)),)),)",
)

MTP_BLOCK = (lambda _: True, "a layer, as Layer(mixer=Attention(), channel=Experts()), or None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The dimensions and options of a transformer.

    They are all that defines a model family: no code branches on its name. Those that a kind of
    mixer or channel has too are the defaults of its layers (config/sublayers.py).
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
    quantized: bool = True  # as Layer.quantized
    act: str = field("swiglu", options=GATED)
    mlp_bias: bool = False  # biases of the MLP's or the experts' projections
    # layernorm1p: its weight is stored minus one
    norm: str = field("rmsnorm", options=("rmsnorm", "layernorm1p"))
    norm_eps: float = field(1e-5, above=0)
    post_norm: bool = False  # a second norm after attention and after the MLP
    tied: bool = False  # the LM head is the embedding table
    rope_base: float = field(10_000.0, above=0)
    # of head_dim that is rotated; 0: attention without positions
    rope_fraction: float = field(1.0, at_least=0, at_most=1)
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
    # Mamba-2 (model/mamba.py), in layers with this mixer: heads and their width, groups of heads
    # that share B and C, width of the state, taps of the convolution, tokens of a chunk
    ssm_heads: int = field(0, at_least=0)
    ssm_head_dim: int = field(64, at_least=1)
    ssm_groups: int = field(8, at_least=1)
    ssm_state: int = field(128, at_least=1)
    ssm_conv: int = field(4, at_least=1)
    ssm_chunk: int = field(128, at_least=1)
    embed_multiplier: float = field(1.0, above=0)
    output_multiplier: float = field(1.0, above=0)
    init_std: float = field(0.02, at_least=0)
    experts: int = field(0, at_least=0)  # 0 = one dense MLP; with layer groups, of those with some
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
    shared_mlp: int = field(0, at_least=0)  # width of the MLP of shared experts; 0 = none
    # Width of the latent that experts read and write (latent MoE of Nemotron 3); 0 = embed
    expert_latent: int = field(0, at_least=0)
    capacity_factor: float = field(1.0, at_least=0)  # 0 = dropless
    # Rows of dropless experts that memory is reserved for, over those of balanced routing, if each
    # token is sent to the GPUs of its experts only; 0 = to all GPUs of ep, for any routing
    dispatch_factor: float = field(0.0, at_least=0)
    # tokens that an expert drops beyond its capacity: the least probable, or the last
    drop_policy: str = field("probs", options=("probs", "position"))
    aux_loss: float = field(0.0, at_least=0)  # coefficient of the load-balancing loss
    # Multi-token prediction (model/mtp.py): how many tokens after the next are predicted, by as
    # many uses of one layer; the layer, None = as the last one; the coefficient of its mean loss
    mtp_layers: int = field(0, at_least=0, at_most=8)
    mtp_block: Layer | None = field(None, check=MTP_BLOCK)  # noqa: RUF009  # frozen
    mtp_loss: float = field(0.1, at_least=0)

    @property
    def rope_dims(self) -> int:
        """Dims of a head that RoPE rotates."""
        return self.rope_head_dim or int(self.head_dim * self.rope_fraction)

    @property
    def logit_factor(self) -> float:
        """Factor of attention logits besides 1 / sqrt(head_dim)."""
        yarn = self.rope_scaling == "yarn" and self.rope_mscale
        scale = 0.1 * self.rope_mscale * math.log(self.rope_factor) + 1 if yarn else 1.0
        return scale * scale

    mtp_inputs = property(lambda self: 2)  # a hidden state and an embedding (model/mtp.py)

    # The same sizes under other names, for weights with another sharding (sublayers.RULES). An
    # untied embedding table:
    vocab_replicated = property(lambda self: self.vocab)
    embed_sharded = embed_sharded_pp = property(lambda self: self.embed)
    # Norms:
    embed_replicated = property(lambda self: self.embed)

    # Of the default channel:
    mlp_inputs = channels.MLP_INPUTS
    has_slots = channels.HAS_SLOTS

    @property
    def default_layer(self) -> Layer:
        """A layer without layer groups, as a workload file would write it."""
        latent = self.q_rank or self.kv_rank or self.rope_head_dim
        channel = Experts() if self.experts else Mlp()
        return Layer(mixer=LatentAttention() if latent else Attention(), channel=channel)

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, tuple[Layer, ...]], ...]:
        """The layer groups, complete (sublayers.complete): (count, cycle)."""
        complete = functools.cache(lambda layer: sublayers.complete(layer, self))
        given = self.layer_groups or (LayerGroup(self.layers, (self.default_layer,)),)
        return tuple((g.count, tuple(map(complete, g.cycle))) for g in given)

    @functools.cached_property
    def per_layer(self) -> tuple[Layer, ...]:
        """Each layer, complete."""
        return sum((count * cycle for count, cycle in self.groups), ())

    @functools.cached_property
    def kinds(self) -> tuple[tuple[int, Layer], ...]:
        """The kinds of layers: how many there are, and the layer, complete."""
        counts = collections.Counter[Layer]()
        for count, cycle in self.groups:
            for layer in cycle:
                counts[layer] += count
        return tuple((n, layer) for layer, n in counts.items())

    @functools.cached_property
    def has_experts(self) -> bool:
        """Whether ep splits weights of some layer."""
        return any(layer.has_experts for layer in self.all_layers)

    @functools.cached_property
    def mtp_layer(self) -> Layer:
        """The layer of multi-token prediction, complete, not quantized and without state."""
        plain = lambda sublayer: dataclasses.replace(sublayer.without_state(), quantized=False)
        given = sublayers.complete(self.mtp_block, self) if self.mtp_block else self.per_layer[-1]
        return given.map(plain, quantized=False)

    @functools.cached_property
    def all_layers(self) -> tuple[Layer, ...]:
        """A layer of each of the kinds, and that of multi-token prediction."""
        mtp = (self.mtp_layer,) if self.mtp_layers else ()
        return *(layer for _, layer in self.kinds), *mtp

    @property
    def fused(self) -> dict[str, tuple[int, ...]]:
        """As Sublayer.fused: each weight outside of sublayers is one matrix."""
        return {}

    def setting(self, axis: str) -> str:
        """The setting from which the size of a logical axis follows."""
        return f"model.{'vocab' if 'vocab' in axis else 'embed'}"

    def norm_weights(self, path: str) -> dict[str, Weight]:
        """Weights of a norm of activations."""
        names = ("scale", "bias") if self.norm == "layernorm1p" else ("scale",)
        return {f"{path}/{name}": Weight("embed_replicated", self) for name in names}

    def layer_weights(self, layer: Layer) -> dict[str, Weight]:
        """All weights of a layer by their paths in its tree."""
        found: dict[str, Weight] = {}
        for role, sublayer in layer.parts():
            key = sublayers.KEYS[role]
            found |= self.norm_weights(f"{key}_norm")
            found |= self.norm_weights(f"{key}_post") if self.post_norm else {}
            found |= {f"{key}/{path}": w for path, w in sublayer.weights.items()}
        return found

    @functools.cached_property
    def end_weights(self) -> dict[str, Weight]:
        """The weights of embedding and LM head by their paths in the tree of weights."""
        table = "vocab embed" if self.tied else "vocab_replicated embed_sharded"
        head = {} if self.tied else {"head/w": Weight("embed vocab", self)}
        return {"embed/w": Weight(table, self)} | self.norm_weights("head/norm") | head

    @functools.cached_property
    def mtp_weights(self) -> dict[str, Weight]:
        """The weights of multi-token prediction by their paths in the tree of weights."""
        if not self.mtp_layers:
            return {}
        norms = "mtp/input/embed_norm", "mtp/input/hidden_norm", "mtp/head_norm"
        found = {"mtp/input/projection/w": Weight("mtp_inputs embed_replicated -> embed", self)}
        for path in norms:
            found |= self.norm_weights(path)
        layer = self.layer_weights(self.mtp_layer)
        return found | {f"mtp/layer/{path}": w for path, w in layer.items()}

    def with_bf16_layers(self, first: int, last: int) -> "Model":
        """The model with its first and last layers not quantized."""
        return self._with_bf16_layers(first, last) if first + last else self

    @functools.lru_cache(64)  # noqa: B019  # a search asks of thousands of layouts
    def _with_bf16_layers(self, first, last):
        given = self.layer_groups or (LayerGroup(self.layers, (self.default_layer,)),)
        layers = [layer for g in given for layer in g.count * g.cycle]
        for i in (*range(first), *range(self.layers - last, self.layers)):
            layers[i] = dataclasses.replace(layers[i], quantized=False)
        return dataclasses.replace(self, layer_groups=group_layers(layers))

    def __post_init__(self):
        constraints = self.__dataclass_fields__["layer_groups"]
        groups = parse(
            "model.layer_groups", constraints.type, self.layer_groups, constraints.metadata
        )
        object.__setattr__(self, "layer_groups", groups)
        validate(self, "model.")
        self._check_layer_groups()
        if self.mtp_block:
            written = self.mtp_block.map(lambda s: sublayers.as_written(s, self))
            object.__setattr__(self, "mtp_block", written)
        if self.rope_head_dim and self.rope_fraction != 1:
            raise UserError(
                f"model.rope_fraction={self.rope_fraction}: latent attention rotates "
                f"model.rope_head_dim={self.rope_head_dim} dims of a head; leave rope_fraction out"
            )
        if self.rope_dims % 2 or (self.rope_fraction and not self.rope_dims):
            raise UserError(
                f"model.rope_fraction={self.rope_fraction} of model.head_dim={self.head_dim} must "
                "be an even number of dims, at least 2; rope_fraction=1.0 or 0.5 usually works, "
                "and 0 is attention without positions"
            )
        for mixer in filter(None, (layer.mixer for layer in self.all_layers)):
            if mixer.rope_dims not in (0, self.rope_dims):
                raise UserError(
                    f"RoPE rotates {mixer.rope_dims} dims of a head in a layer with "
                    f"{mixer.kind}, and {self.rope_dims} in the model (model.head_dim="
                    f"{self.head_dim}); all layers must have as many"
                )
        self._check_rope_scaling()

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
        """Leaves out layers after the first `layers`, and groups the layers anew, so that equal
        models have equal groups; a model whose layers are all default_layer has ()."""
        if not self.layer_groups:
            return
        layers = [layer for g in self.layer_groups for layer in g.count * g.cycle]
        if self.layers > len(layers):
            raise UserError(
                f"model.layers={self.layers} is more than the layers={len(layers)} of model."
                "layer_groups; give at most as many"
            )
        layers = layers[: self.layers]
        channels = [layer.channel for layer in layers if isinstance(layer.channel, Experts)]
        experts = max((c.experts or self.experts for c in channels), default=0)
        object.__setattr__(self, "experts", experts)
        written = functools.cache(lambda x: x.map(lambda s: sublayers.as_written(s, self)))
        groups = group_layers(list(map(written, layers)))
        alike = groups == (LayerGroup(self.layers, (self.default_layer,)),)
        object.__setattr__(self, "layer_groups", () if alike else groups)


def group_layers(layers: Sequence[Layer]) -> tuple[LayerGroup, ...]:
    """Groups consecutive layers: the cycle that covers most of the next layers, then the next; of
    equally long ones the shortest cycle. Layers that repeat nothing are groups of one."""
    groups, start = [], 0
    while start < len(layers):
        best, longest = LayerGroup(1, (layers[start],)), 1
        for period in range(1, (len(layers) - start) // 2 + 1):
            end = start + period
            while end < len(layers) and layers[end] == layers[end - period]:
                end += 1
            count = (end - start) // period
            if count > 1 and count * period > longest:
                best = LayerGroup(count, tuple(layers[start : start + period]))
                longest = count * period
            if end == len(layers):
                break  # a longer cycle covers no more
        groups.append(best)
        start += longest
    return tuple(groups)
