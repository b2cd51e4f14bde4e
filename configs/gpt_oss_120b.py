"""gpt-oss 120B, https://arxiv.org/abs/2508.10925, as NVIDIA's Megatron-Bridge recipes train it.

Tokens choose experts at random and evenly, as in the recipes' benchmarks (force_balance).
"""

from maxbench.config.channels import Experts
from maxbench.config.mixers import Attention
from maxbench.config.recipes import workload
from maxbench.config.sublayers import Layer

# In turn a window of 128 tokens, and full attention.
SLIDING = Layer(mixer=Attention(window=128), channel=Experts())
FULL = Layer(mixer=Attention(), channel=Experts())

# Megatron-Bridge 067f987, perf_recipes/gpt_oss. Where it recomputes norms and the activation of the
# experts, the activation is recomputed here. On H100 it has no virtual stages; without, 7
# microbatches would be in flight here and not fit.
LAYOUTS = """
gpu_type dtype    scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs   gbs remat
h100     bf16,fp8 weak      64     36 4096  4  3  2    1  8  1  1   1  1280 save_gemms_recompute_act
h100     bf16     weak     512     36 4096  4  3 16    1  8  1  1   1 10240 save_gemms_recompute_act
b200     bf16,fp8 weak      64     36 4096  1  1  8    1  8  1  1   4  1280 save_gemms_recompute_act
b200     bf16     weak     512     36 4096  1  1 64    1  8  1  1   4 10240 save_gemms_recompute_act
b300     bf16,fp8 weak      64     36 4096  1  1  8    1  8  1  1   4  1280 none
b300     bf16     weak     512     36 4096  1  1 64    1  8  1  1   4 10240 none
gb200    bf16     weak      64     36 4096  1  1  1    1 64  1  1   4  1280 save_gemms_recompute_act
gb200    fp8      weak      64     36 4096  1  1  1    1 64  1  1   4  1280 none
gb200    bf16     weak     512     36 4096  1  1  8    1 64  1  1   4 10240 save_gemms_recompute_act
gb300    bf16     weak      64     36 4096  1  1  1    1 64  1  1   4  1280 none
gb300    fp8      weak      64     36 4096  1  1  4    1 16  1  1   4  1280 none
gb300    bf16     weak     512     36 4096  1  1  8    1 64  1  1   4 10240 none
"""


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="gpt_oss",
            size="120b",
            layers=36,
            embed=2880,
            heads=64,
            kv_heads=8,
            head_dim=64,
            mlp=2880,
            vocab=201088,
            layer_groups=((18, (SLIDING, FULL)),),
            act="swiglu_clamped",
            mlp_bias=True,
            attention_bias=True,
            sinks=True,
            rope_base=150_000.0,
            rope_scaling="yarn",
            rope_factor=32.0,
            rope_context=4096,
            rope_truncate=False,
            experts=128,
            top_k=4,
            router_bias=True,
            capacity_factor=0.0,
            force_balance=True,
        ),
        train=dict(
            seq=4096,
            remat="none",
        ),
        optim=dict(lr=3e-4, lr_min=3e-5, warmup=2000, eps=1e-5),
        layouts=LAYOUTS,
        launch=dict(rank=9, aliases=("gpt-oss", "gptoss"), stops=False),
        published=dict(convention="causal"),
    )
