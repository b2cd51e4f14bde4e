"""The numbers of a transformer, checked.

The size fields of Model (embed, heads, ...) are also the names of logical axes: a weight is
declared by its axes alone, Model gives each axis its size, mesh.places.RULES its place.
"""

import dataclasses
import math
import re
from typing import NamedTuple

from maxbench.config.errors import UserError, divisors
from maxbench.config.validation import field, validate


class LayerGroup(NamedTuple):
    """Neighbouring layers with one kind of MLP, in a model whose layers differ."""

    layers: int
    mlp: int
    experts: int = 0  # 0 = one dense MLP


NAME = (re.compile(r"\w[\w.+-]*", re.ASCII).fullmatch, "letters, digits, and . + - _ between them")
KINDS = (
    lambda kinds: all(k.layers > 0 and k.mlp > 0 and k.experts >= 0 for k in kinds),
    "(layers, mlp, experts) of neighbours, at least (1, 1, 0), as ((1, 8192, 0), (7, 1024, 64))",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The numbers of a transformer. A family is its numbers: no code branches on its name."""

    name: str = field(check=NAME)
    size: str = field(check=NAME)
    layers: int = field(at_least=1)
    embed: int = field(at_least=1)
    heads: int = field(at_least=1)
    kv_heads: int = field(at_least=1)
    head_dim: int = field(at_least=1)  # heads x head_dim need not be embed
    mlp: int = field(at_least=1)
    vocab: int = field(at_least=1)
    value_dim: int = field(0, at_least=0)  # width of a value head; 0 = head_dim
    layer_groups: tuple[LayerGroup, ...] = field(
        (), check=KINDS
    )  # first to last, where layers differ
    act: str = field("swiglu", options=("swiglu", "geglu", "relu2"))
    # layernorm1p: its weight is stored minus one
    norm: str = field("rmsnorm", options=("rmsnorm", "layernorm1p"))
    norm_eps: float = field(1e-5, above=0)
    post_norm: bool = False  # a second norm after attention and after the MLP
    tied: bool = False  # the output head is the embedding table
    rope_base: float = field(10_000.0, above=0)
    rope_fraction: float = field(1.0, above=0, at_most=1)  # of head_dim that is rotated
    # Llama 3.1 scaling of the low frequencies; 1 = off
    rope_factor: float = field(1.0, above=0)
    rope_low: float = field(1.0, above=0)
    rope_high: float = field(4.0, above=0)
    rope_context: int = field(8192, at_least=1)
    softcap: float = field(0.0, at_least=0)  # attention logits are capped at this; 0 = off
    embed_multiplier: float = field(1.0, above=0)
    output_multiplier: float = field(1.0, above=0)
    init_std: float = field(0.02, at_least=0)
    experts: int = field(0, at_least=0)  # 0 = one dense MLP; the most that a kind has
    top_k: int = field(2, at_least=1)
    # softmax_topk: softmax over all, then top-k
    router: str = field("topk_softmax", options=("topk_softmax", "softmax_topk"))
    capacity_factor: float = field(1.0, at_least=0)  # 0 = no token is ever dropped
    # What an expert has no slot for: its least probable tokens, or the last.
    drop_policy: str = field("probs", options=("probs", "position"))
    aux_loss: float = field(0.0, at_least=0)  # weight of the load-balancing loss

    # Axes that are not fields of their own: fused projections, and the widths of small weights.
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
        """A KV group in the fused projection, where values have a width of their own."""
        return (self.heads // self.kv_heads + 1) * self.head_dim + self.value_width

    @property
    def gates(self) -> int:
        """Up-projections of the MLP: 2 when gated."""
        return 2 if self.act.endswith("glu") else 1

    # Sizes by another name, for axes of weights that are split otherwise (mesh.places.RULES): of an
    # embedding table that is no head, and of what every GPU holds whole, norms and the router.
    words = property(lambda self: self.vocab)
    columns = stage_columns = property(lambda self: self.embed)
    width = property(lambda self: self.embed)
    routes = property(lambda self: self.experts)

    @property
    def stacks(self) -> tuple[tuple[int, "Model"], ...]:
        """Runs of equal neighbours: how many layers, and the Model that each is a layer of."""
        one = lambda k: dataclasses.replace(self, layer_groups=(), mlp=k.mlp, experts=k.experts)
        return tuple((k.layers, one(k)) for k in self.layer_groups) or ((self.layers, self),)

    def capacity(self, tokens: int) -> int:
        """Slots of one expert for one GPU's tokens, where capacity_factor is not 0."""
        return min(tokens, math.ceil(self.capacity_factor * tokens * self.top_k / self.experts))

    def rows(self, ep: int) -> float:
        """Rows of the MLP's products that there is room for, for each token of a GPU."""
        if not self.experts:
            return 1
        return self.capacity_factor * self.top_k or min(self.top_k * ep, self.experts)

    def __post_init__(self):
        validate(self, "model.")
        self._merge_kinds()
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

    def _merge_kinds(self) -> None:
        """Makes one of equal neighbours; a model of one kind has none."""
        merged: list[LayerGroup] = []
        for kind in self.layer_groups:
            if merged and merged[-1][1:] == kind[1:]:
                kind = kind._replace(layers=merged.pop().layers + kind.layers)
            merged.append(kind)
        object.__setattr__(self, "layer_groups", tuple(merged) if len(merged) > 1 else ())
        if not merged:
            return
        layers, experts = sum(k.layers for k in merged), max(k.experts for k in merged)
        for name, found in (("layers", layers), ("experts", experts)):
            if getattr(self, name) != found:
                raise UserError(
                    f"model.{name}={getattr(self, name)} and model.layer_groups={tuple(merged)} differ: "
                    f"the kinds make {name}={found}"
                )
        if len(merged) == 1:
            object.__setattr__(self, "mlp", merged[0].mlp)
