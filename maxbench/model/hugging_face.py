"""Conversion of weights from and to Hugging Face's formats: Llama, Nemotron, and Grok-1.

A dict from Hugging Face's tensor names to numpy arrays (safetensors.numpy.load_file, merged over
files) becomes the tree of weights of transformer.Transformer and of training, and back, bit for
bit. Grok-1's names are those of hpcai-tech/grok-1, which vLLM and SGLang read too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from maxbench.config.errors import UserError
from maxbench.config.model import Model
from maxbench.model import transformer


def from_hugging_face(m: Model, tensors: Mapping[str, np.ndarray], dtype: Any = np.float32) -> dict:
    """Converts Hugging Face's tensors of a model to the tree of weights, numpy arrays of one dtype.

    Raises:
      UserError: the model has no supported Hugging Face format; a tensor is missing, unexpected, or
        has another shape.
    """
    shapes = jax.eval_shape(lambda key: nn.unbox(transformer.init(m, key)), jax.random.key(0))
    params = jax.tree.map(lambda x: np.empty(x.shape, dtype), shapes)
    unused = dict(tensors)
    for name, view, shape in _tensors(m, params):
        if name not in unused:
            raise UserError(f"{name} is missing: {m.name} {m.size} needs it, with shape {shape}")
        tensor = unused.pop(name)
        if tensor.shape != shape:
            raise UserError(f"{name} has shape {tensor.shape}, and {m.name} {m.size} needs {shape}")
        view[...] = tensor.reshape(view.shape)
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
    return {name: view.reshape(shape) for name, view, shape in _tensors(m, params)}


def _tensors(m: Model, params) -> Iterator[tuple[str, np.ndarray, tuple[int, ...]]]:
    """Yields each tensor's name, a view of params with Hugging Face's order of dims, and its shape
    in Hugging Face's format. Writing to a view writes to params.
    """
    if m.layer_groups or m.value_width != m.head_dim or bool(m.experts) != m.post_norm:
        raise UserError(
            f"{m.name} {m.size} has no supported Hugging Face format: supported are dense models "
            "(Llama, Nemotron), and Grok-1's experts with norms after attention and MLP (preset "
            "xai); keys and values must have one width, and all layers one kind"
        )
    yield "model.embed_tokens.weight", params["embed"]["w"], (m.vocab, m.embed)
    for i in range(m.layers):
        w = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        yield from _layer(m, f"model.layers.{i}", w)
    yield from _norm(m, "model.norm", params["head"]["norm"])
    if not m.tied:
        yield "lm_head.weight", params["head"]["w"].T, (m.vocab, m.embed)


def _layer(m: Model, prefix: str, w):
    names = GROK if m.experts else LLAMA
    for norm, hf_norm in names["norms"].items():
        yield from _norm(m, f"{prefix}.{hf_norm}", w[norm])
    attn, qkv = f"{prefix}.{names['attn']}", w["attn"]["qkv"]["w"].transpose(1, 2, 3, 0)
    for name, heads in (("q", qkv[:, :-2]), ("k", qkv[:, -2]), ("v", qkv[:, -1])):
        width = heads.size // m.embed
        yield f"{attn}.{name}_proj.weight", heads, (width, m.embed)
    out = w["attn"]["out"]["w"].transpose(2, 0, 1)
    yield f"{attn}.o_proj.weight", out, (m.embed, m.heads * m.head_dim)
    if not m.experts:
        up, down = w["mlp"]["up"]["w"], w["mlp"]["down"]["w"]
        yield from _mlp(m, f"{prefix}.mlp", names["mlp"], up, down)
        return
    yield f"{prefix}.moe_block.gate.weight", w["mlp"]["router"]["w"].T, (m.experts, m.embed)
    for e, (up, down) in enumerate(zip(w["mlp"]["up"], w["mlp"]["down"], strict=True)):
        yield from _mlp(m, f"{prefix}.moe_block.experts.{e}", names["mlp"], up, down)


def _mlp(m: Model, prefix: str, names, up_dnf, down_fd):
    gate, up, down = names
    for i, name in enumerate((gate, up)[-m.mlp_inputs :]):
        yield f"{prefix}.{name}.weight", up_dnf[:, i].T, (m.mlp, m.embed)
    yield f"{prefix}.{down}.weight", down_fd.T, (m.embed, m.mlp)


def _norm(m: Model, prefix: str, w):
    yield f"{prefix}.{'scale' if m.experts else 'weight'}", w["scale"], (m.embed,)
    if m.norm == "layernorm1p":
        yield f"{prefix}.bias", w["bias"], (m.embed,)


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


def rope_order(m: Model, width: int, interleaved: bool = True) -> np.ndarray:
    """Indices that reorder the last dims of a projection from Hugging Face's RoPE to ours.

    DeepSeek-V3's RoPE rotates dims (2 i, 2 i + 1) of the last rope_head_dim ones, layers.rotate()
    dims (i, i + rope_head_dim / 2): ours = theirs[..., order], theirs = ours[..., argsort(order)].

    Args:
      width: of the dim to reorder: head_dim of queries, Model.latents of the down-projection.
      interleaved: `rope_interleave` of config.json; without it both orders are the same.
    """
    plain, rotated = np.arange(width - m.rope_head_dim), np.arange(width - m.rope_head_dim, width)
    pairs = [rotated[0::2], rotated[1::2]] if interleaved else [rotated]
    return np.concatenate([plain, *pairs])
