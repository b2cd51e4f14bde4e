"""Conversion of weights from and to Hugging Face's formats.

A dict from Hugging Face's tensor names to numpy arrays (safetensors.numpy.load_file, merged over
files) becomes the tree of weights of transformer.Transformer and of training, and back, bit for
bit. The format follows from the Model alone: that of Llama, Nemotron, Qwen3, Mixtral, gpt-oss
(experts in bf16, not MXFP4), DeepSeek-V3 and Kimi-K2, Nemotron-H and Nemotron 3, and Grok-1 with
the names of hpcai-tech/grok-1, which vLLM and SGLang read too. config/hugging_face_config.py reads
config.json.

The correction biases of a router are no trained weights: they are 'expert_bias' in the tree of
their layer's 'mlp', where transformer.Transformer reads them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from maxbench.config.channels import Experts, Mlp
from maxbench.config.errors import UserError
from maxbench.config.mixers import Attention, LatentAttention, Mamba2
from maxbench.config.model import Model
from maxbench.config.sublayers import KEYS, ROLES, Layer, imported
from maxbench.model import layer_stack, transformer
from maxbench.model.layer_stack import part_of

DTYPES = ("float16", "bfloat16", "float32", "float64")
FORMATS = (
    "dense models (Llama, Nemotron, Qwen3), experts of SwiGLU (Mixtral; with qk_norm Qwen3), those "
    "of gpt-oss (swiglu_clamped with all biases and sinks), latent attention (DeepSeek-V3, "
    "Kimi-K2), layers of one sublayer with relu2 and without positions (Nemotron-H), and Grok-1's "
    "experts with norms after attention and MLP (preset xai)"
)


class Names(NamedTuple):
    """Names of the modules of a network and of a layer in a format."""

    root: str = "model"
    embed: str = "embed_tokens"
    last_norm: str = "norm"
    attn: str = "self_attn"
    norms: Mapping[str, str] = {
        "attn_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    dense: str = "mlp"  # the module of an MLP
    mlp: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    moe: str = "mlp"  # the module of router and experts
    router: str = "gate"
    scale: str = "weight"  # of a norm


LLAMA = Names()
MIXTRAL = Names(moe="block_sparse_moe", mlp=("w1", "w3", "w2"))
GPT_OSS = Names(router="router")
NEMOTRON_H = Names(
    root="backbone",
    embed="embeddings",
    last_norm="norm_f",
    norms={"attn_norm": "norm", "mlp_norm": "norm"},
    attn="mixer",
    dense="mixer",
    moe="mixer",
)
MTP = "mtp.layers."  # of Nemotron 3's tensors for multi-token prediction
GROK = Names(
    attn="attn",
    norms={
        "attn_norm": "pre_attn_norm",
        "attn_post": "post_attn_norm",
        "mlp_norm": "pre_moe_norm",
        "mlp_post": "post_moe_norm",
    },
    mlp=("linear", "linear_v", "linear_1"),
    moe="moe_block",
    scale="scale",
)


class Tensor(NamedTuple):
    """A tensor of Hugging Face, and the weights in it.

    Attributes:
      dims: its shape when it is compared with weights; a reshape of `shape`.
      parts: (index into the tensor with these dims, view of the weights there).
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    parts: tuple[tuple[Any, np.ndarray], ...]


def from_hugging_face(m: Model, tensors: Mapping[str, np.ndarray], dtype: Any = np.float32) -> dict:
    """Converts Hugging Face's tensors of a model to the tree of weights, numpy arrays of one dtype.

    Raises:
      UserError: the model has no supported Hugging Face format; a tensor is missing, unexpected, or
        has another shape or a dtype that is not in DTYPES.
    """
    shapes = jax.eval_shape(lambda key: nn.unbox(transformer.init(m, key)), jax.random.key(0))
    params = jax.tree.map(lambda x: np.empty(x.shape, dtype), shapes)
    _add_router_biases(m, params, lambda *shape: np.zeros(shape, dtype))
    unused = dict(tensors)
    for t in _tensors(m, params):
        if t.name not in unused:
            raise UserError(
                f"{t.name} is missing: {m.name} {m.size} needs it, with shape {t.shape}"
                f"{_why_missing(m, t.name, tensors)}"
            )
        tensor = unused.pop(t.name)
        _check_dtype(t.name, tensor)
        if tensor.shape != t.shape:
            raise UserError(
                f"{t.name} has shape {tensor.shape}, and {m.name} {m.size} needs {t.shape}"
            )
        tensor = tensor.reshape(t.dims)
        for index, view in t.parts:
            view[...] = tensor[index]
    _drop_copies(m, tensors, unused)
    if unused:
        names = sorted(unused)
        why = "; multiply weights by their scales first" if "_scale" in names[0] else ""
        if names[0].startswith((f"model.layers.{m.layers}.", MTP)):
            why = "; leave the tensors of multi-token prediction out, or use mtp_layers=1"
        raise UserError(f"{', '.join(names[:3])}: {m.name} {m.size} has no such weight{why}")
    return params


