"""Nemotron-4 340B, https://arxiv.org/abs/2406.11704, as NVIDIA's NeMo recipes train it.

Preset `bf16_state`: the optimizer of the older recipe, with bf16 weights and moments instead of an
fp32 master copy; its arithmetic is fp32.
"""

from maxbench.config.recipes import workload

# The largest mbs that fits in memory. At the mbs = 2 of the last row, a microbatch_group_size above
# pp overlaps more of the dp collectives.
LAYOUTS = """
gpu_type dtype    scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs gbs microbatch_group_size
h100     bf16,fp8 weak     128     96 4096  8 12  2    1  1  1  8   1  32                     auto
h100     bf16,fp8 weak     256     96 4096  8 12  4    1  1  1  8   1  64                     auto
h100     bf16,fp8 weak     512     96 4096  8 12  8    1  1  1  8   1 128                     auto
h100     bf16,fp8 weak    1024     96 4096  8 12 16    1  1  1  8   1 256                     auto
h100     bf16,fp8 weak    2048     96 4096  8 12 32    1  1  1  8   1 512                     auto
gb200    bf16,fp8 weak     128     96 4096  4 12  4    1  1  1  8   2  32                     auto
gb200    bf16,fp8 weak     256     96 4096  4 12  8    1  1  1  8   2  64                     auto
gb200    bf16,fp8 weak     512     96 4096  4 12 16    1  1  1  8   2 128                     auto
gb200    bf16,fp8 strong   128     96 4096  4 12  4    1  1  1  8   4 512                     auto
gb200    bf16,fp8 strong   256     96 4096  4 12  8    1  1  1  8   4 512                     auto
gb200    bf16,fp8 strong   512     96 4096  4 12 16    1  1  1  8   4 512                     auto
gb300    bf16,fp8 weak     128     96 4096  4 12  4    1  1  1  8   2  32                     auto
gb300    bf16,fp8 weak     256     96 4096  4 12  8    1  1  1  8   2  64                     auto
gb300    bf16,fp8 weak     512     96 4096  4 12 16    1  1  1  8   2 128                     auto
gb300    bf16,fp8 strong   128     96 4096  4 12  4    1  1  1  8   4 512                     auto
gb300    bf16,fp8 strong   256     96 4096  4 12  8    1  1  1  8   4 512                     auto
gb300    bf16,fp8 strong   512     96 4096  4 12 16    1  1  1  8   4 512                     auto
b200     bf16,fp8 weak     128     96 4096  4 12  4    1  1  1  8   2  32                     auto
b200     bf16,fp8 weak     256     96 4096  4 12  8    1  1  1  8   2  64                     auto
b200     bf16,fp8 weak     512     96 4096  4 12 16    1  1  1  8   2 128                     auto
b200     bf16,fp8 weak    1024     96 4096  4 12 32    1  1  1  8   2 256                     auto
b200     bf16,fp8 strong   128     96 4096  4 12  4    1  1  1  8   4 512                     auto
b200     bf16,fp8 strong   256     96 4096  4 12  8    1  1  1  8   4 512                     auto
b200     bf16,fp8 strong   512     96 4096  4 12 16    1  1  1  8   4 512                     auto
b200     bf16,fp8 strong  1024     96 4096  4 12 32    1  1  1  8   2 512                     8
"""


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="nemotron4",
            size="340b",
            layers=96,
            embed=18432,
            heads=96,
            kv_heads=8,
            head_dim=192,
            mlp=73728,
            vocab=256000,
            act="relu2",
            norm="layernorm1p",
            rope_fraction=0.5,
            init_std=0.0063,
        ),
        train=dict(
            seq=4096,
            remat="none",  # the published run uses selective; memory suffices for none
        ),
        fp8=dict(precision=dict(scaling="current")),
        optim=dict(lr=1e-4, lr_min=1e-5, warmup=500, eps=1e-8),
        layouts=LAYOUTS,
        launch=dict(
            rank=5,
            aliases=("nemotron",),
            dtype="fp8",
            time="00:25:00",
            strong_time="00:35:00",
            profile=(45, 50),
            stops=False,
        ),
        published=dict(kv_heads=96),  # that the published MFU assumes; the model has 8
        variants={"bf16_state": {"precision": {"weights": "bf16", "moments": "bf16"}}},
    )
