"""Llama 3.1 70B, https://arxiv.org/abs/2407.21783, as NVIDIA's NeMo recipe trains it.

The recipe does not scale RoPE as Llama 3.1 does.
"""

from maxbench.config.recipes import workload

# mbs = 2 in BF16, where its activation stash fits in memory.
LAYOUTS = """
gpu_type  dtype  scaling  gpus  layers   seq  pp  vp  dp  fsdp  ep  cp  tp  mbs   gbs
h100      bf16   weak       64      80  8192   4   5   2     1   1   2   4    2   128
h100      bf16   weak      128      80  8192   4   5   4     1   1   2   4    2   256
h100      bf16   weak      256      80  8192   4   5   8     1   1   2   4    2   512
h100      bf16   weak      512      80  8192   4   5  16     1   1   2   4    2  1024
h100      bf16   weak     1024      80  8192   4   5  32     1   1   2   4    2  2048
h100      bf16   weak     2048      80  8192   4   5  64     1   1   2   4    2  4096
h100      fp8    weak       64      80  8192   8   5   2     1   1   1   4    1   128
h100      fp8    weak      128      80  8192   8   5   4     1   1   1   4    1   256
h100      fp8    weak      256      80  8192   8   5   8     1   1   1   4    1   512
h100      fp8    weak      512      80  8192   8   5  16     1   1   1   4    1  1024
h100      fp8    weak     1024      80  8192   8   5  32     1   1   1   4    1  2048
h100      fp8    weak     2048      80  8192   8   5  64     1   1   1   4    1  4096
"""


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