def _why_missing(m: Model, missing: str, tensors: Mapping) -> str:
    """Remedy for a missing tensor; '' if none is known."""
    if any(name.endswith(("_blocks", "_scales")) for name in tensors):
        return "; convert its MXFP4 tensors to bf16 first"
    if m.mtp_layers and missing.startswith((f"model.layers.{m.layers}.", MTP)):
        return (
            "; transformers saves no multi-token prediction: load the model without, "
            "read_config(path, mtp=False)"
        )
    return ""


def _check_dtype(name: str, tensor: Any) -> None:
    """Checks that a tensor is an array of unquantized weights.

    Raises:
      UserError: it is not; says how to convert it.
    """
    dtype = str(getattr(tensor, "dtype", type(tensor).__name__))
    if dtype in DTYPES:
        return
    how = "it is quantized or damaged: convert it to bf16 with the program that wrote it"
    if dtype == "uint16":
        how = "if these are the bits of bf16, pass tensor.view(ml_dtypes.bfloat16)"
    elif "float8" in dtype or "float4" in dtype:
        how = (
            "multiply it by its scales first (DeepSeek's weight_scale_inv: one per block of "
            "128 x 128)"
        )
    elif not isinstance(tensor, np.ndarray):
        how = "pass numpy arrays, as of safetensors.numpy.load_file"
    raise UserError(f"{name} is of type {dtype}, and weights are {', '.join(DTYPES)}: {how}")


def to_hugging_face(m: Model, params: Mapping) -> dict[str, np.ndarray]:
    """Converts a tree of weights to Hugging Face's tensors by name; without lm_head if it is tied.

    Raises:
      UserError: the model has no supported Hugging Face format.
    """
    params = jax.tree.map(np.asarray, dict(params))
    _add_router_biases(m, params, lambda *shape: np.zeros(shape, np.float32))
    tensors = {}
    for t in _tensors(m, params):
        tensor = np.empty(t.dims, t.parts[0][1].dtype)
        for index, view in t.parts:
            tensor[index] = view
        tensors[t.name] = tensor.reshape(t.shape)
    return tensors | {copy: tensors[name] for copy, name in _mtp_copies(m).items()}


def _names(m: Model) -> Names:
    """The names of a model's format.

    Raises:
      UserError: it has none.
    """
    kinds = [layer for _, layer in m.kinds]
    experts = [layer for layer in kinds if layer.has_experts]
    fused = m.act == "swiglu_clamped"
    biases = (m.mlp_bias, m.attention_bias, m.sinks)
    names = LLAMA
    parts = [[part for _, part in layer.parts()] for layer in kinds]
    if lone := all(len(x) == 1 for x in parts):
        plain = not (m.rope_dims or m.qk_norm or m.router_bias or m.post_norm or any(biases))
        supported = plain and m.act == "relu2" and m.norm == "rmsnorm"
        supported &= not experts or (m.router == "sigmoid" and m.shared_mlp > 0)
        names = NEMOTRON_H
    elif fused:
        supported = len(experts) == len(kinds) and all(biases) and m.router_bias and not m.kv_rank
        names = GPT_OSS
    elif m.kv_rank:
        supported = not (m.mlp_bias or m.router_bias or m.post_norm) and m.act == "swiglu"
    elif m.post_norm:
        supported = len(experts) == len(kinds) == 1 and not (any(biases) or m.qk_norm)
        names = GROK
    elif experts:
        supported = not any(biases) and m.act == "swiglu" and len(experts) == len(kinds)
        names = LLAMA if m.qk_norm else MIXTRAL
    else:
        supported = not m.mlp_bias
    same_width = m.value_dim in (0, m.head_dim) or m.kv_rank
    supported &= lone or all(len(x) == len(ROLES) for x in parts)
    supported &= all(part.hugging_face for layer in m.all_layers for _, part in layer.parts())
    shared = not m.shared_mlp or m.kv_rank or lone
    mtp = not m.mtp_layers or m.kv_rank or lone
    if not (supported and same_width and shared and mtp):
        raise UserError(
            f"{m.name} {m.size} has no supported Hugging Face format: supported are {FORMATS}; "
            "keys and values must have one width, but for latent attention"
        )
    return names


