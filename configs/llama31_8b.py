"""Llama 3.1 8B, https://arxiv.org/abs/2407.21783, as NVIDIA's NeMo recipe trains it.

The recipe does not scale RoPE as Llama 3.1 does.
"""

from maxbench.config.recipes import workload

# H100: mbs = 2, which fills the last wave of GEMM tiles better. save_gemms_only recomputes norms
# where memory is short: with few dp shards of the optimizer state. Blackwell: Megatron-Bridge
# 067f987, perf_recipes/llama.
LAYOUTS = """
gpu_type dtype          scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs  gbs remat format
h100     bf16,fp8       weak       8     32 8192  1  1  4    1  1  2  1   2  128 save_gemms_only delayed
h100     bf16           weak      16     32 8192  1  1  8    1  1  2  1   2  256 save_gemms_only delayed
h100     fp8            weak      16     32 8192  1  1  8    1  1  2  1   2  256 none delayed
h100     bf16,fp8       weak      32     32 8192  1  1 16    1  1  2  1   2  512 none delayed
h100     bf16,fp8       weak      64     32 8192  1  1 32    1  1  2  1   2 1024 none delayed
h100     bf16,fp8       weak     128     32 8192  1  1 64    1  1  2  1   2 2048 none delayed
b200     bf16,fp8       weak       8     32 8192  1  1  8    1  1  1  1   2  128 none auto
b200     nvfp4          weak       8     32 8192  1  1  8    1  1  1  1   4  128 none auto
b200     bf16,fp8       weak      64     32 8192  1  1 64    1  1  1  1   2 1024 none auto
b300     bf16,fp8,nvfp4 weak       8     32 8192  1  1  8    1  1  1  1   4  128 none auto
gb200    bf16,fp8       weak       8     32 8192  1  1  8    1  1  1  1   2  128 none auto
gb200    nvfp4          weak       8     32 8192  1  1  8    1  1  1  1   4  128 none auto
gb200    bf16,fp8       weak      32     32 8192  1  1 32    1  1  1  1   2  512 none auto
gb300    bf16,fp8,nvfp4 weak       8     32 8192  1  1  8    1  1  1  1   4  128 none auto
gb300    bf16,fp8,nvfp4 weak      32     32 8192  1  1 32    1  1  1  1   4  512 none auto
"""  # noqa: E501

# MLPerf Training's Closed division: mlcommons/training aa344c7, small_llm_pretraining/nemo
# (README.md, config_H200_1x8x1_8b.sh), and mlcommons/training_policies d73e20f,
# training_rules.adoc. An evaluation on 1,024 sequences after every 12,288, which another --gbs
# needs other --eval_every and --eval_steps for.
CLOSED = {
    "layout": {"gbs": 32},
    "train": {"steps": 1_200_000, "eval_every": 384, "eval_steps": 32, "target_loss": 3.3},
    "optim": {"lr": 5e-4, "lr_min": 5e-5, "warmup": 512},
    "output": {"mllog": "llama31_8b"},
}


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="llama31",
            size="8b",
            layers=32,
            embed=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=14336,
            vocab=128256,
            rope_base=500_000.0,
            init_std=0.01,
        ),
        train=dict(
            seq=8192,
            remat="none",
            collective_combine_bytes=(2 << 30, 2 << 30, 256 << 20),
        ),
        fp8=dict(precision=dict(scaling="delayed")),
        optim=dict(lr=3e-4, lr_min=3e-5, warmup=2000, eps=1e-5),
        layouts=LAYOUTS,
        launch=dict(
            rank=1, aliases=("llama3.1", "llama3"), gpus=8, time="00:30:00", profile=(20, 25)
        ),
        variants={"closed": CLOSED},
    )
