"""The Model that a Hugging Face config.json describes.

Every field of the file is used, or known to change nothing here, or refused: a field that this
module does not know may change the network.
"""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from maxbench.config.channels import Experts, Mlp
from maxbench.config.errors import UserError
from maxbench.config.mixers import Attention, LatentAttention
from maxbench.config.model import Model
from maxbench.config.sublayers import Layer

ACTS = {"silu": "swiglu", "relu2": "relu2", "gelu_pytorch_tanh": "geglu"}
# Fields that do not change the network: names, tokens, generation, caches, initialization's seed,
# lengths that RoPE alone would need, and the storage of weights.
IGNORED = {
    *("architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "model_type", "max_position_embeddings"),
    *("attn_implementation", "_attn_implementation", "_name_or_path", "output_router_logits"),
    *("pretraining_tp", "max_window_layers", "initial_context_length", "ep_size", "seq_aux"),
    *("return_dict", "output_attentions", "output_hidden_states", "quantization_config"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type"),
    *("aux_loss_alpha", "router_aux_loss_coef", "router_jitter_noise", "qk_head_dim"),
}
# Fields with the only value that is understood.
FIXED = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "mlp_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


class Fields:
    """The fields of a config.json, each taken once."""

    def __init__(self, config: Mapping[str, Any]):
        self.left = dict(config)
        self.kind = str(config.get("model_type", ""))

    def take(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these names that is there; null counts as missing.

        Raises:
          UserError: none is there, and there is no default.
        """
        values = [self.left.pop(name, None) for name in names]
        if found := [value for value in values if value is not None]:
            return found[0]
        if default is None:
            raise UserError(f"config.json has no {names[0]}, which model_type={self.kind!r} needs")
        return default

    def fix(self, name: str, value: Any) -> None:
        """Takes a field that may have one value only.

        Raises:
          UserError: it has another one.
        """
        given = self.left.pop(name, None)
        if given is not None and given != value:
            raise UserError(f"config.json has {name}={given!r}, and only {value!r} is understood")

    def finish(self) -> None:
        """Raises UserError if a field is left that might change the network."""
        for name, value in FIXED.items():
            self.fix(name, value)
        unknown = sorted(name for name, x in self.left.items() if x is not None)
        if unknown := [name for name in unknown if name not in IGNORED]:
            name = unknown[0]
            raise UserError(
                f"config.json has {name}={self.left[name]!r}, which is not understood; remove it "
                f"if it does not change the network of model_type={self.kind!r}"
            )


def read_config(path: str | pathlib.Path, size: str = "") -> Model:
    """The Model of a config.json file. Arguments and errors as of model_of().

    Raises:
      UserError: the file cannot be read, or is not JSON.
    """
    try:
        config = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} must be a JSON object, and is a {type(config).__name__}")
    return model_of(config, size)


def model_of(config: Mapping[str, Any], size: str = "") -> Model:
    """The Model of a config.json; dropless and without force_balance.

    Args:
      size: Model.size; '' = the number of layers, as '61-layers'.

    Raises:
      UserError: the model_type or a field is not understood, a field is missing, or two contradict
        each other; says what would work.
    """
    fields = Fields(config)
    if fields.kind not in FAMILIES:
        raise UserError(
            f"config.json has model_type={fields.kind!r}; understood are {', '.join(FAMILIES)}"
        )
    common = _common(fields)
    sizes = common | FAMILIES[fields.kind](fields, common) | _rope(fields)
    if not isinstance(sizes["act"], str) or sizes["act"] not in {*ACTS.values(), "swiglu_clamped"}:
        raise UserError(f"config.json has hidden_act={sizes['act']!r}; understood are {[*ACTS]}")
    fields.finish()
    size = size or f"{sizes['layers']}-layers"
    return Model(name=fields.kind, size=size, **sizes)


def _common(c: Fields) -> dict[str, Any]:
    heads, embed = c.take("num_attention_heads"), c.take("hidden_size")
    act = c.take("hidden_act")
    return dict(
        layers=c.take("num_hidden_layers"),
        embed=embed,
        heads=heads,
        kv_heads=c.take("num_key_value_heads", default=heads),
        head_dim=c.take("head_dim", default=embed // heads),
        mlp=c.take("intermediate_size"),
        vocab=c.take("vocab_size"),
        act=ACTS.get(act, act),
        norm_eps=c.take("rms_norm_eps", "norm_eps"),
        tied=c.take("tie_word_embeddings", default=False),
        init_std=c.take("initializer_range", default=0.02),
        attention_bias=c.take("attention_bias", default=False),
        window=0,
    )


def _window(c: Fields) -> int:
    """sliding_window of all layers; 0 if there is none."""
    window = c.left.pop("sliding_window", None) or 0
    return 0 if c.left.get("use_sliding_window") is False else window


def _llama(c: Fields, _: Mapping) -> dict[str, Any]:
    return {}


def _nemotron(c: Fields, _: Mapping) -> dict[str, Any]:
    return dict(norm="layernorm1p")


def _qwen3(c: Fields, common: Mapping) -> dict[str, Any]:
    c.fix("layer_types", ["full_attention"] * common["layers"])
    return dict(qk_norm=True, window=_window(c))


def _experts(c: Fields, **more: Any) -> dict[str, Any]:
    return dict(
        experts=c.take("num_experts", "num_local_experts", "n_routed_experts"),
        top_k=c.take("num_experts_per_tok"),
        capacity_factor=0.0,
        **more,
    )


def _qwen3_moe(c: Fields, common: Mapping) -> dict[str, Any]:
    c.fix("norm_topk_prob", True)
    mlp = c.take("moe_intermediate_size")
    return _qwen3(c, common) | _experts(c, mlp=mlp)


def _mixtral(c: Fields, _: Mapping) -> dict[str, Any]:
    return _experts(c, window=_window(c))


def _gpt_oss(c: Fields, common: Mapping) -> dict[str, Any]:
    sizes = _experts(c, act="swiglu_clamped", mlp_bias=True, router_bias=True, sinks=True)
    c.fix("experts_per_token", sizes["top_k"])
    windows = {"sliding_attention": c.take("sliding_window"), "full_attention": 0}
    kinds = c.take("layer_types")
    if unknown := [kind for kind in kinds if kind not in windows]:
        raise UserError(
            f"config.json has layer_types with {unknown[0]!r}; understood are {[*windows]}"
        )
    layer_of = lambda name: Layer(mixer=Attention(window=windows[name]), channel=Experts())
    layers = tuple((1, (layer_of(name),)) for name in kinds)
    return sizes | dict(layer_groups=layers)


def _deepseek(c: Fields, common: Mapping) -> dict[str, Any]:
    c.fix("norm_topk_prob", True)
    shared, expert_mlp = c.take("n_shared_experts"), c.take("moe_intermediate_size")
    dense, layers = c.take("first_k_dense_replace"), common["layers"]
    rope, nope = c.take("qk_rope_head_dim"), c.take("qk_nope_head_dim")
    sizes = _experts(
        c,
        router="sigmoid",
        router_groups=c.take("n_group"),
        router_groups_top=c.take("topk_group"),
        router_scale=c.take("routed_scaling_factor"),
        expert_bias_rate=0.001,
        shared_mlp=shared * expert_mlp,
        q_rank=c.take("q_lora_rank"),
        kv_rank=c.take("kv_lora_rank"),
        rope_head_dim=rope,
        head_dim=nope + rope,
        value_dim=c.take("v_head_dim"),
        mtp_layers=c.take("num_nextn_predict_layers", default=0),
        mlp=expert_mlp,
    )
    if not 0 <= dense < layers:
        raise UserError(
            f"config.json has first_k_dense_replace={dense} of num_hidden_layers={layers} layers; "
            f"understood are 0 to {layers - 1}"
        )
    layer = lambda channel: Layer(mixer=LatentAttention(), channel=channel)
    first = ((dense, (layer(Mlp(mlp=common["mlp"])),)),) if dense else ()
    return sizes | dict(layer_groups=(*first, (layers - dense, (layer(Experts()),))))


def _rope(c: Fields) -> dict[str, Any]:
    """RoPE, from rope_parameters or from rope_theta and rope_scaling, as older files have it."""
    scaling = c.left.pop("rope_scaling", None) or {}
    rope = Fields({"model_type": c.kind, **scaling, **(c.left.pop("rope_parameters", None) or {})})
    kind = rope.take("rope_type", "type", default="default")
    older = c.left.pop("rope_theta", None), c.left.pop("partial_rotary_factor", None)
    sizes = dict(
        rope_base=float(rope.take("rope_theta", default=older[0] or 10_000.0)),
        rope_fraction=float(rope.take("partial_rotary_factor", default=older[1] or 1.0)),
    )
    if kind not in ("default", "llama3", "yarn"):
        raise UserError(
            f"config.json has rope_type={kind!r}; understood are default, llama3 and yarn"
        )
    if kind != "default":
        sizes |= dict(
            rope_scaling=kind,
            rope_factor=float(rope.take("factor")),
            rope_context=rope.take("original_max_position_embeddings"),
        )
    if kind == "llama3":
        sizes["rope_low"] = float(rope.take("low_freq_factor"))
        sizes["rope_high"] = float(rope.take("high_freq_factor"))
    if kind == "yarn":
        mscale = rope.left.pop("mscale", None) or 0.0
        rope.fix("mscale_all_dim", mscale)
        sizes |= dict(
            rope_beta_fast=float(rope.take("beta_fast", default=32.0)),
            rope_beta_slow=float(rope.take("beta_slow", default=1.0)),
            rope_truncate=rope.take("truncate", default=True),
            rope_mscale=float(mscale),
        )
    if unknown := [name for name in rope.left if name != "model_type"]:
        raise UserError(
            f"config.json has {unknown[0]}={rope.left[unknown[0]]!r} in its RoPE of type {kind}, "
            f"which is not understood; remove it if it changes nothing"
        )
    return sizes


FAMILIES: dict[str, Callable[[Fields, Mapping], dict[str, Any]]] = {
    "llama": _llama,
    "nemotron": _nemotron,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
}
