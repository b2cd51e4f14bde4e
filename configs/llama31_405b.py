"""Llama 3.1 405B, https://arxiv.org/abs/2407.21783, as NVIDIA's NeMo recipe trains it."""

from maxbench.config.recipes import workload

# H100: mbs above 1, or a microbatch_group_size above pp, where their activation stash fits in
# memory. Blackwell: Megatron-Bridge 067f987, perf_recipes/llama; where it offloads the activations
# of 40 layers to the host, they are recomputed. Of its FP8 layouts, those of MXFP8; on B300 with
# twice their virtual stages, as more microbatches are in flight here. On GB300, and on GB200 in
# NVFP4, FSDP over NVLink domains in place of its pipelines with tp: microbatches of 2 or 3
# sequences, for the same batch, and no collectives of activations. Rows of 512 GPUs are those of
# Exemplar Performance.
LAYOUTS = """
gpu_type dtype          scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs  gbs remat                            remat_layers format  microbatch_group_size
h100     bf16,fp8       weak      32      8 8192  1  1  2    1  1  2  8   4   64 none                             auto         delayed auto
h100     bf16,fp8       weak      64     30 8192  4  8  1    1  1  2  8   4   64 none                             auto         delayed auto
h100     bf16           weak     128     62 8192  4  8  2    1  1  2  8   1  128 none                             auto         delayed 8
h100     fp8            weak     128     62 8192  4  8  2    1  1  2  8   2  128 none                             auto         delayed auto
h100     bf16,fp8       weak     512    126 8192  8  8  4    1  1  2  8   1  256 none                             auto         delayed auto
h100     bf16,fp8       weak    1024    126 8192  8  8  8    1  1  2  8   1  512 none                             auto         delayed auto
h100     bf16,fp8       weak    2048    126 8192  8  8 16    1  1  2  8   1 1024 none                             auto         delayed auto
b200     bf16,fp8,nvfp4 weak     128    126 8192 16  8  2    1  1  1  4   1  768 context,attn_out,mlp_up          auto         auto    auto
b200     nvfp4          weak     256    126 8192 16  8  4    1  1  1  4   1 1536 none                             auto         auto    auto
b200     fp8            weak     512    126 8192  8  8  8    1  1  2  4   1 3072 context,attn_out,mlp_up          auto         auto    auto
b200     nvfp4          weak     512    126 8192 16  8  8    1  1  1  4   1 3072 none                             auto         auto    auto
b300     bf16           weak     128    126 8192  1  1  1   64  1  1  2   1  768 save_dot_except_mlp              auto         auto    auto
b300     fp8            weak     128    126 8192  8  8  4    1  1  2  2   1  768 query,key,value,context,attn_out auto         auto    auto
b300     nvfp4          weak     128    126 8192  8  4  4    1  1  1  4   1  768 none                             auto         auto    auto
b300     bf16           weak     256    126 8192  1  1  1  128  1  1  2   1 1536 save_dot_except_mlp              auto         auto    auto
b300     fp8            weak     512    126 8192  8  4 16    1  1  1  4   1 3072 query,key,value,context,attn_out auto         auto    auto
b300     nvfp4          weak     512    126 8192  8  4 16    1  1  1  4   1 3072 none                             auto         auto    auto
gb200    bf16,fp8       weak     128    126 8192 16  8  2    1  1  1  4   1  768 context,attn_out,mlp_up          auto         auto    auto
gb200    nvfp4          weak     128    126 8192  1  1  1  128  1  1  1   2  768 full                             auto         auto    auto
gb200    bf16           weak     256    126 8192 16  8  4    1  1  1  4   1 1536 none                             auto         auto    auto
gb200    nvfp4          weak     256    126 8192  1  1  1  256  1  1  1   3 1536 full                             auto         auto    auto
gb200    fp8            weak     256    126 8192 16  8  4    1  1  1  4   1 1536 save_gemms_recompute_act         auto         auto    auto
gb200    fp8            weak     512    126 8192 16  4  8    1  1  1  4   1 3072 save_gemms_recompute_act         auto         auto    auto
gb200    nvfp4          weak     512    126 8192 16  8  8    1  1  1  4   1 3072 none                             auto         auto    auto
gb300    bf16           weak     128    126 8192  1  1  1  128  1  1  1   1  768 save_dot_except_mlp              90           auto    auto
gb300    fp8            weak     128    126 8192  1  1  1  128  1  1  1   2  768 full                             auto         auto    auto
gb300    nvfp4          weak     128    126 8192  1  1  1  128  1  1  1   3  768 full                             auto         auto    auto
gb300    bf16           weak     256    126 8192  1  1  1  256  1  1  1   2 1536 save_dot_except_mlp              auto         auto    auto
gb300    fp8            weak     256    126 8192  1  1  1  256  1  1  1   3 1536 full                             auto         auto    auto
gb300    nvfp4          weak     256    126 8192  1  1  1  256  1  1  1   3 1536 save_context                     auto         auto    auto
gb300    fp8            weak     512    126 8192  8  4 16    1  1  1  4   1 3072 context,attn_out,mlp_up          auto         auto    auto
gb300    nvfp4          weak     512    126 8192  8  4 16    1  1  1  4   1 3072 none                             auto         auto    auto
"""  # noqa: E501


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="llama31",
            size="405b",
            layers=126,
            embed=16384,
            heads=128,
            kv_heads=8,
            head_dim=128,
            mlp=53248,
            vocab=128256,
            rope_base=500_000.0,
            rope_factor=8.0,
            init_std=0.02,
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
        launch=dict(rank=3, aliases=("llama3.1", "llama3"), time="00:30:00", profile=(20, 25)),
        published=dict(kv_heads=16),  # that the published MFU assumes; the model has 8
    )
