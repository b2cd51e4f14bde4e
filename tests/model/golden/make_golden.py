"""Make golden logits with Hugging Face transformers.

Builds tiny randomly initialised Llama and Nemotron models (float32, eval mode, eager attention)
and writes one `<name>.npz` per case next to this file. Each holds every parameter under its
Hugging Face name (no `lm_head.weight` when it is tied to the embedding), `tokens` (int32 [2, T]),
`logits` (float32 [2, T, V]) and `versions`, a string that says what the file was made with.

The stored files are what the tests read, so this is only run to make them again:

    pip install torch transformers && python tests/model/golden/make_golden.py
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, NemotronConfig, NemotronForCausalLM

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


# name: (model class, config, sequence length)
CASES = {
    "llama": (LlamaForCausalLM, llama(), 24),
    "llama_tied": (LlamaForCausalLM, llama(tie=True), 24),
    # One wavelength falls in the band that is interpolated (16 to 64 positions), some below, some
    # above, so that all three are exercised.
    "llama31": (LlamaForCausalLM, llama31(64), 48),
    "nemotron": (NemotronForCausalLM, nemotron(), 24),
}


def build(cls, config):
    """A model with random weights, its norm weights and biases moved off ones and zeros."""
    torch.manual_seed(0)
    model = cls(config).float().eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.add_(0.1 * torch.randn_like(param))
    return model


def golden(cls, config, length):
    model = build(cls, config)
    tokens = torch.randint(config.vocab_size, (BATCH, length))
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    arrays = {
        name: value.numpy()
        for name, value in model.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return arrays | {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits.numpy(),
        "versions": np.array(versions),
    }


def main():
    torch.set_num_threads(1)
    for name, case in CASES.items():
        arrays = golden(*case)
        path = Path(__file__).with_name(f"{name}.npz")
        np.savez_compressed(path, **arrays)
        std = arrays["logits"].std()
        print(f"{path.name}: {path.stat().st_size / 1e3:.1f} kB, logits std {std:.3f}")


if __name__ == "__main__":
    main()
