"""Nemotron 3 Nano 30B-A3B, https://arxiv.org/abs/2512.20848, as Megatron-Bridge recipes train it.

Layers of Mamba-2, of experts, and of attention without positions, each alone. Tokens choose experts
at random and evenly, as in the recipes' benchmarks (force_balance); without it the router is
Nemotron's own.
"""

from maxbench.config.channels import Experts
from maxbench.config.mixers import Attention, Mamba2
from maxbench.config.recipes import workload
from maxbench.config.sublayers import Layer

KINDS = {
    "M": Layer(mixer=Mamba2()),
    "E": Layer(channel=Experts()),
    "*": Layer(mixer=Attention()),
}
PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

# Megatron-Bridge 067f987, perf_recipes/nemotronh; FP8 is MXFP8 on Blackwell. Layers are unrolled:
# the step is 10 % shorter, and compiles for 2 minutes on two cores.
LAYOUTS = """
gpu_type dtype scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs  gbs unroll_layers
h100     fp8   weak      16     52 8192  1  1  1    1 16  1  1   1 1024            52
gb200    fp8   weak       8     52 8192  1  1  1    1  8  1  1   2  512            52
gb300    fp8   weak       8     52 8192  1  1  1    1  8  1  1   4  512            52
"""


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="nemotron_3_nano",
            size="30b_a3b",
            layers=len(PATTERN),
            layer_groups=((1, tuple(KINDS[letter] for letter in PATTERN)),),
            embed=2688,
            heads=32,
            kv_heads=2,
            head_dim=128,
            rope_fraction=0.0,
            ssm_heads=64,
            ssm_head_dim=64,
            ssm_groups=8,
            ssm_state=128,
            mlp=1856,
            act="relu2",
            vocab=131072,
            init_std=0.0173,
            experts=128,
            top_k=6,
            shared_mlp=3712,
            router="sigmoid",
            router_scale=2.5,
            expert_bias_rate=0.001,
            aux_loss=1e-4,
            capacity_factor=0.0,
            force_balance=True,
        ),
        train=dict(
            seq=8192,
            remat="none",
        ),
        optim=dict(lr=1.6e-3, lr_min=1.6e-5, warmup=333, eps=1e-8),
        layouts=LAYOUTS,
        launch=dict(aliases=("nemotron3", "nemotron3_nano", "nano"), stops=False),
        # NVIDIA counts heads of Mamba-2 twice as wide as the network (64 x 84), and for a scan 7 x
        # width x state FLOPs: those of chunks of 322 tokens.
        published=dict(convention="causal", ssm_head_dim=84, ssm_chunk=322),
    )
