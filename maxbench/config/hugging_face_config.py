"""The Model that a Hugging Face config.json describes.

Every field of the file is used, or known to change nothing here, or refused: a field that this
module does not know may change the network. A field that the file leaves out has the default of
transformers' configuration class of its model_type (DEFAULTS), or is required.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxbench.config.channels import Experts, Mlp
from maxbench.config.errors import UserError
from maxbench.config.mixers import Attention, LatentAttention, Mamba2
from maxbench.config.model import Model
from maxbench.config.sublayers import ROLES, Layer

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
    *("expand", "num_logits_to_keep", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
    *("rescale_prenorm_residual", "use_mamba_kernels", "norm_eps", "time_step_max"),
    *("time_step_floor", "keep_mtp_spec_in_bf16"),
    # transformers raises time steps to the lower limit; Megatron, which trained them, does not.
    *("time_step_min", "time_step_limit"),
}
_COMMON = dict(
    head_dim=None, num_key_value_heads=None, hidden_act="silu", rms_norm_eps=1e-6,
    tie_word_embeddings=False, attention_bias=False, initializer_range=0.02, rope_theta=10_000.0,
)  # fmt: skip
_QWEN3 = _COMMON | dict(use_sliding_window=False, sliding_window=4096)
# Defaults of the configuration classes of transformers 5.24.0, by model_type. Widths and numbers of
# layers, heads and experts have some too, which would make a model of an empty file.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,  # LlamaConfig
    "nemotron": _COMMON  # NemotronConfig
    | dict(hidden_act="relu2", norm_eps=1e-5, initializer_range=0.0134, partial_rotary_factor=0.5),
    "qwen3": _QWEN3 | dict(head_dim=128, num_key_value_heads=32),  # Qwen3Config
    "qwen3_moe": _QWEN3 | dict(num_key_value_heads=4, norm_topk_prob=False),  # Qwen3MoeConfig
    "mixtral": _COMMON  # MixtralConfig
    | dict(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0),
    "gpt_oss": _COMMON  # GptOssConfig
    | dict(head_dim=64, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=150_000.0)
    | dict(attention_bias=True, sliding_window=128),
    "deepseek_v3": _COMMON | dict(norm_topk_prob=True),  # DeepseekV3Config
    "kimi_k2": _COMMON | dict(norm_topk_prob=True),  # its own copy of DeepSeek's class
    "nemotron_h": _COMMON  # NemotronHConfig
    | dict(head_dim=128, num_key_value_heads=8, hidden_act="relu2", layer_norm_epsilon=1e-5)
    | dict(mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4, chunk_size=128)
    | dict(n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=True),
}
GPT_OSS_ROPE = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=4096,
)  # fmt: skip
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
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "use_bias": False,
    "mamba_proj_bias": False,
    "residual_in_fp32": False,
}


class Fields:
    """The fields of a config.json, each taken once."""

    def __init__(self, config: Mapping[str, Any]):
        self.kind = str(config.get("model_type", ""))
        self.given = {*config}
        self.left = {**DEFAULTS.get(self.kind, {}), **config}

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

    def whole(self, *names: str, default: int | None = None) -> int:
        """take() of a whole number, at least 0.

        Raises:
          UserError: as take(); another value.
        """
        value = self.take(*names, default=default)
        if type(value) is not int or value < 0:
            raise UserError(f"config.json has {names[0]}={value!r}, which is no whole number")
        return value

    def real(self, *names: str, default: float | None = None) -> float:
        """take() of a number.

        Raises:
          UserError: as take(); another value.
        """
        value = self.take(*names, default=default)
        if type(value) not in (int, float):
            raise UserError(f"config.json has {names[0]}={value!r}, which is no number")
        return float(value)

    def table(self, name: str) -> dict[str, Any]:
        """A field that is a table; {} if it is missing.

        Raises:
          UserError: another value.
        """
        value = self.left.pop(name, None)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise UserError(
                f'config.json has {name}={value!r}, which must be an object, as {{"rope_type": '
                '"yarn", "factor": 4.0, ...}, or null'
            )
        return value

    def fix(self, name: str, value: Any) -> None:
        """Takes a field that may have one value only.

        Raises:
          UserError: it has another one, or leaves it to a default that is another one.
        """
        given = self.left.pop(name, None)
        if given is not None and given != value:
            how = f"has {name}={given!r}"
            if name not in self.given:
                how = f"has no {name}, which is {given!r} by default in transformers"
            raise UserError(f"config.json {how}, and only {value!r} is understood")

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


def read_config(path: str | pathlib.Path, size: str = "", mtp: bool = True) -> Model:
    """The Model of a config.json file. Arguments and errors as of model_of().

    Raises:
      UserError: the file cannot be read, or is not JSON.
    """
    try:
        config = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} must be a JSON object, and is a {type(config).__name__}")
    return model_of(config, size, mtp)


def model_of(config: Mapping[str, Any], size: str = "", mtp: bool = True) -> Model:
    """The Model of a config.json; dropless and without force_balance.

    Args:
      size: Model.size; '' = the number of layers, as '61-layers'.
      mtp: False leaves out layers for multi-token prediction: checkpoints that transformers saves
        lack their tensors, though config.json announces them.

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
    of_family = FAMILIES[fields.kind](fields, common)
    sizes = common | _rope(fields) | of_family
    if not isinstance(sizes["act"], str) or sizes["act"] not in {*ACTS.values(), "swiglu_clamped"}:
        raise UserError(f"config.json has hidden_act={sizes['act']!r}; understood are {[*ACTS]}")
    fields.finish()
    if not mtp:
        sizes["mtp_layers"] = 0
    size = size or f"{sizes['layers']}-layers"
    return Model(name=fields.kind, size=size, **sizes)


