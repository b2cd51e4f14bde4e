"""Kinds of mixers: grouped-query attention, latent attention and Mamba-2. Needs no jax."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from maxbench.config.errors import UserError, divisors
from maxbench.config.number_formats import FORMATS
from maxbench.config.sublayers import Saved, Sublayer, register, unset

if TYPE_CHECKING:
    from maxbench.config.run import Run

TOY_WINDOW = 16  # tokens


@register("attention")
class Attention(Sublayer):
    """Grouped-query attention with one fused QKV projection (layers.Attention)."""

    heads: int = unset()
    kv_heads: int = unset()
    head_dim: int = unset()
    value_dim: int = unset()
    window: int = unset()
    softcap: float = unset()
    attention_bias: bool = unset()
    sinks: bool = unset()
    qk_norm: bool = unset()
    rope_fraction: float = unset()
    logit_factor: float = unset()

    role = "mixer"
    axes: ClassVar = {
        "heads": ("tp",),
        "kv_heads": ("tp",),
        "qkv": (),
        "head_dim": (),
        "value_width": (),
        "group_width": (),
    }
    module = "maxbench.model.layers:Attention"
    hugging_face = "maxbench.model.hugging_face:attention"
    masks_documents = True

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
    def fused(self) -> dict[str, tuple[int, ...]]:
        queries = self.heads // self.kv_heads
        widths = queries * self.head_dim, self.head_dim, self.value_width
        return {"qkv": (queries, 1, 1), "group_width": widths}

    @property
    def rope_dims(self) -> int:
        return int(self.head_dim * self.rope_fraction)

    @property
    def logit_scale(self) -> float:
        """Factor of the products of queries and keys."""
        return self.logit_factor / math.sqrt(self.head_dim)

    def weight_axes(self) -> dict[str, str]:
        equal = self.value_width == self.head_dim
        outs = "kv_heads " + ("qkv head_dim" if equal else "group_width")
        found = {"qkv/w": f"embed -> {outs}", "out/w": "heads value_width -> embed"}
        found |= {"qkv/bias": outs, "out/bias": "embed_replicated"} if self.attention_bias else {}
        found |= dict.fromkeys(("q_norm/scale", "k_norm/scale"), "head_dim") if self.qk_norm else {}
        return found | ({"sinks": "heads"} if self.sinks else {})

    def scores(self, seq: int, causal: bool = True, windows: bool = True) -> float:
        keys = seq / 2 if causal else seq
        if windows and 0 < self.window < seq:
            keys = self.window - self.window * (self.window - 1) / (2 * seq)
        return self.heads * (self.head_dim + self.value_width) * keys

    def saved(self, run: "Run") -> tuple[Saved, ...]:
        return self._saved(run, self.head_dim, query="qkv/w", key="qkv/w")

    def _saved(self, run: "Run", key_dims: int, query: str, key: str) -> tuple[Saved, ...]:
        """saved(); `query` and `key` are the weights of the projections of queries, and of keys and
        values."""
        a, seq = run.layout, run.train.seq
        # With context parallelism also keys and values of another GPU, or those within a window of
        # this GPU's two chunks.
        window = min(self.window or seq, seq)
        received = min(1, 2 * a.cp * window / seq) * (a.cp > 1)
        log_sum_exp = 4 / FORMATS[run.format.compute].bytes  # fp32
        values = (1 + received) * self.kv_heads * self.value_width
        return (
            Saved("query", self.heads * self.head_dim, (query,)),
            Saved("key", self.kv_heads * (key_dims + received * self.head_dim), (key,)),
            Saved("value", values, (key,)),
            Saved("context", self.heads * (self.value_width + log_sum_exp), ("scores",)),
            Saved("attn_out", self.embed, ("out/w",)),
        )

    @property
    def zeros_stay(self) -> bool:
        return not self.attention_bias

    def setting(self, axis: str) -> str:
        values = "model.value_dim" if self.value_dim else "model.head_dim"
        named = {"value_width": values, "group_width": "model.head_dim"}
        return named.get(axis) or super().setting(axis)

    def check(self) -> None:
        if self.heads % self.kv_heads:
            raise UserError(
                f"model.heads={self.heads} is not a multiple of model.kv_heads={self.kv_heads}; "
                f"kv_heads that work: {divisors(self.heads)}"
            )

    def refusal(self, run: "Run") -> str:
        """Over cp, a window reaches into the chunk before a query's own, and no further."""
        a, seq, window = run.layout, run.train.seq, self.window
        most = seq // (2 * a.cp) + 1
        if a.cp == 1 or not most < window < seq:
            return ""
        fits = max(seq // (2 * (window - 1)), 1)
        return (
            f"model.window={window} reaches over more than the 1 / (2 x cp={a.cp}) of "
            f"train.seq={seq} before a query's own, {most - 1} tokens: use a cp of at most {fits}, "
            f"or a window of at most {most} or at least {seq}"
        )

    def toy(self, model: Mapping[str, Any], has_dense: bool) -> "Sublayer":
        window = self.window and min(self.window, TOY_WINDOW)
        return dataclasses.replace(self, window=window)


@register("latent_attention")
class LatentAttention(Attention):
    """Multi-head latent attention, arXiv:2405.04434 (layers.LatentAttention)."""

    q_rank: int = unset()
    kv_rank: int = unset()
    rope_head_dim: int = unset()

    axes: ClassVar = {
        "q_rank": ("fsdp",),
        "kv_rank": ("fsdp",),
        "heads": ("tp",),
        "head_dim": (),
        "value_width": (),
        "latents": (),
        "kv_up_width": (),
        "q_rank_replicated": (),
        "kv_rank_replicated": (),
    }
    module = "maxbench.model.layers:LatentAttention"
    hugging_face = "maxbench.model.hugging_face:latent_attention"
    first_rows_are_split = True

    q_rank_replicated = property(lambda self: self.q_rank)
    kv_rank_replicated = property(lambda self: self.kv_rank)

    @property
    def rope_dims(self) -> int:
        return self.rope_head_dim

    @property
    def latents(self) -> int:
        """Width of the down-projection: both latents and the shared key."""
        return self.q_rank + self.kv_rank + self.rope_head_dim

    @property
    def fused(self) -> dict[str, tuple[int, ...]]:
        return {"latents": (self.q_rank, self.kv_rank + self.rope_head_dim)}

    @property
    def kv_up_width(self) -> int:
        """Width per head of the up-projection of keys and values."""
        return self.head_dim - self.rope_head_dim + self.value_width

    def weight_axes(self) -> dict[str, str]:
        found = {
            "qkv/w": "embed -> latents",
            "q_norm/scale": "q_rank_replicated",
            "kv_norm/scale": "kv_rank_replicated",
            "q_up/w": "q_rank -> heads head_dim",
            "kv_up/w": "kv_rank -> heads kv_up_width",
            "out/w": "heads value_width -> embed",
        }
        if self.attention_bias:
            found |= {"qkv/bias": "latents", "out/bias": "embed_replicated"}
        return found | ({"sinks": "heads"} if self.sinks else {})

    def saved(self, run: "Run") -> tuple[Saved, ...]:
        key_dims = self.head_dim - self.rope_head_dim  # the others are in the latents
        latent = Saved("latent", self.latents, ("qkv/w",))
        return latent, *self._saved(run, key_dims, query="q_up/w", key="kv_up/w")

    def setting(self, axis: str) -> str:
        named = {"latents": "model.rope_head_dim", "kv_up_width": "model.head_dim"}
        return named.get(axis) or super().setting(axis)

    def check(self) -> None:
        names = ("q_rank", "kv_rank", "rope_head_dim")
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


@register("mamba2")
class Mamba2(Sublayer):
    """Mamba-2, arXiv:2405.21060: a state-space model in chunks (model/mamba.py).

    One projection, grouped so that tp can split it, has the inputs of each group of heads: a gate z
    and x of each head, B and C of the group, and a time step of each head. A causal depthwise
    convolution mixes x, B and C along the sequence.
    """

    ssm_heads: int = unset()
    ssm_head_dim: int = unset()
    ssm_groups: int = unset()
    ssm_state: int = unset()
    ssm_conv: int = unset()
    ssm_chunk: int = unset()

    role = "mixer"
    axes: ClassVar = {
        "ssm_heads": ("tp",),
        "ssm_groups": ("tp",),
        "ssm_inputs": (),
        "ssm_conv": (),
        "ssm_conv_width": (),
        "ssm_inner": (),
    }
    settings: ClassVar = {
        "ssm_inputs": "ssm_state",
        "ssm_conv_width": "ssm_state",
        "ssm_inner": "ssm_head_dim",
    }
    module = "maxbench.model.mamba:Mamba2"
    hugging_face = "maxbench.model.hugging_face:mamba2"
    zeros_stay = True

    @property
    def ssm_inner(self) -> int:
        """Width of the heads of a group."""
        return self.ssm_heads // self.ssm_groups * self.ssm_head_dim

    @property
    def ssm_conv_width(self) -> int:
        """Width of x, B and C of a group."""
        return self.ssm_inner + 2 * self.ssm_state

    @property
    def fused(self) -> dict[str, tuple[int, ...]]:
        inner, state = self.ssm_inner, self.ssm_state
        return {"ssm_inputs": (inner, inner, state, state, self.ssm_heads // self.ssm_groups)}

    @property
    def ssm_inputs(self) -> int:
        """Width of the first projection per group: z, x, B, C, and the heads' time steps."""
        return self.ssm_inner + self.ssm_conv_width + self.ssm_heads // self.ssm_groups

    def weight_axes(self) -> dict[str, str]:
        return {
            "in/w": "embed -> ssm_groups ssm_inputs",
            "conv": "ssm_conv ssm_groups ssm_conv_width",
            "conv_bias": "ssm_groups ssm_conv_width",
            "dt_bias": "ssm_heads",
            "a_log": "ssm_heads",
            "skip_scale": "ssm_heads",
            "norm_scale": "ssm_groups ssm_inner",
            "out/w": "ssm_groups ssm_inner -> embed",
        }

    def scores(self, seq: int, causal: bool = True, windows: bool = True) -> float:
        """The four products of the chunked algorithm (arXiv:2405.21060, section 6 and listing 1).

        With chunks of Q tokens, G groups, H heads of width P and a state of width N, per token:
        C B^T in a chunk, Q G N; its masked product with x, Q H P; the state of a chunk, H P N; the
        output of the state before it, H P N. A causal mask keeps half of the first two. A sequence
        of one chunk has no states. The recurrence from chunk to chunk, H P N / Q, is not counted.
        """
        chunk, width = min(self.ssm_chunk, seq), self.ssm_heads * self.ssm_head_dim
        pairs = chunk / 2 if causal else chunk
        states = 2 * width * self.ssm_state if seq > chunk else 0
        return pairs * (self.ssm_groups * self.ssm_state + width) + states

    def saved(self, run: "Run") -> tuple[Saved, ...]:
        return (
            Saved("query", self.ssm_groups * self.ssm_inputs, ("in/w",)),
            Saved("context", self.ssm_groups * self.ssm_inner, ("scores",)),
            Saved("attn_out", self.embed, ("out/w",)),
        )

    @property
    def activated(self) -> float:
        """Elements for which kernels move as many as an MLP's for its own: about three times the
        inputs, the masked products in chunks, and the states at their ends, fp32."""
        width = self.ssm_heads * self.ssm_head_dim
        products = self.ssm_heads * self.ssm_chunk
        states = 2 * width * self.ssm_state / self.ssm_chunk
        return 3 * (self.ssm_groups * self.ssm_inputs + products + states)

    def reserved(self, ep: int) -> float:
        return self.ssm_groups * self.ssm_inputs

    def kept_if_unrolled(self, run: "Run") -> float:
        """Without recomputation: x of the convolution, x with the decays, states and outputs."""
        width = self.ssm_groups * self.ssm_inner / run.layout.tp
        return 4 * FORMATS[run.format.compute].bytes * width * (run.train.remat == "none")

    def check(self) -> None:
        if not self.ssm_heads or self.ssm_heads % self.ssm_groups:
            raise UserError(
                f"model.ssm_heads={self.ssm_heads} must be a multiple of model.ssm_groups="
                f"{self.ssm_groups}, above 0: a group of heads shares B and C"
            )

    def refusal(self, run: "Run") -> str:
        cp = run.layout.cp
        why = f"cp={cp} cuts the sequence, along which Mamba-2's states run; use cp=1, and tp"
        return why if cp > 1 else ""