def _add_router_biases(m: Model, params: Any, zeros: Any) -> None:
    """Adds the correction biases of routers that a tree lacks: zeros."""
    if m.router != "sigmoid":
        return
    table = layer_stack.stacks(m)
    layers: list[tuple] = [(s.layer, tree, (len(s.slots),)) for s, tree in
              zip(table, layer_stack.split(table, params["layers"]), strict=True)]  # fmt: skip
    layers += [(m.mtp_layer, params["mtp"]["layer"], ())] if m.mtp_layers else []
    for layer, tree, stacked in layers:
        if isinstance(layer.channel, Experts):
            bias = zeros(*stacked, layer.channel.experts)
            tree[KEYS["channel"]].setdefault("expert_bias", bias)


def _mtp_copies(m: Model) -> dict[str, str]:
    """Tensors of the MTP layer that are copies of others, which DeepSeek's format repeats."""
    if not m.mtp_layers or _names(m) is NEMOTRON_H:
        return {}
    layer = f"model.layers.{m.layers}"
    return {
        f"{layer}.embed_tokens.weight": "model.embed_tokens.weight",
        f"{layer}.shared_head.head.weight": "lm_head.weight",
    }


def _drop_copies(m: Model, tensors: Mapping, unused: dict) -> None:
    """Removes tensors that repeat others.

    Raises:
      UserError: one differs from the one that it repeats.
    """
    copies = {"lm_head.weight": "model.embed_tokens.weight"} if m.tied else {}
    for copy, name in (copies | _mtp_copies(m)).items():
        tensor = unused.pop(copy, None)
        if tensor is not None and not np.array_equal(tensor, tensors[name]):
            hint = "; use model.tied=False" if m.tied else ""
            raise UserError(f"{copy} is not {name}{hint}")


def _tensors(m: Model, params) -> Iterator[Tensor]:
    """Yields each tensor with views of params. Writing to a view writes to params."""
    names = _names(m)
    table_name = f"{names.root}.{names.embed}.weight"
    yield _whole(table_name, params["embed"]["w"], m.vocab, m.embed)
    table = layer_stack.stacks(m)
    layers: dict[int, tuple[Layer, Any]] = {}
    for stack, tree in zip(table, layer_stack.split(table, params["layers"]), strict=True):
        for i, index in enumerate(stack.slots):
            layers[index] = stack.layer, jax.tree.map(lambda leaf, i=i: leaf[i], tree)
    for i, (layer, w) in sorted(layers.items()):
        yield from _layer(m, layer, names, f"{names.root}.layers.{i}", w)
    if m.mtp_layers:
        yield from _mtp(m, names, params["mtp"])
    yield from _norm(m, names, f"{names.root}.{names.last_norm}", params["head"]["norm"])
    if not m.tied:
        yield _whole("lm_head.weight", params["head"]["w"].T, m.vocab, m.embed)


def _whole(name: str, view: np.ndarray, *shape: int) -> Tensor:
    """A tensor that is one view, of this shape."""
    return Tensor(name, shape, view.shape, ((..., view),))


def _layer(m: Model, layer: Layer, names: Names, prefix: str, w) -> Iterator[Tensor]:
    for norm, hf_norm in names.norms.items():
        if norm not in w:  # of a sublayer that the layer lacks
            continue
        yield from _norm(m, names, f"{prefix}.{hf_norm}", w[norm])
    for role, sublayer in layer.parts():
        yield from imported(sublayer.hugging_face)(sublayer, names, prefix, w[KEYS[role]])


# Tensors of the kinds of mixers and channels (Sublayer.hugging_face).


def attention(m: Attention, names: Names, prefix: str, w: Any) -> Iterator[Tensor]:
    """Grouped-query attention."""
    prefix = f"{prefix}.{names.attn}"
    qkv = w["qkv"]["w"].transpose(1, 2, 3, 0)
    parts = {"q": slice(None, -2), "k": -2, "v": -1}
    for name, part in parts.items():
        heads = qkv[:, part]
        width = heads.size // m.embed
        yield _whole(f"{prefix}.{name}_proj.weight", heads, width, m.embed)
        if m.attention_bias:
            yield _whole(f"{prefix}.{name}_proj.bias", w["qkv"]["bias"][:, part], width)
        if m.qk_norm and name != "v":
            norm = w[f"{name}_norm"]["scale"]
            yield _whole(f"{prefix}.{name}_norm.weight", norm, m.head_dim)
    yield from _attention_output(m, prefix, w)