def _common(c: Fields) -> dict[str, Any]:
    heads, embed = c.whole("num_attention_heads"), c.whole("hidden_size")
    head_dim, of_embed = c.left.pop("head_dim", None), embed // max(1, heads)
    is_latent = "kv_lora_rank" in c.left  # whose heads have widths of their own
    if head_dim is None and not is_latent and of_embed * heads != embed:
        raise UserError(
            f"config.json has hidden_size={embed}, which num_attention_heads={heads} do not "
            "divide, and no head_dim; add one"
        )
    act = c.take("hidden_act")
    kinds = c.left.get("layers_block_type") or c.left.get("hybrid_override_pattern") or ()
    return dict(
        layers=c.whole("num_hidden_layers", default=len(kinds) or None),
        embed=embed,
        heads=heads,
        kv_heads=c.whole("num_key_value_heads", default=heads),
        head_dim=of_embed if head_dim is None else head_dim,
        mlp=c.whole("intermediate_size"),
        vocab=c.whole("vocab_size"),
        act=ACTS.get(str(act), act),
        norm_eps=c.real("rms_norm_eps"),
        tied=c.take("tie_word_embeddings"),
        init_std=c.real("initializer_range"),
        attention_bias=c.take("attention_bias"),
        window=0,
    )


def _window(c: Fields) -> int:
    """sliding_window of all layers; 0 if there is none."""
    window = c.whole("sliding_window", default=0)
    return 0 if c.left.get("use_sliding_window") is False else window


def _llama(c: Fields, _: Mapping) -> dict[str, Any]:
    return {}


def _nemotron(c: Fields, _: Mapping) -> dict[str, Any]:
    return dict(norm="layernorm1p", norm_eps=c.real("norm_eps"))


def _qwen3(c: Fields, common: Mapping) -> dict[str, Any]:
    c.fix("layer_types", ["full_attention"] * common["layers"])
    return dict(qk_norm=True, window=_window(c))


def _experts(c: Fields, **more: Any) -> dict[str, Any]:
    return dict(
        experts=c.whole("num_experts", "num_local_experts", "n_routed_experts"),
        top_k=c.whole("num_experts_per_tok"),
        capacity_factor=0.0,
        **more,
    )


