"""Conversion of weights from and to Hugging Face's formats: Llama, Nemotron, and Grok-1.

A dict from Hugging Face's tensor names to numpy arrays (safetensors.numpy.load_file, merged over
files) becomes the tree of weights of transformer.Transformer and of training, and back, bit for
bit. Grok-1's names are those of hpcai-tech/grok-1, which vLLM and SGLang read too. Attention has the
parts of Qwen3, gpt-oss and DeepSeek-V3 too.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from maxbench.config.errors import UserError
from maxbench.config.model import Model
from maxbench.model import transformer


class Tensor(NamedTuple):
    """One tensor of Hugging Face's format.

    Attributes:
      view: of the tree of weights, with Hugging Face's order of dims: writing to it writes there.
      shape: in Hugging Face's format.
      rows: where it has the rows of `view`, if in another order.
    """

    name: str
    view: np.ndarray
    shape: tuple[int, ...]
    rows: np.ndarray | None = None


def from_hugging_face(m: Model, tensors: Mapping[str, np.ndarray], dtype: Any = np.float32) -> dict:
    """Converts Hugging Face's tensors of a model to the tree of weights, numpy arrays of one dtype.

    Raises:
      UserError: the model has no supported Hugging Face format; a tensor is missing, unexpected, or
        has another shape.
    """
    shapes = jax.eval_shape(lambda key: nn.unbox(transformer.init(m, key)), jax.random.key(0))
    params = jax.tree.map(lambda x: np.empty(x.shape, dtype), shapes)
    unused = dict(tensors)
    for name, view, shape, rows in _tensors(m, params):
        if name not in unused:
            raise UserError(f"{name} is missing: {m.name} {m.size} needs it, with shape {shape}")
        tensor = unused.pop(name)
        if tensor.shape != shape:
            raise UserError(f"{name} has shape {tensor.shape}, and {m.name} {m.size} needs {shape}")
        view[...] = (tensor if rows is None else tensor[rows]).reshape(view.shape)
    head = unused.pop("lm_head.weight", None) if m.tied else None
    if head is not None and not np.array_equal(head, tensors["model.embed_tokens.weight"]):
        raise UserError("lm_head.weight is not model.embed_tokens.weight; use model.tied=False")
    if unused:
        raise UserError(f"{', '.join(sorted(unused)[:3])}: {m.name} {m.size} has no such weight")
    return params


def to_hugging_face(m: Model, params: Mapping) -> dict[str, np.ndarray]:
    """Converts a tree of weights to Hugging Face's tensors by name; without lm_head if it is tied.

    Raises:
      UserError: the model has no supported Hugging Face format.
    """
    params = jax.tree.map(np.asarray, params)
    tensors = {}
    for name, view, shape, rows in _tensors(m, params):
        tensor = view.reshape(shape)
        tensors[name] = tensor if rows is None else tensor[np.argsort(rows)]
    return tensors


def _tensors(m: Model, params) -> Iterator[Tensor]:
    """Yields each tensor of a model, with views of params."""
    widths_differ = m.value_width != m.head_dim and not m.kv_rank
    if m.layer_groups or widths_differ or bool(m.experts) != m.post_norm:
        raise UserError(
            f"{m.name} {m.size} has no supported Hugging Face format: supported are dense models "
            "(Llama, Nemotron), and Grok-1's experts with norms after attention and MLP (preset "
            "xai); keys and values must have one width, and all layers one kind"
        )
    yield Tensor("model.embed_tokens.weight", params["embed"]["w"], (m.vocab, m.embed))
    for i in range(m.layers):
        w = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        yield from _layer(m, f"model.layers.{i}", w)
    yield from _norm(m, "model.norm", params["head"]["norm"])
    if not m.tied:
        yield Tensor("lm_head.weight", params["head"]["w"].T, (m.vocab, m.embed))


def _layer(m: Model, prefix: str, w):
    names = GROK if m.experts else LLAMA
    for norm, hf_norm in names["norms"].items():
        yield from _norm(m, f"{prefix}.{hf_norm}", w[norm])
    projections = _latent_projections if m.kv_rank else _projections
    yield from projections(m, f"{prefix}.{names['attn']}", w["attn"])
    yield from _attention_output(m, f"{prefix}.{names['attn']}", w["attn"])
    if not m.experts:
        up, down = w["mlp"]["up"]["w"], w["mlp"]["down"]["w"]
        yield from _mlp(m, f"{prefix}.mlp", names["mlp"], up, down)
        return
    router = w["mlp"]["router"]["w"].T
    yield Tensor(f"{prefix}.moe_block.gate.weight", router, (m.experts, m.embed))
    for e, (up, down) in enumerate(zip(w["mlp"]["up"], w["mlp"]["down"], strict=True)):
        yield from _mlp(m, f"{prefix}.moe_block.experts.{e}", names["mlp"], up, down)


def _projections(m: Model, prefix: str, w) -> Iterator[Tensor]:
    """The projections of grouped-query attention, and Qwen3's norms of queries and keys."""
    parts = lambda qkv: {"q": qkv[:, :-2], "k": qkv[:, -2], "v": qkv[:, -1]}
    for name, heads in parts(w["qkv"]["w"].transpose(1, 2, 3, 0)).items():
        shape = heads.size // m.embed, m.embed
        yield Tensor(f"{prefix}.{name}_proj.weight", heads, shape)
    if m.attention_bias:
        for name, bias in parts(w["qkv"]["bias"]).items():
            yield Tensor(f"{prefix}.{name}_proj.bias", bias, (bias.size,))
    if m.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield Tensor(f"{prefix}.{name}.weight", w[name]["scale"], (m.head_dim,))


