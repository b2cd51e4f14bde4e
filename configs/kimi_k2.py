"""Kimi-K2 1T, https://arxiv.org/abs/2507.20534, as NVIDIA's Megatron-Bridge recipes train it.

Tokens choose experts at random and evenly, as in the recipes' benchmarks (force_balance). The
optimizer is Muon, as in the recipes.
"""

from maxbench.config.channels import Experts, Mlp
from maxbench.config.mixers import LatentAttention
from maxbench.config.recipes import workload
from maxbench.config.sublayers import Layer

DENSE = Layer(mixer=LatentAttention(), channel=Mlp(mlp=18432))
ROUTED = Layer(mixer=LatentAttention(), channel=Experts())

# Megatron-Bridge 067f987, perf_recipes/kimi. Other layouts than the recipes' where these do not fit
# or are predicted slower: on H100 ep 16 without tp, where the recipe has tp 8 x ep 64, whole
# experts on each GPU; on 256 B200 and B300 ep 8, in a node, and two virtual stages, where the
# recipes have ep 16 and none. They recompute the up-projections of attention alone: with 2 pp - 1
# microbatches in flight, where Megatron's stages have pp, that does not fit here. In BF16 the
# experts' up-projection is recomputed, too, and on B200 their dispatch.
LAYOUTS = """
gpu_type dtype     scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs  gbs stages           remat
h100     bf16      weak    1024     61 4096 16  2  4    1 16  1  1   1 8192 Et|(tt|)*30L     full
h100     fp8       weak    1024     61 4096 16  2  4    1 16  1  1   1 8192 Et|(tt|)*30L     save_context
b200     bf16      weak     256     61 4096 16  2  2    1  8  1  1   1 2048 Et|(tt|)*30L     latent,context,attn_out
b200     fp8       weak     256     61 4096 16  2  2    1  8  1  1   1 2048 Et|(tt|)*30L     save_gemms_recompute_mla_up_and_mlp
b200     fp8       weak     512     61 4096 16  1  2    1 16  1  1   1 8192 Et*4|(t*4|)*14tL save_gemms_recompute_mla_up_and_mlp
b300     bf16,fp8  weak     256     61 4096 16  2  2    1  8  1  1   2 4096 Et|(tt|)*30L     save_gemms_recompute_mla_up_and_mlp
b300     fp8       weak     512     61 4096 16  1  2    1 16  1  1   2 8192 Et*4|(t*4|)*14tL save_gemms_recompute_mla_up_and_mlp
gb200    bf16      weak     256     61 4096  4  4  1    1 64  1  1   1 2048 Et*4|(t*4|)*14tL save_gemms_recompute_mla_up_and_mlp
gb200    fp8       weak     256     61 4096  4  4  1    1 64  1  1   1 2048 Et*4|(t*4|)*14tL save_gemms_recompute_mla_up
gb200    fp8       weak     512     61 4096  4  4  2    1 64  1  1   1 4096 Et*4|(t*4|)*14tL save_gemms_recompute_mla_up
gb300    bf16      weak     256     61 4096  4  4  1    1 64  1  1   2 4096 Et*4|(t*4|)*14tL save_gemms_recompute_mla_up_and_mlp
gb300    fp8,nvfp4 weak     256     61 4096  4  4  1    1 64  1  1   2 4096 Et*4|(t*4|)*14tL save_gemms_recompute_mla_up
gb300    fp8       weak     512     61 4096  4  4  2    1 64  1  1   1 8192 Et*4|(t*4|)*14tL save_gemms_recompute_mla_up
"""  # noqa: E501


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="kimi_k2",
            size="1t_a32b",
            layers=61,
            embed=7168,
            heads=64,
            kv_heads=64,
            head_dim=192,
            value_dim=128,
            q_rank=1536,
            kv_rank=512,
            rope_head_dim=64,
            mlp=2048,
            layer_groups=((1, (DENSE,)), (60, (ROUTED,))),
            vocab=163840,
            norm_eps=1e-6,
            rope_base=50_000.0,
            rope_scaling="yarn",
            rope_factor=32.0,
            rope_context=4096,
            rope_beta_fast=1.0,
            rope_mscale=1.0,
            init_std=0.02,
            experts=384,
            top_k=8,
            shared_mlp=2048,
            router="sigmoid",
            router_scale=2.827,
            expert_bias_rate=0.001,
            capacity_factor=0.0,
            force_balance=True,
        ),
        train=dict(
            seq=4096,
            remat="none",
        ),
        optim=dict(name="muon", lr=3e-4, lr_min=3e-5, warmup=2000, eps=1e-5),
        layouts=LAYOUTS,
        launch=dict(rank=12, aliases=("kimi", "kimi-k2"), stops=False),
        published=dict(convention="causal"),
    )