def _attention_output(m: Attention, prefix: str, w) -> Iterator[Tensor]:
    out = w["out"]["w"].transpose(2, 0, 1)
    yield _whole(f"{prefix}.o_proj.weight", out, m.embed, m.heads * m.value_width)
    if m.attention_bias:
        yield _whole(f"{prefix}.o_proj.bias", w["out"]["bias"], m.embed)
    if m.sinks:
        yield _whole(f"{prefix}.sinks", w["sinks"], m.heads)


def latent_attention(m: LatentAttention, names: Names, prefix: str, w: Any) -> Iterator[Tensor]:
    """DeepSeek-V3's latent attention. Its RoPE rotates dims (2 i, 2 i + 1) of the last
    rope_head_dim ones, layers.rotate() dims (i, i + rope_head_dim / 2)."""
    prefix = f"{prefix}.{names.attn}"
    pairs = np.arange(m.rope_head_dim).reshape(-1, 2).T.ravel()
    order = lambda plain: np.concatenate([np.arange(plain), plain + pairs])
    down, bias = w["qkv"]["w"].T, w["qkv"].get("bias")
    latents = order(m.kv_rank)
    rows = m.kv_rank + m.rope_head_dim
    yield _whole(f"{prefix}.q_a_proj.weight", down[: m.q_rank], m.q_rank, m.embed)
    name, shape = f"{prefix}.kv_a_proj_with_mqa", (rows, m.embed)
    yield Tensor(f"{name}.weight", shape, shape, ((latents, down[m.q_rank :]),))
    if bias is not None:
        yield _whole(f"{prefix}.q_a_proj.bias", bias[: m.q_rank], m.q_rank)
        yield Tensor(f"{name}.bias", (rows,), (rows,), ((latents, bias[m.q_rank :]),))
    for latent in ("q", "kv"):
        norm = w[f"{latent}_norm"]["scale"]
        yield _whole(f"{prefix}.{latent}_a_layernorm.weight", norm, norm.size)
    queries, shape = w["q_up"]["w"].transpose(1, 2, 0), (m.heads * m.head_dim, m.q_rank)
    head = slice(None), order(m.head_dim - m.rope_head_dim)
    yield Tensor(f"{prefix}.q_b_proj.weight", shape, queries.shape, ((head, queries),))
    values = w["kv_up"]["w"].transpose(1, 2, 0)
    yield _whole(f"{prefix}.kv_b_proj.weight", values, m.heads * m.kv_up_width, m.kv_rank)
    yield from _attention_output(m, prefix, w)