def _qwen3_moe(c: Fields, common: Mapping) -> dict[str, Any]:
    c.fix("norm_topk_prob", True)
    mlp = c.whole("moe_intermediate_size")
    return _qwen3(c, common) | _experts(c, mlp=mlp)


def _mixtral(c: Fields, _: Mapping) -> dict[str, Any]:
    return _experts(c, window=_window(c))


def _gpt_oss(c: Fields, common: Mapping) -> dict[str, Any]:
    sizes = _experts(c, act="swiglu_clamped", mlp_bias=True, router_bias=True, sinks=True)
    c.fix("experts_per_token", sizes["top_k"])
    c.left["rope_parameters"] = c.left.get("rope_parameters") or GPT_OSS_ROPE
    windows = {"sliding_attention": c.whole("sliding_window"), "full_attention": 0}
    alternating = [[*windows][i % 2] for i in range(common["layers"])]
    kinds = c.take("layer_types", default=alternating)
    if not isinstance(kinds, list) or (unknown := [x for x in kinds if x not in [*windows]]):
        given = repr(unknown[0]) if isinstance(kinds, list) else repr(kinds)
        raise UserError(f"config.json has layer_types with {given}; understood are {[*windows]}")
    layer_of = lambda name: Layer(mixer=Attention(window=windows[name]), channel=Experts())
    layers = tuple((1, (layer_of(name),)) for name in kinds)
    return sizes | dict(layer_groups=layers)


