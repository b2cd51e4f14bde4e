"""Makes golden logits with Hugging Face transformers.

Builds tiny randomly initialised models (float32, eval mode, eager attention) and writes one
`<name>.npz` per case next to this file. Each holds every parameter under the name that it has in a
checkpoint (no `lm_head.weight` when it is tied to the embedding), `tokens` (int32 [2, T]), `logits`
(float32 [2, T, V]), `config`, the text of config.json, and `versions` of the programs.

The tests read the stored files, so this is only run to make them again, all or those that are
named:

    pip install torch transformers && python tests/model/golden/make_golden.py gpt_oss
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

BATCH = 2
# Large enough that attention is far from uniform, so that RoPE mistakes show in the logits.
COMMON = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
}
LLAMA = {**COMMON, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "rms_norm_eps": 1e-5}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def llama(tie=False):
    return LlamaConfig(**LLAMA, rope_parameters=dict(DEFAULT_ROPE), tie_word_embeddings=tie)


def llama31(original_max):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original_max,
    }
    return LlamaConfig(
        **{**LLAMA, "hidden_size": 64, "head_dim": 16},
        max_position_embeddings=256,
        rope_parameters=rope,
        tie_word_embeddings=False,
    )


def nemotron():
    return NemotronConfig(
        **COMMON,
        hidden_size=48,
        intermediate_size=96,
        head_dim=12,
        norm_eps=1e-5,
        hidden_act="relu2",
        rope_parameters={**DEFAULT_ROPE, "partial_rotary_factor": 0.5},
        tie_word_embeddings=False,
    )


def mixtral():
    return MixtralConfig(
        **LLAMA,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=10,
        rope_parameters=dict(DEFAULT_ROPE),
    )


def qwen3_moe():
    return Qwen3MoeConfig(
        **{**LLAMA, "head_dim": 16, "rms_norm_eps": 1e-6},
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rope_parameters=dict(DEFAULT_ROPE),
    )


def yarn(theta, factor, **more):
    """YaRN whose three bands of frequencies are all in the few dims of a toy's head."""
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "beta_slow": 0.25}
    rope |= {"beta_fast": 4.0, "original_max_position_embeddings": 32}
    return {"rope_parameters": rope | more, "max_position_embeddings": int(32 * factor)}


def gpt_oss():
    return GptOssConfig(
        **{**LLAMA, "head_dim": 16, "num_hidden_layers": 4, "intermediate_size": 24},
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=7,
        **yarn(150000.0, 32.0, truncate=False),
    )


def deepseek_v3(groups, top):
    sizes = {"num_key_value_heads": 4, "num_hidden_layers": 3, "rms_norm_eps": 1e-6}
    return DeepseekV3Config(
        **{name: x for name, x in (LLAMA | sizes).items() if name != "head_dim"},
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=groups,
        topk_group=top,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        **yarn(10000.0, 40.0, mscale=1.0, mscale_all_dim=1.0),
    )


def nemotron_h(pattern="ME*M-", latent=None):
    """A layer of each kind, and sequences of three chunks. The class raises time steps to
    time_step_min, which Megatron does not."""
    return NemotronHConfig(
        **{name: x for name, x in COMMON.items() if name != "num_hidden_layers"},
        hybrid_override_pattern=pattern,
        hidden_size=32,
        head_dim=8,
        intermediate_size=48,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=16,
        chunk_size=8,
        time_step_min=1e-6,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        moe_latent_size=latent,
        routed_scaling_factor=2.5,
    )


# name: (model class, config, sequence length)
CASES = {
    "llama": (LlamaForCausalLM, llama(), 24),
    "llama_tied": (LlamaForCausalLM, llama(tie=True), 24),
    # One wavelength falls in the band that is interpolated (16 to 64 positions), some below, some
    # above, so that all three are exercised.
    "llama31": (LlamaForCausalLM, llama31(64), 48),
    "nemotron": (NemotronForCausalLM, nemotron(), 24),
    "mixtral": (MixtralForCausalLM, mixtral(), 24),
    "qwen3_moe": (Qwen3MoeForCausalLM, qwen3_moe(), 24),
    "gpt_oss": (GptOssForCausalLM, gpt_oss(), 48),
    "deepseek_v3": (DeepseekV3ForCausalLM, deepseek_v3(4, 2), 48),
    "kimi_k2": (DeepseekV3ForCausalLM, deepseek_v3(1, 1), 48),
    "nemotron_h": (NemotronHForCausalLM, nemotron_h(), 24),
    "nemotron_3": (NemotronHForCausalLM, nemotron_h("ME*", latent=12), 24),
}


def build(cls, config):
    """A model with random weights, its norm weights, biases and the routers' correction biases
    moved off ones and zeros."""
    torch.manual_seed(0)
    model = cls(config).float().eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim == 1 or name.endswith("bias"):
                param.add_(0.1 * torch.randn_like(param))
        if config.model_type == "gpt_oss":  # gates and up-projections beyond the clamp
            for name, param in model.named_parameters():
                if name.endswith("experts.gate_up_proj"):
                    param.mul_(6)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model


def golden(cls, config, length):
    model = build(cls, config)
    tokens = torch.randint(config.vocab_size, (BATCH, length))
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        arrays = load_file(f"{folder}/model.safetensors")
        arrays["config"] = np.array(Path(folder, "config.json").read_text())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return arrays | {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits.numpy(),
        "versions": np.array(versions),
    }


def main():
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        arrays = golden(*CASES[name])
        path = Path(__file__).with_name(f"{name}.npz")
        np.savez_compressed(path, **arrays)
        std = arrays["logits"].std()
        print(f"{path.name}: {path.stat().st_size / 1e3:.1f} kB, logits std {std:.3f}")


if __name__ == "__main__":
    main()
