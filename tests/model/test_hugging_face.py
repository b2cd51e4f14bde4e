"""Logits, weights and config.json of today's models against transformers' own classes."""

import dataclasses
import functools
import json
import pathlib

import flax.linen as nn
import jax
import ml_dtypes
import numpy as np
import pytest

from maxbench.config import hugging_face_config
from maxbench.config.errors import UserError
from maxbench.config.mixers import Mamba2
from maxbench.config.model import Model
from maxbench.model import hugging_face, transformer
from tests.conftest import resolve

GOLDEN = pathlib.Path(__file__).with_name("golden")
NAMES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "kimi_k2", "nemotron_h", "nemotron_3")


def golden(name: str) -> tuple[Model, dict, np.ndarray, np.ndarray]:
    """The Model of a case's config.json, its tensors, tokens and logits; without MTP, which the
    class of transformers has not."""
    tensors = dict(np.load(GOLDEN / f"{name}.npz"))
    tokens_bt, logits_btv, config, _ = (
        tensors.pop(x) for x in ("tokens", "logits", "config", "versions")
    )
    m = hugging_face_config.model_of(json.loads(str(config)), "toy")
    return dataclasses.replace(m, mtp_layers=0), tensors, tokens_bt, logits_btv


@functools.cache
def network(m: Model):
    return jax.jit(transformer.Transformer(m).apply)


