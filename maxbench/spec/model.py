"""The numbers of a transformer, checked.

The size fields of Model (embed, heads, ...) are also the names of logical axes: a weight is
declared by its axes alone, Model gives each axis its size, mesh.places.RULES its place.
"""

import dataclasses
import math
from typing import NamedTuple

from maxbench.spec.errors import UserError, divisors, judge, setting


class Kind(NamedTuple):
    """Neighbouring layers with one kind of MLP, in a model whose layers differ."""

    layers: int
    mlp: int
    experts: int = 0  # 0 = one dense MLP


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The numbers of a transformer. A family is its numbers: no code branches on its name."""

    name: str
    size: str
    layers: int = setting(at_least=1)
    embed: int = setting(at_least=1)
    heads: int = setting(at_least=1)
    kv_heads: int = setting(at_least=1)
    head_dim: int = setting(at_least=1)  # heads x head_dim need not be embed
    mlp: int = setting(at_least=1)
    vocab: int = setting(at_least=1)
    value_dim: int = setting(0, at_least=0)  # width of a value head; 0 = head_dim
    kinds: tuple[Kind, ...] = ()  # of layers, first to last, where mlp or experts differ
    act: str = setting("swiglu", options=("swiglu", "geglu", "relu2"))
    # layernorm1p: its weight is stored minus one
    norm: str = setting("rmsnorm", options=("rmsnorm", "layernorm1p"))
    norm_eps: float = 1e-5
    post_norm: bool = False  # a second norm after attention and after the MLP
    tied: bool = False  # the output head is the embedding table
    rope_base: float = 10_000.0
    rope_fraction: float = 1.0  # of head_dim that is rotated
    rope_factor: float = 1.0  # Llama 3.1 scaling of the low frequencies; 1 = off
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_context: int = 8192
    softcap: float = 0.0  # attention logits are capped at this; 0 = off
    embed_multiplier: float = 1.0
    output_multiplier: float = 1.0
    init_std: float = 0.02
    experts: int = setting(0, at_least=0)  # 0 = one dense MLP; the most that a kind has
    top_k: int = 2
    # softmax_topk: softmax over all, then top-k
    router: str = setting("topk_softmax", options=("topk_softmax", "softmax_topk"))
    capacity_factor: float = setting(1.0, at_least=0)  # 0 = no token is ever dropped
    # What an expert has no slot for: its least probable tokens, or the last.
    drop: str = setting("probs", options=("probs", "position"))
    aux_loss: float = 0.0  # weight of the load-balancing loss

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

    @property
    def width(self) -> int:
        """`embed` of a weight too small to split (norms, router)."""
        return self.embed

    @property
    def routes(self) -> int:
        """`experts` as outputs of the router, which every GPU holds whole."""
        return self.experts

    @property
    def stacks(self) -> tuple[tuple[int, "Model"], ...]:
        """Runs of equal neighbours: how many layers, and the Model that each is a layer of."""
        one = lambda k: dataclasses.replace(self, kinds=(), mlp=k.mlp, experts=k.experts)
        return tuple((k.layers, one(k)) for k in self.kinds) or ((self.layers, self),)

    def capacity(self, tokens: int) -> int:
        """Slots of one expert for one GPU's tokens, where capacity_factor is not 0."""
        return min(tokens, math.ceil(self.capacity_factor * tokens * self.top_k / self.experts))

    def rows(self, ep: int) -> float:
        """Rows of the MLP's products that there is room for, for each token of a GPU."""
        if not self.experts:
            return 1
        return self.capacity_factor * self.top_k or min(self.top_k * ep, self.experts)

    def __post_init__(self):
        judge(self, "model.")
        self._merge_kinds()
        if self.heads % self.kv_heads:
            raise UserError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}; "
                f"kv_heads that work: {divisors(self.heads)}"
            )
        if not 0 < self.rope_fraction <= 1 or int(self.head_dim * self.rope_fraction) % 2:
            raise UserError(
                f"model.rope_fraction={self.rope_fraction} of model.head_dim={self.head_dim} must "
                "be an even number of dims, at least 2; rope_fraction=1.0 or 0.5 usually works"
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise UserError(
                f"model.top_k={self.top_k} must lie between 1 and model.experts={self.experts}"
            )

    def _merge_kinds(self) -> None:
        """Makes one of equal neighbours; a model of one kind has none."""
        merged: list[Kind] = []
        for kind in (Kind(*k) for k in self.kinds):
            if kind.layers < 1 or kind.mlp < 1 or kind.experts < 0:
                raise UserError(f"model.kinds: {kind} has fewer layers, or a smaller MLP, than one")
            if merged and merged[-1][1:] == kind[1:]:
                kind = kind._replace(layers=merged.pop().layers + kind.layers)
            merged.append(kind)
        object.__setattr__(self, "kinds", tuple(merged) if len(merged) > 1 else ())
        if not merged:
            return
        layers, experts = sum(k.layers for k in merged), max(k.experts for k in merged)
        for field, found in (("layers", layers), ("experts", experts)):
            if getattr(self, field) != found:
                raise UserError(
                    f"model.{field}={getattr(self, field)} and model.kinds={tuple(merged)} differ: "
                    f"the kinds make {field}={found}"
                )
        if len(merged) == 1:
            object.__setattr__(self, "mlp", merged[0].mlp)
