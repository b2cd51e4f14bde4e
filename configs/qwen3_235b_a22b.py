"""Qwen3 235B-A22B, https://arxiv.org/abs/2505.09388, as NVIDIA's Megatron-Bridge recipes train it.

Tokens choose experts at random and evenly, as in the recipes' benchmarks (force_balance).
"""

from maxbench.config.recipes import workload

# Megatron-Bridge 067f987, perf_recipes/qwen. Without virtual stages a stage here has 2 pp - 1
# microbatches in flight, as each tick overlaps a forward with a backward pass, where Megatron's has
# pp: such recipes do not fit and have 3, 4 or 6 here, as other recipes of the GPU type. On H100
# the recipes have ep 32 over dp 16 x tp 2, a group of whole experts on each GPU; here ep is a part
# of dp, and tp splits each expert. On 256 H100 in FP8, ep 16 x tp 2, with as many weights per GPU,
# is predicted at 79.7 s, and ep 8 in a node, as here, at 41.8.
# Not here: 64 GB200 in FP8 and 64 GB300, whose ep 32 is larger than the 8 and 16 GPUs of a stage.
LAYOUTS = """
gpu_type dtype          scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs   gbs remat
h100     bf16           weak     256     94 4096  8  3  4    1  8  1  1   1  8192 save_context
h100     fp8            weak     256     94 4096  8  3  4    1  8  1  1   1  8192 query,key,value,context,attn_out
h100     bf16           weak     512     94 4096  8  4  1    1 32  1  2   1 16384 none
b200     bf16,fp8,nvfp4 weak      64     94 4096  8  4  1    1  8  1  1   1  2048 none
b200     bf16           weak     256     94 4096  8  4  4    1  8  1  1   1  8192 none
b200     fp8,nvfp4      weak     256     94 4096  8  3  4    1  8  1  1   1  8192 none
b200     bf16           weak     512     94 4096  8  4  8    1  8  1  1   1 16384 none
b200     fp8            weak     512     94 4096  8  3  8    1  8  1  1   1 16384 none
b300     bf16,fp8,nvfp4 weak      64     94 4096  8  4  1    1  8  1  1   2  2048 none
b300     bf16,fp8,nvfp4 weak     256     94 4096  8  3  4    1  8  1  1   2  8192 none
b300     bf16,fp8       weak     512     94 4096  8  3  8    1  8  1  1   2 16384 none
gb200    bf16           weak      64     94 4096  8  4  1    1  8  1  1   1  2048 none
gb200    bf16           weak     256     94 4096  8  3  4    1  8  1  1   1  8192 none
gb200    fp8,nvfp4      weak     256     94 4096  8  3  1    1 32  1  1   1  8192 none
gb200    bf16           weak     512     94 4096  8  3  8    1  8  1  1   1 16384 none
gb200    fp8            weak     512     94 4096  8  3  2    1 32  1  1   1 16384 none
gb300    bf16,fp8,nvfp4 weak     256     94 4096  4  6  2    1 32  1  1   2  8192 none
gb300    bf16,fp8       weak     512     94 4096  4 12  4    1 32  1  1   2 16384 none
"""  # noqa: E501


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="qwen3",
            size="235b_a22b",
            layers=94,
            embed=4096,
            heads=64,
            kv_heads=4,
            head_dim=128,
            mlp=1536,
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
        launch=dict(rank=8, aliases=("qwen", "qwen3_moe"), stops=False),
        published=dict(convention="causal"),
    )
