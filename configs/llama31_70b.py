"""Llama 3.1 70B, https://arxiv.org/abs/2407.21783, as NVIDIA's NeMo recipe trains it.

The recipe does not scale RoPE as Llama 3.1 does.
"""

from maxbench.config.recipes import workload

# H100: mbs = 2 in BF16, where its activation stash fits in memory. Blackwell: Megatron-Bridge
# 067f987, perf_recipes/llama; with fsdp it offloads the activations of 20 to 40 layers to the host,
# and the activation function is recomputed here. Of its FP8 layouts, those of MXFP8; on B300 and
# GB300 with twice their virtual stages, as more microbatches are in flight here. On GB300 in NVFP4
# FSDP over an NVLink domain and microbatches of 4, for the same batch.
LAYOUTS = """
gpu_type dtype     scaling gpus layers  seq pp vp  dp fsdp ep cp tp mbs  gbs remat                    remat_layers format
h100     bf16      weak      64     80 8192  4  5   2    1  1  2  4   2  128 none                               80 delayed
h100     bf16      weak     128     80 8192  4  5   4    1  1  2  4   2  256 none                               80 delayed
h100     bf16      weak     256     80 8192  4  5   8    1  1  2  4   2  512 none                               80 delayed
h100     bf16      weak     512     80 8192  4  5  16    1  1  2  4   2 1024 none                               80 delayed
h100     bf16      weak    1024     80 8192  4  5  32    1  1  2  4   2 2048 none                               80 delayed
h100     bf16      weak    2048     80 8192  4  5  64    1  1  2  4   2 4096 none                               80 delayed
h100     fp8       weak      64     80 8192  8  5   2    1  1  1  4   1  128 none                               80 delayed
h100     fp8       weak     128     80 8192  8  5   4    1  1  1  4   1  256 none                               80 delayed
h100     fp8       weak     256     80 8192  8  5   8    1  1  1  4   1  512 none                               80 delayed
h100     fp8       weak     512     80 8192  8  5  16    1  1  1  4   1 1024 none                               80 delayed
h100     fp8       weak    1024     80 8192  8  5  32    1  1  1  4   1 2048 none                               80 delayed
h100     fp8       weak    2048     80 8192  8  5  64    1  1  1  4   1 4096 none                               80 delayed
b200     bf16      weak      64     80 8192  4  5   4    1  1  2  2   1  256 none                               80 auto
b200     fp8,nvfp4 weak      64     80 8192  4  5   8    1  1  1  2   1  256 none                               80 auto
b200     fp8,nvfp4 weak     512     80 8192  4  5  64    1  1  1  2   1 2048 none                               80 auto
b300     bf16      weak      64     80 8192  1  1   1   64  1  1  1   1  256 save_gemms_recompute_act           80 auto
b300     fp8       weak      64     80 8192  4 10  16    1  1  1  1   1  256 save_gemms_recompute_act           80 auto
b300     nvfp4     weak      64     80 8192  4  5  16    1  1  1  1   1  256 save_gemms_recompute_act           80 auto
b300     fp8,nvfp4 weak     512     80 8192  4  5 128    1  1  1  1   1 2048 save_gemms_recompute_act           80 auto
gb200    bf16      weak      32     80 8192  1  1   1   32  1  1  1   1  128 save_gemms_recompute_act           80 auto
gb200    bf16      weak      64     80 8192  1  1   1   64  1  1  1   1  256 save_gemms_recompute_act           80 auto
gb200    fp8,nvfp4 weak      64     80 8192  4  5   8    1  1  1  2   1  256 none                               80 auto
gb200    fp8       weak     512     80 8192  1  1   8   64  1  1  1   2 2048 save_dot_except_mlp                61 auto
gb200    nvfp4     weak     512     80 8192  4  5  64    1  1  1  2   1 2048 none                               80 auto
gb300    bf16      weak      32     80 8192  1  1   1   32  1  1  1   2  128 context,attn_out,mlp_up            80 auto
gb300    bf16      weak      64     80 8192  1  1   1   64  1  1  1   2  256 context,attn_out,mlp_up            80 auto
gb300    fp8       weak      64     80 8192  4 10  16    1  1  1  1   1  256 save_gemms_recompute_act           80 auto
gb300    nvfp4     weak      64     80 8192  1  1   1   64  1  1  1   4  256 save_dot_except_mlp                60 auto
gb300    fp8       weak     512     80 8192  1  1   8   64  1  1  1   2 2048 save_dot_except_mlp                39 auto
gb300    nvfp4     weak     512     80 8192  4  5 128    1  1  1  1   1 2048 save_gemms_recompute_act           80 auto
"""  # noqa: E501


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="llama31",
            size="70b",
            layers=80,
            embed=8192,
            heads=64,
            kv_heads=8,
            head_dim=128,
            mlp=28672,
            vocab=128256,
            rope_base=500_000.0,
            init_std=0.008944,
        ),
        train=dict(
            seq=8192,
            remat="none",
        ),
        fp8=dict(
            train=dict(collective_combine_bytes=(2 << 30, 2 << 30, 64 << 20)),
            precision=dict(scaling="delayed"),
        ),
        optim=dict(lr=3e-4, lr_min=3e-5, warmup=2000, eps=1e-5),
        layouts=LAYOUTS,
        launch=dict(rank=2, aliases=("llama3.1", "llama3"), time="00:30:00", profile=(20, 25)),
    )