def error(m: Model, params, tokens_bt: np.ndarray, expected: np.ndarray) -> float:
    """Largest error of the logits over the largest logit."""
    logits = network(m)({"params": params}, tokens_bt)
    return float(np.abs(np.asarray(logits) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_the_class_and_weights_are_converted_back(name):
    m, tensors, tokens_bt, logits_btv = golden(name)
    params = hugging_face.from_hugging_face(m, tensors)
    assert error(m, params, tokens_bt, logits_btv) < 1e-5
    converted = hugging_face.to_hugging_face(m, params)
    assert converted.keys() == tensors.keys()
    jax.tree.map(np.testing.assert_array_equal, converted, tensors)


PARTS = [
    ("mixtral", {"window": 0}),
    ("qwen3_moe", {"router": "softmax_topk"}),  # weights that do not sum to 1
    ("gpt_oss", {"rope_truncate": True}),
    ("gpt_oss", {"act": "swiglu"}),
    ("gpt_oss", {"layer_groups": (), "window": 7}),
    ("deepseek_v3", {"rope_mscale": 0.0}),
    ("deepseek_v3", {"router_groups": 1, "router_groups_top": 1}),
    ("nemotron_h", {"rope_fraction": 1.0}),
    ("nemotron_h", {"router_scale": 1.0}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "without"), PARTS, ids=str)
def test_each_part_shows_in_the_logits(name, without):
    """The logits above would not be equal without it."""
    m, tensors, tokens_bt, logits_btv = golden(name)
    params = hugging_face.from_hugging_face(m, tensors)
    if "layer_groups" in without:
        stacks = params["layers"].values()
        both = lambda *x: np.stack(x, 1).reshape(-1, *x[0].shape[1:])
        params |= {"layers": jax.tree.map(both, *stacks)}
    changed = dataclasses.replace(m, **without)
    assert error(changed, params, tokens_bt, logits_btv) > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "path",
    [
        ("mlp", "expert_bias"),
        ("mlp", "up_bias"),
        ("mlp", "down_bias"),
        ("mlp", "router_bias"),
        ("attn", "sinks"),
        ("attn", "qkv", "bias"),
        ("attn", "out", "bias"),
        ("attn", "q_norm", "scale"),
        ("attn", "a_log"),
        ("attn", "dt_bias"),
        ("attn", "conv_bias"),
        ("attn", "skip_scale"),
        ("attn", "norm_scale"),
    ],
    ids=lambda path: "-".join(path),
)
def test_small_weights_show_in_the_logits(path):
    name = {"expert_bias": "deepseek_v3", "scale": "qwen3_moe"}.get(path[-1], "gpt_oss")
    name = "nemotron_h" if path[-1] in Mamba2().weight_axes() else name
    m, tensors, tokens_bt, logits_btv = golden(name)
    params = hugging_face.from_hugging_face(m, tensors)
    stacks = [params["layers"]] if len(m.kinds) == 1 else params["layers"].values()
    layer = [stack for stack in stacks if path[1] in stack.get(path[0], {})][-1]
    for key in path[:-1]:
        layer = layer[key]
    layer[path[-1]][...] = 0
    assert error(m, params, tokens_bt, logits_btv) > 1e-3


def mtp_tensors(m: Model, tensors: dict) -> dict:
    """Random tensors of multi-token prediction."""
    random = np.random.default_rng(0)
    init = lambda key: nn.unbox(transformer.init(m, key))
    zeros = lambda x: np.zeros(x.shape, np.float32)
    params = jax.tree.map(zeros, jax.eval_shape(init, jax.random.key(0)))
    shapes = hugging_face.to_hugging_face(m, params)
    return {k: random.standard_normal(x.shape).astype(np.float32) for k, x in shapes.items()
            if k not in tensors}  # fmt: skip


def test_multi_token_prediction_of_nemotron_3_is_converted_and_back():
    """Under the names of the published files: a layer of attention, then one of experts."""
    tensors = dict(np.load(GOLDEN / "nemotron_3.npz"))
    config = json.loads(str(tensors.pop("config"))) | {"num_nextn_predict_layers": 1}
    for name in ("tokens", "logits", "versions"):
        del tensors[name]
    m = hugging_face_config.model_of(config)
    mtp = mtp_tensors(m, tensors)
    whole = {name.removeprefix("mtp.layers."): x.shape for name, x in mtp.items()}
    ends = ("enorm", "hnorm", "eh_proj", "norm", "final_layernorm")
    assert {name for name in whole if name.split(".")[1] in ends} == {
        *(f"0.{name}.weight" for name in ends[:4]), "1.norm.weight", "1.final_layernorm.weight"
    }  # fmt: skip
    assert whole["0.mixer.q_proj.weight"] == (m.heads * m.head_dim, m.embed)
    of_expert = (m.mtp_layer.channel.mlp, m.expert_latent)
    assert whole["1.mixer.experts.7.up_proj.weight"] == of_expert
    assert whole["1.mixer.gate.e_score_correction_bias"] == (m.experts,)
    params = hugging_face.from_hugging_face(m, tensors | mtp)
    converted = hugging_face.to_hugging_face(m, params)
    assert converted.keys() == {*tensors, *mtp}
    jax.tree.map(np.testing.assert_array_equal, converted, tensors | mtp)
    with pytest.raises(UserError, match=r"mtp.layers.0\..* is missing: .*mtp=False"):
        hugging_face.from_hugging_face(m, tensors)


def test_multi_token_prediction_is_converted_and_back():
    m, tensors, _, _ = golden("deepseek_v3")
    m = dataclasses.replace(m, mtp_layers=1)
    mtp = mtp_tensors(m, tensors)
    prefix = "model.layers.3"
    assert mtp[f"{prefix}.eh_proj.weight"].shape == (m.embed, 2 * m.embed)
    mtp[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    mtp[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"]
    params = hugging_face.from_hugging_face(m, tensors | mtp)
    jax.tree.map(
        np.testing.assert_array_equal, hugging_face.to_hugging_face(m, params), tensors | mtp
    )
    first = params["mtp"]["input"]["projection"]["w"][0]  # of the embedding
    theirs = mtp[f"{prefix}.eh_proj.weight"]
    np.testing.assert_array_equal(first, theirs[:, : m.embed].T)
    mtp[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(UserError, match=r"shared_head.head.weight is not lm_head.weight"):
        hugging_face.from_hugging_face(m, tensors | mtp)


def test_checkpoint_without_multi_token_prediction_is_loaded_if_asked(tmp_path):
    """transformers saves no tensors of it, and a config.json that announces it."""
    _, tensors, _, _ = golden("deepseek_v3")
    config = tmp_path / "config.json"
    config.write_text(str(np.load(GOLDEN / "deepseek_v3.npz")["config"]))
    announced = hugging_face_config.read_config(config)
    assert announced.mtp_layers == 1
    with pytest.raises(UserError, match=r"model.layers.3\..* is missing: .*mtp=False"):
        hugging_face.from_hugging_face(announced, tensors)
    m = hugging_face_config.read_config(config, mtp=False)
    converted = hugging_face.to_hugging_face(m, hugging_face.from_hugging_face(m, tensors))
    assert converted.keys() == tensors.keys()
    more = tensors | {"model.layers.3.enorm.weight": np.ones(m.embed)}
    with pytest.raises(UserError, match="leave the tensors of multi-token prediction out"):
        hugging_face.from_hugging_face(m, more)


# Fields as the models' config.json files have them, written out here: not copies of the files.
LLAMA31_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA31_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GPT_OSS = dict(
    model_type="gpt_oss", attention_bias=True, experts_per_token=4, head_dim=64,
    hidden_act="silu", hidden_size=2880, initial_context_length=4096, initializer_range=0.02,
    intermediate_size=2880, max_position_embeddings=131072, num_attention_heads=64,
    num_experts_per_tok=4, num_key_value_heads=8, rms_norm_eps=1e-5,
    rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, rope_type="yarn",
                      original_max_position_embeddings=4096, truncate=False),
    rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
    tie_word_embeddings=False, vocab_size=201088,
)  # fmt: skip
QWEN3 = dict(
    model_type="qwen3_moe", attention_bias=False, attention_dropout=0.0, decoder_sparse_step=1,
    head_dim=128, hidden_act="silu", initializer_range=0.02, intermediate_size=6144,
    max_window_layers=48, mlp_only_layers=[], norm_topk_prob=True, num_experts=128,
    num_experts_per_tok=8, num_key_value_heads=4, rms_norm_eps=1e-6, rope_scaling=None,
    rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None,
    tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
MIXTRAL = dict(
    model_type="mixtral", attention_dropout=0.0, hidden_act="silu", hidden_size=4096,
    initializer_range=0.02, intermediate_size=14336, num_attention_heads=32,
    num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8,
    output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1000000.0,
    router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False, vocab_size=32000,
)  # fmt: skip
DEEPSEEK = dict(
    model_type="deepseek_v3", attention_bias=False, attention_dropout=0.0, ep_size=1,
    first_k_dense_replace=3, hidden_act="silu", hidden_size=7168, initializer_range=0.02,
    intermediate_size=18432, kv_lora_rank=512, max_position_embeddings=163840,
    moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256,
    n_shared_experts=1, norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8,
    num_hidden_layers=61, num_key_value_heads=128, num_nextn_predict_layers=1, q_lora_rank=1536,
    qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6, rope_theta=10000,
    rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                      original_max_position_embeddings=4096, type="yarn"),
    routed_scaling_factor=2.5, scoring_func="sigmoid", tie_word_embeddings=False, topk_group=4,
    topk_method="noaux_tc", v_head_dim=128, vocab_size=129280,
)  # fmt: skip
NEMOTRON = dict(
    model_type="nemotron", hidden_size=6144, intermediate_size=24576, num_attention_heads=48,
    num_hidden_layers=32, num_key_value_heads=8, vocab_size=256000, rope_theta=10000.0,
)  # fmt: skip
NANO = dict(
    model_type="nemotron_h", chunk_size=128, conv_kernel=4, expand=2, head_dim=128,
    hidden_size=2688, hybrid_override_pattern="MEMEM*E" * 5 + "MEMEMEM*EMEMEMEME",
    intermediate_size=1856, layer_norm_epsilon=1e-5, mamba_head_dim=64, mamba_hidden_act="silu",
    mamba_num_heads=64, mamba_proj_bias=False, mlp_bias=False, mlp_hidden_act="relu2",
    moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, n_group=1, n_groups=8,
    n_routed_experts=128, n_shared_experts=1, norm_eps=1e-5, norm_topk_prob=True,
    num_attention_heads=32, num_experts_per_tok=6, num_hidden_layers=52, num_key_value_heads=2,
    partial_rotary_factor=1.0, residual_in_fp32=False, rope_theta=10000, sliding_window=None,
    routed_scaling_factor=2.5, ssm_state_size=128, time_step_floor=1e-4, topk_group=1,
    use_bias=False, use_conv_bias=True, use_mamba_kernels=True, vocab_size=131072,
)  # fmt: skip
SUPER = NANO | dict(
    hidden_size=4096, mamba_num_heads=128, num_hidden_layers=88, n_routed_experts=512,
    num_experts_per_tok=22, moe_intermediate_size=2688, intermediate_size=2688,
    moe_latent_size=1024, moe_shared_expert_intermediate_size=5376, routed_scaling_factor=5.0,
    hybrid_override_pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
    "EMEMEMEM*EMEMEMEME", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E",
)  # fmt: skip
CONFIGS = {
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK
    | dict(model_type="kimi_k2", first_k_dense_replace=1, n_group=1, topk_group=1, seq_aux=True)
    | dict(n_routed_experts=384, num_attention_heads=64, num_key_value_heads=64)
    | dict(num_nextn_predict_layers=0, rope_theta=50000.0, vocab_size=163840)
    | dict(routed_scaling_factor=2.827, aux_loss_alpha=0.001)
    | dict(rope_scaling=DEEPSEEK["rope_scaling"] | dict(factor=32.0, beta_fast=1.0, beta_slow=1.0)),
    "nemotron_3_nano": NANO,
    "nemotron_3_super": SUPER,
    "nemotron_3_ultra": SUPER
    | dict(hidden_size=8192, mamba_num_heads=256, num_attention_heads=64, num_hidden_layers=108)
    | dict(moe_intermediate_size=5120, intermediate_size=5120, moe_latent_size=2048)
    | dict(moe_shared_expert_intermediate_size=10240)
    | dict(hybrid_override_pattern=4 * "MEMEMEM*EMEMEM*EMEMEMEM*E" + "MEMEMEME"),
    "nemotron_h_56b": NANO
    | dict(hidden_size=8192, intermediate_size=32768, mamba_num_heads=256, num_hidden_layers=118)
    | dict(num_attention_heads=64, num_key_value_heads=8, ssm_state_size=256)
    | dict(hybrid_override_pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"),
    "mixtral_8x7b": MIXTRAL,
    "qwen3_30b_a3b": QWEN3
    | dict(hidden_size=2048, num_attention_heads=32, num_hidden_layers=48)
    | dict(moe_intermediate_size=768),
    "qwen3_235b_a22b": QWEN3
    | dict(hidden_size=4096, num_attention_heads=64, num_hidden_layers=94)
    | dict(moe_intermediate_size=1536, intermediate_size=12288),
    "gpt_oss_20b": GPT_OSS
    | dict(num_hidden_layers=24, num_local_experts=32)
    | dict(layer_types=["sliding_attention", "full_attention"] * 12),
    "gpt_oss_120b": GPT_OSS
    | dict(num_hidden_layers=36, num_local_experts=128)
    | dict(layer_types=["sliding_attention", "full_attention"] * 18),
}
# Settings of training, which config.json does not have.
TRAINING = ("name", "size", "init_std", "force_balance", "aux_loss", "capacity_factor")
TRAINING += ("expert_bias_rate", "dispatch_factor", "mtp_loss")


@pytest.mark.parametrize("workload", CONFIGS)
def test_config_file_describes_the_model_of_the_workload_file(workload):
    ours, theirs = resolve(workload).model, hugging_face_config.model_of(CONFIGS[workload])
    same = {name: getattr(ours, name) for name in TRAINING}
    if theirs.mtp_block:  # whose uses in training a file does not tell
        same |= {"mtp_layers": ours.mtp_layers}
    assert dataclasses.replace(theirs, **same) == ours


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gemma3"}, "model_type='gemma3'; understood are llama, nemotron"),
        ({"attn_logit_softcap": 50.0}, "attn_logit_softcap=50.0, which is not understood; remove"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False, and only True is understood"),
        ({"num_experts": None}, "has no num_experts, which model_type='qwen3_moe' needs"),
        ({"num_experts": "128"}, "num_experts='128', which is no whole number"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6', which is no number"),
        ({"hidden_size": 2050, "head_dim": None}, "num_attention_heads=32 do not divide"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\], which must be an object, as"),
        ({"rope_parameters": "yarn"}, "rope_parameters='yarn', which must be an object"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; understood are"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\], and only \[\] is understood"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'; under"),
        ({"rope_scaling": LLAMA31_ROPE | {"x": 1}}, "x=1 in its RoPE of type llama3"),
        ({"layer_types": ["linear_attention"] * 48}, "layer_types=.*, and only"),
    ],
    ids=str,
)
def test_config_file_that_is_not_understood_is_refused(change, text):
    with pytest.raises(UserError, match=text):
        hugging_face_config.model_of(CONFIGS["qwen3_30b_a3b"] | change)


def test_layers_of_nemotron_h_that_are_not_understood_are_refused():
    with pytest.raises(UserError, match="a layer of kind 'D'; understood are"):
        hugging_face_config.model_of(NANO | dict(hybrid_override_pattern="MD" * 26))
    with pytest.raises(UserError, match="num_hidden_layers=52, and kinds of 2 layers"):
        hugging_face_config.model_of(NANO | dict(hybrid_override_pattern="ME"))
    mtp = dict(num_nextn_predict_layers=1, mtp_hybrid_override_pattern="E*")
    with pytest.raises(UserError, match=r"mtp_hybrid_override_pattern='E\*'; understood are a mix"):
        hugging_face_config.model_of(NANO | mtp)
    with pytest.raises(UserError, match="num_nextn_predict_layers=2, layers with weights of"):
        hugging_face_config.model_of(DEEPSEEK | dict(num_nextn_predict_layers=2))


def config_without(workload: str, *fields: str) -> dict:
    return {k: v for k, v in CONFIGS[workload].items() if k not in fields}


@pytest.mark.parametrize(
    ("config", "field", "expected"),
    [
        (config_without("mixtral_8x7b", "rope_theta"), "rope_base", 1_000_000.0),
        (config_without("mixtral_8x7b", "num_key_value_heads"), "kv_heads", 8),
        (CONFIGS["mixtral_8x7b"] | {"num_key_value_heads": None}, "kv_heads", 32),
        (config_without("qwen3_30b_a3b", "num_key_value_heads"), "kv_heads", 4),
        (config_without("qwen3_30b_a3b", "head_dim"), "head_dim", 64),
        (
            config_without("qwen3_30b_a3b", "use_sliding_window") | {"sliding_window": 9},
            "window",
            0,
        ),
        (config_without("qwen3_30b_a3b", "rms_norm_eps"), "norm_eps", 1e-6),
        (config_without("gpt_oss_20b", "head_dim"), "head_dim", 64),
        (config_without("gpt_oss_20b", "attention_bias"), "attention_bias", True),
        (config_without("gpt_oss_20b", "rope_theta"), "rope_base", 150_000.0),
        (config_without("gpt_oss_20b", "rope_scaling"), "rope_truncate", False),
        (NEMOTRON, "rope_fraction", 0.5),
        (NEMOTRON | {"partial_rotary_factor": 1.0}, "rope_fraction", 1.0),
        (NEMOTRON, "norm_eps", 1e-5),
        (NEMOTRON, "init_std", 0.0134),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_field_that_is_left_out_has_the_default_of_transformers(config, field, expected):
    """Those of its configuration classes, release 5.24.0."""
    assert getattr(hugging_face_config.model_of(config), field) == expected


def test_layer_types_of_gpt_oss_alternate_by_default():
    with_them = hugging_face_config.model_of(CONFIGS["gpt_oss_20b"])
    without = hugging_face_config.model_of(config_without("gpt_oss_20b", "layer_types"))
    assert without == with_them


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (config_without("qwen3_30b_a3b", "norm_topk_prob"), "no norm_topk_prob, which is False by"),
        (config_without("deepseek_v3", "num_nextn_predict_layers"), "no num_nextn_predict_layers"),
        (config_without("mixtral_8x7b", "hidden_size"), "has no hidden_size"),
    ],
    ids=("norm_topk_prob", "mtp", "hidden_size"),
)
def test_field_without_a_default_that_is_understood_is_required(config, text):
    with pytest.raises(UserError, match=text):
        hugging_face_config.model_of(config)


def test_config_files_of_older_models_are_understood(tmp_path):
    llama = dict(
        model_type="llama", hidden_act="silu", hidden_size=4096, intermediate_size=14336,
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5,
        rope_theta=500000.0, rope_scaling=LLAMA31_ROPE, vocab_size=128256, mlp_bias=False,
    )  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(llama))
    m = hugging_face_config.read_config(path, "8b")
    ours = resolve("llama31_8b").model
    same = dict(name="llama31", init_std=ours.init_std, rope_factor=1.0)
    assert dataclasses.replace(m, **same, capacity_factor=ours.capacity_factor) == ours
    assert (m.rope_factor, m.rope_context, m.rope_scaling) == (8.0, 8192, "llama3")
    path.write_text("[1]")
    with pytest.raises(UserError, match="must be a JSON object, and is a list"):
        hugging_face_config.read_config(path)


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (ml_dtypes.float8_e4m3fn, "of type float8_e4m3fn, .*multiply it by its scales first"),
        (np.uint16, r"of type uint16, .*tensor.view\(ml_dtypes.bfloat16\)"),
        (np.uint8, "of type uint8, .*it is quantized or damaged"),
        (np.int64, "of type int64, and weights are float16, bfloat16, float32, float64"),
        (bool, "of type bool"),
        (complex, "of type complex128"),
        (list, "of type list, .*pass numpy arrays"),
    ],
)
def test_tensor_that_is_no_plain_weight_is_refused(dtype, text):
    m, tensors, _, _ = golden("mixtral")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensor = tensors[name].tolist() if dtype is list else tensors[name].astype(dtype)
    with pytest.raises(UserError, match=f"{name} is {text}"):
        hugging_face.from_hugging_face(m, tensors | {name: tensor})


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_weights_of_other_widths_are_read(dtype):
    m, tensors, _, _ = golden("mixtral")
    narrow = {name: x.astype(dtype) for name, x in tensors.items()}
    params = hugging_face.from_hugging_face(m, narrow, dtype)
    jax.tree.map(np.testing.assert_array_equal, hugging_face.to_hugging_face(m, params), narrow)


def test_quantized_tensors_and_models_without_a_format_are_refused():
    m, tensors, _, _ = golden("gpt_oss")
    key = "model.layers.0.mlp.experts.gate_up_proj"
    packed = {k: v for k, v in tensors.items() if k != key} | {f"{key}_blocks": tensors[key]}
    with pytest.raises(UserError, match=r"gate_up_proj is missing: .*MXFP4 tensors to bf16"):
        hugging_face.from_hugging_face(m, packed)
    for change in ({"mlp_bias": False}, {"router_bias": False}, {"act": "geglu"}):
        with pytest.raises(UserError, match="no supported Hugging Face format: supported are"):
            hugging_face.from_hugging_face(dataclasses.replace(m, **change), tensors)
