"""Qwen3 30B-A3B, https://arxiv.org/abs/2505.09388, as NVIDIA's Megatron-Bridge recipes train it.

Tokens choose experts at random and evenly, as in the recipes' benchmarks (force_balance); without
it the router is Qwen3's own: softmax over the chosen experts.
"""

from maxbench.config.recipes import workload

# Megatron-Bridge 067f987, perf_recipes/qwen. FP8 is MXFP8 on Blackwell, current scaling on H100.
# Layers are unrolled, and the halves of a microbatch of several sequences run in turn: the step is
# 8 to 18 % shorter, and compiles for 5 minutes on two cores in place of half a minute. In NVFP4 it
# compiles for more than 11.
LAYOUTS = """
gpu_type dtype    scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs  gbs unroll_layers two_batch_overlap
h100     bf16,fp8 weak      16     48 4096  1  1  1    1 16  1  1   1 1024 48            false
h100     bf16,fp8 weak      64     48 4096  1  1  4    1 16  1  1   1 4096 48            false
b200     bf16,fp8 weak       8     48 4096  1  1  1    1  8  1  1   4  512 48            true
b200     nvfp4    weak       8     48 4096  1  1  1    1  8  1  1   4  512 auto          false
b200     bf16,fp8 weak      64     48 4096  1  1  8    1  8  1  1   4 4096 48            true
b300     bf16,fp8 weak       8     48 4096  1  1  1    1  8  1  1   8  512 48            true
b300     nvfp4    weak       8     48 4096  1  1  1    1  8  1  1   8  512 auto          false
gb200    bf16,fp8 weak       8     48 4096  1  1  1    1  8  1  1   4  512 48            true
gb200    nvfp4    weak       8     48 4096  1  1  1    1  8  1  1   4  512 auto          false
gb200    bf16,fp8 weak      32     48 4096  1  1  4    1  8  1  1   4 2048 48            true
gb300    bf16,fp8 weak       8     48 4096  1  1  1    1  8  1  1   8  512 48            true
gb300    nvfp4    weak       8     48 4096  1  1  1    1  8  1  1   8  512 auto          false
gb300    bf16,fp8 weak      32     48 4096  1  1  4    1  8  1  1   8 2048 48            true
"""  # noqa: E501


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="qwen3",
            size="30b_a3b",
            layers=48,
            embed=2048,
            heads=32,
            kv_heads=4,
            head_dim=128,
            mlp=768,
            vocab=151936,
            norm_eps=1e-6,
            rope_base=1_000_000.0,
            qk_norm=True,
            experts=128,
            top_k=8,
            capacity_factor=0.0,
            force_balance=True,
            aux_loss=0.001,
        ),
        train=dict(
            seq=4096,
            remat="none",
        ),
        optim=dict(lr=3e-4, lr_min=3e-5, warmup=500, eps=1e-5),
        layouts=LAYOUTS,
        launch=dict(rank=7, aliases=("qwen", "qwen3_moe"), stops=False),
        published=dict(convention="causal"),
    )