def _deepseek(c: Fields, common: Mapping) -> dict[str, Any]:
    c.fix("norm_topk_prob", True)
    shared, expert_mlp = c.whole("n_shared_experts"), c.whole("moe_intermediate_size")
    dense, layers = c.whole("first_k_dense_replace"), common["layers"]
    if (mtp_layers := c.whole("num_nextn_predict_layers", "num_mtp_layers")) > 1:
        raise UserError(
            f"config.json has num_nextn_predict_layers={mtp_layers}, layers with weights of their "
            "own; understood are 0 and 1"
        )
    rope, nope = c.whole("qk_rope_head_dim"), c.whole("qk_nope_head_dim")
    sizes = _experts(
        c,
        router="sigmoid",
        router_groups=c.whole("n_group"),
        router_groups_top=c.whole("topk_group"),
        router_scale=c.real("routed_scaling_factor"),
        expert_bias_rate=0.001,
        shared_mlp=shared * expert_mlp,
        q_rank=c.whole("q_lora_rank"),
        kv_rank=c.whole("kv_lora_rank"),
        rope_head_dim=rope,
        head_dim=nope + rope,
        value_dim=c.whole("v_head_dim"),
        mtp_layers=mtp_layers,
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


# Kinds of layers of nemotron_h: their names in transformers, those of older files, and their
# letters in patterns.
NEMOTRON_H = {
    **dict.fromkeys(("linear_attention", "mamba", "M"), "M"),
    **dict.fromkeys(("full_attention", "attention", "*"), "*"),
    **dict.fromkeys(("moe", "E"), "E"),
    **dict.fromkeys(("mlp", "-"), "-"),
}


def _nemotron_h(c: Fields, common: Mapping) -> dict[str, Any]:
    pattern = _pattern(c.take("layers_block_type", "hybrid_override_pattern"))
    mtp = _pattern(c.take("mtp_layers_block_type", "mtp_hybrid_override_pattern", default=()))
    if len(pattern) != common["layers"]:
        raise UserError(
            f"config.json has num_hidden_layers={common['layers']}, and kinds of {len(pattern)} "
            "layers; give as many"
        )
    c.fix("norm_topk_prob", True)
    mtp_layers = c.whole("num_nextn_predict_layers", default=0)
    mtp = mtp if mtp_layers else ""
    sizes: dict[str, Any] = dict(
        norm_eps=c.real("layer_norm_epsilon"),
        rope_fraction=0.0,
        ssm_heads=c.whole("mamba_num_heads"),
        ssm_head_dim=c.whole("mamba_head_dim"),
        ssm_groups=c.whole("n_groups"),
        ssm_state=c.whole("ssm_state_size"),
        ssm_conv=c.whole("conv_kernel"),
        ssm_chunk=c.whole("chunk_size"),
    )
    routed = dict(
        router="sigmoid",
        router_groups=c.whole("n_group"),
        router_groups_top=c.whole("topk_group"),
        router_scale=c.real("routed_scaling_factor"),
    )
    layers = {
        "M": Layer(mixer=Mamba2()),
        "*": Layer(mixer=Attention()),
        "-": Layer(channel=Mlp(mlp=common["mlp"])),
    }
    if "E" in pattern + mtp:
        c.fix("n_shared_experts", 1)
        layers["E"] = Layer(channel=Experts(mlp=c.whole("moe_intermediate_size")))
        shared = c.whole("moe_shared_expert_intermediate_size")
        latent = c.whole("moe_latent_size", default=0)
        more = dict(expert_bias_rate=0.001, shared_mlp=shared, expert_latent=latent)
        sizes |= routed | _experts(c, **more)
    else:  # transformers writes the defaults of what the network lacks
        unused = "n_routed_experts", "num_experts_per_tok", "n_shared_experts"
        for name in (*unused, "moe_intermediate_size", "moe_shared_expert_intermediate_size"):
            c.left.pop(name, None)
    if mtp_layers:
        sizes |= dict(mtp_layers=mtp_layers, mtp_block=_one_layer(mtp, [layers[x] for x in mtp]))
    return sizes | dict(layer_groups=((1, tuple(layers[letter] for letter in pattern)),))


def _pattern(names: Sequence[str]) -> str:
    """The letters of the kinds of layers of nemotron_h."""
    if unknown := [name for name in names if name not in NEMOTRON_H]:
        raise UserError(
            f"config.json has a layer of kind {unknown[0]!r}; understood are {[*NEMOTRON_H]}"
        )
    return "".join(NEMOTRON_H[name] for name in names)


def _one_layer(pattern: str, layers: Sequence[Layer]) -> Layer:
    """Layers of a sublayer each as one layer: a mixer, a channel, or one after the other."""
    parts = [part for layer in layers for part in layer.parts()]
    roles = [role for role, _ in parts]
    if roles not in ([*ROLES], *([role] for role in ROLES)):
        raise UserError(
            f"config.json has mtp_hybrid_override_pattern={pattern!r}; understood are a mixer, a "
            "channel, and a mixer with a channel after it, as '*E'"
        )
    return Layer(**dict[str, Any](parts))


def _rope(c: Fields) -> dict[str, Any]:
    """RoPE, from rope_parameters or from rope_theta and rope_scaling, as older files have it."""
    scaling, parameters = c.table("rope_scaling"), c.table("rope_parameters")
    rope = Fields(scaling or parameters)  # not both, as in transformers
    rope.kind = c.kind
    kind = rope.take("rope_type", "type", default="default")
    theta, fraction = c.real("rope_theta"), c.real("partial_rotary_factor", default=1.0)
    sizes: dict[str, Any] = dict(
        rope_base=rope.real("rope_theta", default=theta),
        rope_fraction=rope.real("partial_rotary_factor", default=fraction),
    )
    if kind not in ("default", "llama3", "yarn"):
        raise UserError(
            f"config.json has rope_type={kind!r}; understood are default, llama3 and yarn"
        )
    if kind != "default":
        sizes |= dict(
            rope_scaling=kind,
            rope_factor=rope.real("factor"),
            rope_context=rope.whole("original_max_position_embeddings"),
        )
    if kind == "llama3":
        sizes["rope_low"] = rope.real("low_freq_factor")
        sizes["rope_high"] = rope.real("high_freq_factor")
    if kind == "yarn":
        mscale = rope.real("mscale", default=0.0)
        rope.fix("mscale_all_dim", mscale)
        sizes |= dict(
            rope_beta_fast=rope.real("beta_fast", default=32.0),
            rope_beta_slow=rope.real("beta_slow", default=1.0),
            rope_truncate=rope.take("truncate", default=True),
            rope_mscale=mscale,
        )
    if unknown := [*rope.left]:
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
    "nemotron_h": _nemotron_h,
}
