"""The dimensions and options of a transformer, checked.

Size fields of Model (embed, heads, ...) are also names of logical axes: a weight is declared by its
axes, Model has the size of each axis, sharding.rules.RULES its mesh axes.
"""

import dataclasses
import math
import re
from typing import NamedTuple

from maxbench.config.errors import UserError, divisors
from maxbench.config.validation import field, validate


class LayerGroup(NamedTuple):
    """Consecutive layers with the same kind of MLP, in a model whose layers differ."""

    layers: int
    mlp: int
    experts: int = 0  # 0 = one dense MLP


NAME = (re.compile(r"\w[\w.+-]*", re.ASCII).fullmatch, "letters, digits, and . + - _ between them")
LAYER_GROUPS = (
    lambda groups: all(g.layers > 0 and g.mlp > 0 and g.experts >= 0 for g in groups),
    "(layers, mlp, experts) of consecutive layers, at least (1, 1, 0), "
    "as ((1, 8192, 0), (7, 1024, 64))",
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
    # first to last; () if all layers are equal
    layer_groups: tuple[LayerGroup, ...] = field((), check=LAYER_GROUPS)
    act: str = field("swiglu", options=("swiglu", "geglu", "relu2"))
    # layernorm1p: its weight is stored minus one
    norm: str = field("rmsnorm", options=("rmsnorm", "layernorm1p"))
    norm_eps: float = field(1e-5, above=0)
    post_norm: bool = False  # a second norm after attention and after the MLP
    tied: bool = False  # the LM head is the embedding table
    rope_base: float = field(10_000.0, above=0)
    rope_fraction: float = field(1.0, above=0, at_most=1)  # of head_dim that is rotated
    # Llama 3.1 scaling of the low frequencies; 1 = off
    rope_factor: float = field(1.0, above=0)
    rope_low: float = field(1.0, above=0)
    rope_high: float = field(4.0, above=0)
    rope_context: int = field(8192, at_least=1)
    softcap: float = field(0.0, at_least=0)  # cap of attention logits; 0 = off
    embed_multiplier: float = field(1.0, above=0)
    output_multiplier: float = field(1.0, above=0)
    init_std: float = field(0.02, at_least=0)
    experts: int = field(0, at_least=0)  # 0 = one dense MLP; with layer groups, their maximum
    top_k: int = field(2, at_least=1)
    # softmax_topk: softmax over all experts, then top-k; topk_softmax: the reverse
    router: str = field("topk_softmax", options=("topk_softmax", "softmax_topk"))
    capacity_factor: float = field(1.0, at_least=0)  # 0 = dropless
    # tokens that an expert drops beyond its capacity: the least probable, or the last
    drop_policy: str = field("probs", options=("probs", "position"))
    aux_loss: float = field(0.0, at_least=0)  # coefficient of the load-balancing loss

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
    def mlp_inputs(self) -> int:
        """Up-projections of the MLP: 2 if gated."""
        return 2 if self.act.endswith("glu") else 1

    # The same sizes under other names, for weights with another sharding (sharding.rules.RULES).
    # An untied embedding table:
    vocab_replicated = property(lambda self: self.vocab)
    embed_sharded = embed_sharded_pp = property(lambda self: self.embed)
    # Norms and the router:
    embed_replicated = property(lambda self: self.embed)
    experts_replicated = property(lambda self: self.experts)

    @property
    def stacks(self) -> tuple[tuple[int, "Model"], ...]:
        """Each layer group as its number of layers and the Model of one of them."""
        groups = ((g.layers, {"mlp": g.mlp, "experts": g.experts}) for g in self.layer_groups)
        same = lambda sizes: dataclasses.replace(self, layer_groups=(), **sizes)
        return tuple((layers, same(sizes)) for layers, sizes in groups) or ((self.layers, self),)

    def capacity(self, tokens: int) -> int:
        """Slots of one expert for the tokens of one GPU; capacity_factor must not be 0."""
        return min(tokens, math.ceil(self.capacity_factor * tokens * self.top_k / self.experts))

    def rows(self, ep: int) -> float:
        """Rows of the MLP's GEMMs that memory is reserved for, per token of a GPU."""
        if not self.experts:
            return 1
        return self.capacity_factor * self.top_k or min(self.top_k * ep, self.experts)

    def __post_init__(self):
        validate(self, "model.")
        self._merge_layer_groups()
        if self.heads % self.kv_heads:
            raise UserError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}; "
                f"kv_heads that work: {divisors(self.heads)}"
            )
        if (dims := int(self.head_dim * self.rope_fraction)) % 2 or not dims:
            raise UserError(
                f"model.rope_fraction={self.rope_fraction} of model.head_dim={self.head_dim} must "
                "be an even number of dims, at least 2; rope_fraction=1.0 or 0.5 usually works"
            )
        if self.rope_factor != 1 and self.rope_low >= self.rope_high:
            raise UserError(
                f"model.rope_low={self.rope_low} must be below model.rope_high={self.rope_high}"
            )
        if 0 < self.experts < self.top_k:
            raise UserError(f"model.top_k={self.top_k} must be at most experts={self.experts}")

    def _merge_layer_groups(self) -> None:
        """Merges equal neighbours and checks the totals; a model of one group has () instead."""
        merged: list[LayerGroup] = []
        for group in self.layer_groups:
            if merged and merged[-1][1:] == group[1:]:
                group = group._replace(layers=merged.pop().layers + group.layers)
            merged.append(group)
        object.__setattr__(self, "layer_groups", tuple(merged) if len(merged) > 1 else ())
        if not merged:
            return
        layers, experts = sum(g.layers for g in merged), max(g.experts for g in merged)
        for name, total in (("layers", layers), ("experts", experts)):
            if getattr(self, name) != total:
                raise UserError(
                    f"model.{name}={getattr(self, name)} differs from the {name}={total} of "
                    f"model.layer_groups={tuple(map(tuple, merged))}; give the same in both"
                )
        if len(merged) == 1:
            object.__setattr__(self, "mlp", merged[0].mlp)
