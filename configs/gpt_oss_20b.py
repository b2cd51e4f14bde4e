"""gpt-oss 20B, https://arxiv.org/abs/2508.10925, as NVIDIA's Megatron-Bridge recipes train it.

Its recipes on Blackwell are those of MLPerf Training, whose model differs from the released one:
preset `mlperf`, with another vocabulary and without YaRN. With
`mlperf,closed` it is trained to the target of MLPerf's Closed division.
"""

from maxbench.config.channels import Experts
from maxbench.config.mixers import Attention
from maxbench.config.recipes import workload
from maxbench.config.sublayers import Layer

MLPERF = {
    "model": {"vocab": 128256, "rope_factor": 1.0, "force_balance": False},
    "precision": {"bf16_layers": (0, 4)},
    "optim": {"lr": 6e-4, "lr_min": 4e-4, "warmup": 64},
}

# MLPerf Training's Closed division: mlcommons/training aa344c7, small_llm_moe_pretraining/primus
# (README.md, config_B200_1x8x1.sh), and mlcommons/training_policies d73e20f, training_rules.adoc.
# An evaluation on 1,024 sequences after every 12,288, which another --gbs needs other --eval_every
# and --eval_steps for. The reference masks the loss at ends of documents, of which its files have
# none: its README.md prepares them without --append-eod.
CLOSED = {
    "layout": {"gbs": 16},
    "train": {
        "seq": 8192, "steps": 1_200_000, "eval_every": 768, "eval_steps": 64, "target_loss": 3.34,
    },
    "optim": {"lr": 4e-4, "lr_min": 4e-5, "warmup": 128},
    "output": {"mllog": "gpt_oss_20b"},
}  # fmt: skip

# In turn a window of 128 tokens, and full attention.
SLIDING = Layer(mixer=Attention(window=128), channel=Experts())
FULL = Layer(mixer=Attention(), channel=Experts())

# Megatron-Bridge 067f987: on H100 recipes/gpt_oss, with ep 4 over dp 2 x tp 2 (here ep 2 x tp 2: tp
# splits each expert), on Blackwell perf_recipes/gpt_oss.
LAYOUTS = """
gpu_type dtype     scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs gbs
h100     bf16,fp8  weak      16     24 4096  4  1  1    1  2  1  2   1 512
b300     fp8,nvfp4 weak       8     24 8192  1  1  1    1  4  2  1   1   4
b300     fp8,nvfp4 weak      64     24 8192  1  1  8    1  4  2  1   1  32
gb200    nvfp4     weak       8     24 8192  1  1  1    1  4  2  1   1   4
gb200    nvfp4     weak      72     24 8192  1  1  9    1  4  2  1   1  36
gb200    fp8       weak     512     24 8192  1  1  8    1  8  4  2   1  64
gb300    nvfp4     weak       8     24 8192  1  1  1    1  4  2  1   1   4
gb300    nvfp4     weak      72     24 8192  1  1  9    1  4  2  1   1  36
gb300    fp8       weak     512     24 8192  1  1  8    1  8  4  2   1  64
"""


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="gpt_oss",
            size="20b",
            layers=24,
            embed=2880,
            heads=64,
            kv_heads=8,
            head_dim=64,
            mlp=2880,
            vocab=201088,
            layer_groups=((12, (SLIDING, FULL)),),
            act="swiglu_clamped",
            mlp_bias=True,
            attention_bias=True,
            sinks=True,
            rope_base=150_000.0,
            rope_scaling="yarn",
            rope_factor=32.0,
            rope_context=4096,
            rope_truncate=False,
            experts=32,
            top_k=4,
            router_bias=True,
            capacity_factor=0.0,
            force_balance=True,
        ),
        train=dict(
            seq=4096,
            remat="none",
        ),
        optim=dict(lr=3e-4, lr_min=3e-5, warmup=2000, eps=1e-5),
        layouts=LAYOUTS,
        launch=dict(rank=10, aliases=("gpt-oss", "gptoss"), stops=False),
        published=dict(convention="causal"),
        variants={"mlperf": MLPERF, "closed": CLOSED},
    )