def _latent_projections(m: Model, prefix: str, w) -> Iterator[Tensor]:
    """The projections of DeepSeek-V3's latent attention.

    Its RoPE rotates dims (2 i, 2 i + 1) of the last rope_head_dim ones (rope_interleave of
    config.json), and layers.rotate() dims (i, i + rope_head_dim / 2).
    """
    pairs = np.arange(m.rope_head_dim).reshape(-1, 2).T.ravel()
    plain, latents = m.head_dim - m.rope_head_dim, m.kv_rank + m.rope_head_dim
    head = np.concatenate([np.arange(plain), plain + pairs])
    q_rows = (np.arange(m.heads)[:, None] * m.head_dim + head).ravel()
    kv_rows = np.concatenate([np.arange(m.kv_rank), m.kv_rank + pairs])
    down, bias = w["qkv"]["w"].T, w["qkv"].get("bias")
    yield Tensor(f"{prefix}.q_a_proj.weight", down[: m.q_rank], (m.q_rank, m.embed))
    kv_down, kv_name = down[m.q_rank :], f"{prefix}.kv_a_proj_with_mqa"
    yield Tensor(f"{kv_name}.weight", kv_down, (latents, m.embed), kv_rows)
    if bias is not None:
        yield Tensor(f"{prefix}.q_a_proj.bias", bias[: m.q_rank], (m.q_rank,))
        yield Tensor(f"{kv_name}.bias", bias[m.q_rank :], (latents,), kv_rows)
    yield Tensor(f"{prefix}.q_a_layernorm.weight", w["q_norm"]["scale"], (m.q_rank,))
    yield Tensor(f"{prefix}.kv_a_layernorm.weight", w["kv_norm"]["scale"], (m.kv_rank,))
    q_up, kv_up = (w[name]["w"].transpose(1, 2, 0) for name in ("q_up", "kv_up"))
    yield Tensor(f"{prefix}.q_b_proj.weight", q_up, (m.heads * m.head_dim, m.q_rank), q_rows)
    yield Tensor(f"{prefix}.kv_b_proj.weight", kv_up, (m.heads * m.kv_up_width, m.kv_rank))


def _attention_output(m: Model, prefix: str, w) -> Iterator[Tensor]:
    """The output projection, and gpt-oss's sinks."""
    out = w["out"]["w"].transpose(2, 0, 1)
    yield Tensor(f"{prefix}.o_proj.weight", out, (m.embed, m.heads * m.value_width))
    if m.attention_bias:
        yield Tensor(f"{prefix}.o_proj.bias", w["out"]["bias"], (m.embed,))
    if m.sinks:
        yield Tensor(f"{prefix}.sinks", w["sinks"], (m.heads,))


def _mlp(m: Model, prefix: str, names, up_dnf, down_fd):
    gate, up, down = names
    for i, name in enumerate((gate, up)[-m.mlp_inputs :]):
        yield Tensor(f"{prefix}.{name}.weight", up_dnf[:, i].T, (m.mlp, m.embed))
    yield Tensor(f"{prefix}.{down}.weight", down_fd.T, (m.embed, m.mlp))


def _norm(m: Model, prefix: str, w):
    yield Tensor(f"{prefix}.{'scale' if m.experts else 'weight'}", w["scale"], (m.embed,))
    if m.norm == "layernorm1p":
        yield Tensor(f"{prefix}.bias", w["bias"], (m.embed,))


LLAMA: dict[str, Any] = {
    "attn": "self_attn",
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "norms": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
}
_GROK_NORMS = {"attn_norm": "pre_attn_norm", "attn_post": "post_attn_norm"}
_GROK_NORMS |= {"mlp_norm": "pre_moe_norm", "mlp_post": "post_moe_norm"}
GROK: dict[str, Any] = {
    "attn": "attn",
    "mlp": ("linear", "linear_v", "linear_1"),
    "norms": _GROK_NORMS,
}
