"""Nemotron-H 56B, https://arxiv.org/abs/2504.03624, as NVIDIA's Megatron-Bridge recipes train it.

Layers of Mamba-2, of an MLP, and of attention without positions, each alone.
"""

from maxbench.config.channels import Mlp
from maxbench.config.mixers import Attention, Mamba2
from maxbench.config.recipes import workload
from maxbench.config.sublayers import Layer

KINDS = {
    "M": Layer(mixer=Mamba2()),
    "-": Layer(channel=Mlp()),
    "*": Layer(mixer=Attention()),
}
PATTERN = "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"

# Megatron-Bridge 067f987, perf_recipes/nemotronh. Layers are unrolled where memory allows, but not
# with fsdp.
LAYOUTS = """
gpu_type dtype scaling gpus layers  seq pp vp  dp fsdp ep cp tp mbs  gbs unroll_layers remat
h100     fp8   weak      64    118 8192  1  1   8    1  1  1  8   1  192          auto none
h100     fp8   weak     512    118 8192  1  1  64    1  1  1  8   1 1536          auto none
b200     fp8   weak     512    118 8192  1  1 128    2  1  1  2   1 1536          auto save_gemms_recompute_act
b300     fp8   weak     512    118 8192  1  1 256    1  1  1  2   1 1536           118 none
gb200    fp8   weak     512    118 8192  1  1 128    2  1  1  2   1 1536          auto none
gb300    fp8   weak      64    118 8192  1  1  32    1  1  1  2   1  192           118 none
gb300    fp8   weak     512    118 8192  1  1 256    1  1  1  2   1 1536           118 none
"""  # noqa: E501


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="nemotron_h",
            size="56b",
            layers=len(PATTERN),
            layer_groups=((1, tuple(KINDS[letter] for letter in PATTERN)),),
            embed=8192,
            heads=64,
            kv_heads=8,
            head_dim=128,
            rope_fraction=0.0,
            ssm_heads=256,
            ssm_head_dim=64,
            ssm_groups=8,
            ssm_state=256,
            mlp=32768,
            act="relu2",
            vocab=131072,
        ),
        train=dict(
            seq=8192,
            remat="none",
        ),
        fp8=dict(precision=dict(scaling="current")),
        optim=dict(lr=3e-4, lr_min=3e-5, warmup=2000),
        layouts=LAYOUTS,
        launch=dict(aliases=("nemotronh", "nemotron-h"), stops=False),
        published=dict(convention="causal"),
    )
