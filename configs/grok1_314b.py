"""Grok-1 314B, https://github.com/xai-org/grok-1, as NVIDIA's NeMo recipe trains it.

Preset `xai`: the model as xAI released it.
"""

from maxbench.config.recipes import workload

XAI = {
    "model": {
        "vocab": 131072,
        "tied": True,
        "post_norm": True,
        "softcap": 30.0,
        "embed_multiplier": 6144**0.5,
        "output_multiplier": 3**-0.5,
        "rope_base": 10_000.0,
        "router": "softmax_topk",
        "capacity_factor": 0.0,
        "aux_loss": 0.0,
    }
}

# The largest mbs that fits in memory, in two FP8 rows if the MLP's activation is recomputed.
LAYOUTS = """
gpu_type dtype    scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs  gbs remat
h100     bf16,fp8 weak       8      2 4096  1  1  1    1  2  1  4   8 1024 none
h100     bf16,fp8 weak      16      4 4096  1  1  1    1  4  1  4   8 1024 none
h100     bf16,fp8 weak      32      4 4096  1  1  1    1  8  1  4   4 1024 none
h100     bf16,fp8 weak      64      8 8192  1  1  1    1  8  2  4   4 1024 none
h100     bf16,fp8 weak     128     16 8192  2  8  1    1  8  2  4   4 1024 none
h100     bf16     weak     256     32 8192  4  8  1    1  8  2  4   4 1024 none
h100     fp8      weak     256     32 8192  4  8  1    1  8  2  4   4 1024 save_gemms_recompute_act
h100     bf16     weak     512     64 8192  8  8  1    1  8  2  4   2 1024 none
h100     fp8      weak     512     64 8192  8  8  1    1  8  2  4   2 1024 save_gemms_recompute_act
h100     bf16,fp8 weak    1024     64 8192  8  8  2    1  8  2  4   2 2048 none
h100     bf16,fp8 weak    2048     64 8192  8  8  4    1  8  2  4   2 4096 none
"""


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="grok1",
            size="314b",
            layers=64,
            embed=6144,
            heads=48,
            kv_heads=8,
            head_dim=128,
            mlp=32768,
            vocab=128256,
            act="geglu",
            rope_base=1_000_000.0,
            init_std=0.008,
            experts=8,
            top_k=2,
            capacity_factor=1.0,
            aux_loss=0.01,
        ),
        train=dict(
            seq=8192,
            remat="none",
        ),
        fp8=dict(precision=dict(scaling="delayed")),
        optim=dict(
            lr=1.2e-4, lr_min=1.2e-5, warmup=636, warmup_offset=0, constant_steps=11873, eps=1e-8
        ),
        layouts=LAYOUTS,
        launch=dict(rank=6, aliases=("grok",), dtype="fp8", stops=False),
        published=dict(convention="causal"),
        variants={"xai": XAI},
    )
