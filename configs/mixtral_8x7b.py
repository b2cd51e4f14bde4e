"""Mixtral 8x7B, https://arxiv.org/abs/2401.04088, as NVIDIA's NeMo recipes train it.

Layouts: NVIDIA/NeMo, scripts/performance/recommended_model_configs. No figure is published.
"""

from maxbench.config.recipes import workload

LAYOUTS = """
gpu_type     dtype    scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs gbs
h100         bf16,fp8 weak      64     32 4096  4  8  2    1  8  1  1   1 256
b200         bf16,fp8 weak      64     32 4096  1  1  8    1  8  1  1   2 256
gb200        bf16,fp8 weak      64     32 4096  1  1  8    1  8  1  1   2 256
"""


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="mixtral",
            size="8x7b",
            layers=32,
            embed=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=14336,
            vocab=32000,
            rope_base=1_000_000.0,
            init_std=0.02,
            experts=8,
            top_k=2,
            capacity_factor=0.0,
            force_balance=True,
        ),
        train=dict(
            seq=4096,
            remat="none",
        ),
        optim=dict(lr=3e-4, lr_min=3e-5, warmup=500, eps=1e-5),
        layouts=LAYOUTS,
        launch=dict(rank=13, stops=False),
    )
