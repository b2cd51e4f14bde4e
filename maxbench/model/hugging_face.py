"""Weights of Hugging Face's models in and out: Llama, Nemotron, and the port of Grok-1.

A dict from Hugging Face's names to numpy arrays (what safetensors.numpy.load_file gives, joined
over files) becomes the tree of weights that network.Transformer and training use, and back, bit by
bit.

The names of Grok-1 are those of hpcai-tech/grok-1, which vLLM and SGLang read too.
"""

from collections.abc import Iterator, Mapping

import flax.linen as nn
import jax
import numpy as np

from maxbench.config.errors import UserError
from maxbench.config.model import Model
from maxbench.model import transformer


def from_hugging_face(m: Model, tensors: Mapping[str, np.ndarray], dtype=np.float32) -> dict:
    """Hugging Face's weights of a model as our tree, numpy arrays of one dtype.

    Raises:
      UserError: the model has no Hugging Face form here; a tensor is missing, unknown to the model,
        or of another shape.
    """
    shapes = jax.eval_shape(lambda key: nn.unbox(transformer.init(m, key)), jax.random.key(0))
    params = jax.tree.map(lambda x: np.empty(x.shape, dtype), shapes)
    left = dict(tensors)
    for name, part, shape in _tensors(m, params):
        if name not in left:
            raise UserError(f"{name} is missing: {m.name} {m.size} needs it, with shape {shape}")
        found = left.pop(name)
        if found.shape != shape:
            raise UserError(f"{name} has shape {found.shape}, and {m.name} {m.size} needs {shape}")
        part[...] = found.reshape(part.shape)
    head = left.pop("lm_head.weight", None) if m.tied else None
    if head is not None and not np.array_equal(head, tensors["model.embed_tokens.weight"]):
        raise UserError("lm_head.weight is not model.embed_tokens.weight; use model.tied=False")
    if left:
        raise UserError(f"{', '.join(sorted(left)[:3])}: {m.name} {m.size} has no such weight")
    return params


def to_hugging_face(m: Model, params: Mapping) -> dict[str, np.ndarray]:
    """Our tree of weights under Hugging Face's names; no head where it is tied.

    Raises:
      UserError: the model has no Hugging Face form here.
    """
    params = jax.tree.map(np.asarray, params)
    return {name: part.reshape(shape) for name, part, shape in _tensors(m, params)}


def _tensors(m: Model, params) -> Iterator[tuple[str, np.ndarray, tuple[int, ...]]]:
    """Every tensor: its name, the part of our arrays that it is, and the shape it has there.

    Parts are views, of Hugging Face's order of dims: what is written to them is in the tree.
    """
    if m.layer_groups or m.value_width != m.head_dim or bool(m.experts) != m.post_norm:
        raise UserError(
            f"{m.name} {m.size} has no Hugging Face form here: Llama and Nemotron are dense, "
            "Grok-1 has experts and norms after attention and MLP (preset xai); heads are of one "
            "width"
        )
    yield "model.embed_tokens.weight", params["embed"]["w"], (m.vocab, m.embed)
    for i in range(m.layers):
        w = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        yield from _layer(m, f"model.layers.{i}", w)
    yield from _norm(m, "model.norm", params["head"]["norm"])
    if not m.tied:
        yield "lm_head.weight", params["head"]["w"].T, (m.vocab, m.embed)


def _layer(m: Model, at: str, w):
    names = GROK if m.experts else LLAMA
    for ours, theirs in names["norms"].items():
        yield from _norm(m, f"{at}.{theirs}", w[ours])
    attn, qkv = f"{at}.{names['attn']}", w["attn"]["qkv"]["w"].transpose(1, 2, 3, 0)
    for name, heads in (("q", qkv[:, :-2]), ("k", qkv[:, -2]), ("v", qkv[:, -1])):
        width = heads.size // m.embed
        yield f"{attn}.{name}_proj.weight", heads, (width, m.embed)
    out = w["attn"]["out"]["w"].transpose(2, 0, 1)
    yield f"{attn}.o_proj.weight", out, (m.embed, m.heads * m.head_dim)
    if not m.experts:
        yield from _mlp(m, f"{at}.mlp", names["mlp"], w["mlp"]["up"]["w"], w["mlp"]["down"]["w"])
        return
    yield f"{at}.moe_block.gate.weight", w["mlp"]["router"]["w"].T, (m.experts, m.embed)
    for e, (up, down) in enumerate(zip(w["mlp"]["up"], w["mlp"]["down"], strict=True)):
        yield from _mlp(m, f"{at}.moe_block.experts.{e}", names["mlp"], up, down)


def _mlp(m: Model, at: str, names, up_dnf, down_fd):
    gate, up, down = names
    for i, name in enumerate((gate, up)[-m.mlp_inputs :]):
        yield f"{at}.{name}.weight", up_dnf[:, i].T, (m.mlp, m.embed)
    yield f"{at}.{down}.weight", down_fd.T, (m.embed, m.mlp)


def _norm(m: Model, at: str, w):
    yield f"{at}.{'scale' if m.experts else 'weight'}", w["scale"], (m.embed,)
    if m.norm == "layernorm1p":
        yield f"{at}.bias", w["bias"], (m.embed,)


LLAMA = {
    "attn": "self_attn",
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "norms": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
}
_GROK_NORMS = {"attn_norm": "pre_attn_norm", "attn_post": "post_attn_norm"}
_GROK_NORMS |= {"mlp_norm": "pre_moe_norm", "mlp_post": "post_moe_norm"}
GROK = {"attn": "attn", "mlp": ("linear", "linear_v", "linear_1"), "norms": _GROK_NORMS}
