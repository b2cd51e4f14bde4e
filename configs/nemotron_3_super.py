"""Nemotron 3 Super 120B-A12B, https://arxiv.org/abs/2512.20856, as Megatron-Bridge trains it.

Layers of Mamba-2, of experts in a latent, and of attention without positions, each alone. One layer
of attention and experts is used twice for multi-token prediction, in BF16. Tokens choose experts at
random and evenly, as in the recipes' benchmarks (force_balance); without it the router is
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
PATTERN = 3 * "MEMEMEM*E" + 4 * "MEMEMEMEM*E" + "MEMEMEM*E" + "MEMEMEME"

# Megatron-Bridge 067f987, perf_recipes/nemotronh, for 64 GPUs, and NVIDIA/exemplar-performance
# v26.08.00, nemotron3, for 512; FP8 is MXFP8. With tp 2 the recipes' ep contains tp, and each
# expert is whole on a GPU; here ep is half as large, and tp splits each expert.
# NVIDIA's NVFP4 leaves attention, the projections of the latent and the last 14 layers in BF16, and
# has MXFP8 in the last projection of Mamba-2; here all GEMMs but those of multi-token prediction
# are NVFP4, and precision.bf16_layers=0,14 leaves out the last ones.
# Layers are unrolled: the step is 14 % shorter, and compiles for 3 to 7 minutes on two cores.
# Without recomputation B200 and B300 lack memory. Not here, as not planned yet: the other recipes
# for 64 GPUs, of B200, B300, GB200 and H100, and of GB300 in BF16 and NVFP4.
LAYOUTS = """
gpu_type dtype    scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs  gbs unroll_layers remat
gb200    bf16     weak     512     88 8192  1  1  8    1 32  1  2   1 4096            88 none
gb300    bf16,fp8 weak     512     88 8192  1  1  8    1 64  1  1   1 4096            88 none
b200     bf16     weak     512     88 8192  1  1 64    1  4  1  2   1 4096            88 save_gemms_recompute_act
b300     bf16     weak     512     88 8192  1  1 64    1  8  1  1   1 4096            88 save_gemms_recompute_act
gb300    fp8      weak      64     88 8192  1  1  1    1 64  1  1   1  512            88 none
"""  # noqa: E501


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="nemotron_3_super",
            size="120b_a12b",
            layers=len(PATTERN),
            layer_groups=((1, tuple(KINDS[letter] for letter in PATTERN)),),
            embed=4096,
            heads=32,
            kv_heads=2,
            head_dim=128,
            rope_fraction=0.0,
            ssm_heads=128,
            ssm_head_dim=64,
            ssm_groups=8,
            ssm_state=128,
            mlp=2688,
            act="relu2",
            vocab=131072,
            init_std=0.014,  # assumed: 0.9 / sqrt(embed), as Nano's and Ultra's
            experts=512,
            top_k=22,
            shared_mlp=5376,
            expert_latent=1024,
            router="sigmoid",
            router_scale=5.0,
            expert_bias_rate=0.001,
            aux_loss=1e-4,
            capacity_factor=0.0,
            force_balance=True,
            mtp_layers=2,
            mtp_block=Layer(mixer=Attention(), channel=Experts()),
            mtp_loss=0.3,
        ),
        train=dict(
            seq=8192,
            remat="none",
        ),
        optim=dict(lr=4.5e-4, lr_min=4.5e-6, warmup=40, eps=1e-8),
        layouts=LAYOUTS,
        launch=dict(aliases=("nemotron3_super", "nemotron-3-super"), stops=False),
        # NVIDIA counts 7 x width x state FLOPs for a scan: those of chunks of 341 tokens.
        published=dict(convention="bridge-hybrid", ssm_chunk=341),
    )