def mamba2(m: Mamba2, names: Names, prefix: str, w: Any) -> Iterator[Tensor]:
    """Mamba-2, whose rows are those of z, then x, B, C and time steps, each of all groups."""
    prefix = f"{prefix}.{names.attn}"
    conv = (m.ssm_inner, m.ssm_state, m.ssm_state)
    inputs = (m.ssm_inner, *conv, m.ssm_heads // m.ssm_groups)
    yield _grouped(f"{prefix}.in_proj.weight", w["in"]["w"].transpose(1, 2, 0), inputs)
    yield _grouped(f"{prefix}.conv1d.weight", w["conv"].transpose(1, 2, 0)[:, :, None], conv)
    yield _grouped(f"{prefix}.conv1d.bias", w["conv_bias"], conv)
    heads = {"dt_bias": "dt_bias", "A_log": "a_log", "D": "skip_scale"}
    for theirs, ours in heads.items():
        yield _whole(f"{prefix}.{theirs}", w[ours], m.ssm_heads)
    width = m.ssm_groups * m.ssm_inner
    yield _whole(f"{prefix}.norm.weight", w["norm_scale"], width)
    yield _whole(f"{prefix}.out_proj.weight", w["out"]["w"].transpose(2, 0, 1), m.embed, width)


def _grouped(name: str, view: np.ndarray, widths: Sequence[int]) -> Tensor:
    """A tensor whose rows are parts of these widths per group, each part of all groups; the view is
    [groups, all parts, ...]."""
    parts, first, start = [], 0, 0
    for width in widths:
        rows = first + np.arange(len(view) * width).reshape(len(view), width)
        parts.append((rows, view[:, start : start + width]))
        first, start = first + rows.size, start + width
    shape = (first, *view.shape[2:])
    return Tensor(name, shape, shape, tuple(parts))


def mlp(m: Mlp, names: Names, prefix: str, w: Any) -> Iterator[Tensor]:
    """A dense layer's MLP."""
    yield from _mlp(m, f"{prefix}.{names.dense}", names.mlp, m.mlp, w)


def experts(m: Experts, names: Names, prefix: str, w: Any) -> Iterator[Tensor]:
    """Experts, their router, and the shared expert."""
    prefix = f"{prefix}.{names.moe}"
    yield _whole(f"{prefix}.{names.router}.weight", w["router"]["w"].T, m.experts, m.embed)
    if m.router_bias:
        yield _whole(f"{prefix}.{names.router}.bias", w["router_bias"], m.experts)
    if m.router == "sigmoid":
        name = f"{prefix}.{names.router}.e_score_correction_bias"
        yield _whole(name, w["expert_bias"], m.experts)
    if m.shared_mlp:
        shared = f"{prefix}.shared_experts"
        yield from _mlp(m, shared, names.mlp, m.shared_mlp, w["shared_expert"])
    if m.expert_latent:
        into, out_of = (w[name]["w"].T for name in ("into", "out_of"))
        yield _whole(f"{prefix}.fc1_latent_proj.weight", into, *into.shape)
        yield _whole(f"{prefix}.fc2_latent_proj.weight", out_of, *out_of.shape)
    if m.act == "swiglu_clamped":
        yield from _fused_experts(m, f"{prefix}.experts", w)
        return
    for e, (up, down) in enumerate(zip(w["up"], w["down"], strict=True)):
        weights = {"up": {"w": up}, "down": {"w": down}}
        yield from _mlp(m, f"{prefix}.experts.{e}", names.mlp, m.mlp, weights)


def _fused_experts(m: Experts, prefix: str, w) -> Iterator[Tensor]:
    """gpt-oss has the experts of a layer in one tensor, gates and up-projections in turn."""
    e, f, d = m.experts, m.mlp, m.embed
    yield _whole(f"{prefix}.gate_up_proj", w["up"].swapaxes(2, 3), e, d, 2 * f)
    yield _whole(f"{prefix}.gate_up_proj_bias", w["up_bias"].swapaxes(1, 2), e, 2 * f)
    yield _whole(f"{prefix}.down_proj", w["down"], e, f, d)
    yield _whole(f"{prefix}.down_proj_bias", w["down_bias"], e, d)


def _mlp(m: Mlp | Experts, prefix: str, names, width: int, w) -> Iterator[Tensor]:
    gate, up, down = names
    up_dnf, down_fd = w["up"]["w"], w["down"]["w"]
    for i, name in enumerate((gate, up)[-m.mlp_inputs :]):
        yield _whole(f"{prefix}.{name}.weight", up_dnf[:, i].T, width, len(up_dnf))
    yield _whole(f"{prefix}.{down}.weight", down_fd.T, len(up_dnf), width)


def _mtp(m: Model, names: Names, w) -> Iterator[Tensor]:
    """Multi-token prediction (model/mtp.py): DeepSeek-V3's layer after the last one, or Nemotron
    3's layers of one sublayer each."""
    first = f"model.layers.{m.layers}"
    layers, head_norm = [(first, m.mtp_layer, w["layer"])], f"{first}.shared_head.norm"
    if names is NEMOTRON_H:
        parts = enumerate(m.mtp_layer.parts())
        layers = [(f"{MTP}{i}", Layer.alone(*part), part_of(part[0], w["layer"]))
                  for i, part in parts]  # fmt: skip
        first, head_norm = layers[0][0], f"{layers[-1][0]}.final_layernorm"
    for norm, name in (("embed_norm", "enorm"), ("hidden_norm", "hnorm")):
        yield from _norm(m, names, f"{first}.{name}", w["input"][norm])
    projection = w["input"]["projection"]["w"].transpose(2, 0, 1)
    yield _whole(f"{first}.eh_proj.weight", projection, m.embed, 2 * m.embed)
    for prefix, layer, weights in layers:
        yield from _layer(m, layer, names, prefix, weights)
    yield from _norm(m, names, head_norm, w["head_norm"])


def _norm(m: Model, names: Names, prefix: str, w) -> Iterator[Tensor]:
    yield _whole(f"{prefix}.{names.scale}", w["scale"], m.embed)
    if m.norm == "layernorm1p":
        yield _whole(f"{prefix}.bias", w["bias"], m.embed)
