"""Llama 2 70B, https://arxiv.org/abs/2307.09288, as NVIDIA's MaxText recipe trains it."""

from maxbench.config.recipes import workload

# remat_layers: the fewest layers with train.remat that make the step fit in memory.
LAYOUTS = """
gpu_type dtype    scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs  gbs remat_layers
h100     bf16,fp8 weak      64     80 4096  1  1  1   64  1  1  1   2  128           70
h100     bf16,fp8 weak     128     80 4096  1  1  1  128  1  1  1   2  256           58
h100     bf16,fp8 weak     256     80 4096  1  1  1  256  1  1  1   2  512           56
h100     bf16,fp8 weak     512     80 4096  1  1  4  128  1  1  1   2 1024           56
h100     bf16,fp8 weak    1024     80 4096  1  1  8  128  1  1  1   2 2048           56
h100     bf16,fp8 weak    2048     80 4096  1  1 16  128  1  1  1   2 4096           56
"""


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="llama2",
            size="70b",
            layers=80,
            embed=8192,
            heads=64,
            kv_heads=8,
            head_dim=128,
            mlp=28672,
            vocab=32000,
        ),
        train=dict(
            seq=4096,
            remat="save_dot_except_mlpwi",
        ),
        fp8=dict(train=dict(remat="save_dot_except_mlp"), precision=dict(scaling="delayed")),
        layout=dict(mbs=2),
        optim=dict(lr=3e-5, lr_min=3e-6, warmup=0.1, warmup_offset=0, eps=1e-8, decay_norms=True),
        layouts=LAYOUTS,
        launch=dict(rank=4, dtype="fp8", profile=(10, 15)),
    )
