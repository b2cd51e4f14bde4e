"""DeepSeek-V3 671B, https://arxiv.org/abs/2412.19437, as NVIDIA's Megatron-Bridge recipes train it.

Tokens choose experts at random and evenly, as in the recipes' benchmarks (force_balance); without
it the router is DeepSeek-V3's own. The recipes' optimizer has bf16 moments; here they are fp32.
"""

from maxbench.config.channels import Experts, Mlp
from maxbench.config.mixers import LatentAttention
from maxbench.config.recipes import workload
from maxbench.config.sublayers import Layer

DENSE = Layer(mixer=LatentAttention(), channel=Mlp(mlp=18432))
ROUTED = Layer(mixer=LatentAttention(), channel=Experts())

# Megatron-Bridge 067f987, perf_recipes/deepseek. Without virtual stages a stage here has 2 pp - 1
# microbatches in flight, as each tick overlaps a forward with a backward pass, where Megatron's has
# pp. Other layouts than the recipes' where these do not fit or are predicted slower: on 1,024 H100
# pp 16 x ep 16 (BF16: 32) with all recomputed, where pp 8 x ep 64 x tp 2 is over eight nodes; on
# B200 pp 16 x ep 8, the recipe of BF16, where that of MXFP8 has ep 32 over four nodes; on 256 B300
# the same with the published run's mbs 2, but in BF16 four virtual stages and mbs 1; on 256 GB300
# ep 64 and mbs 2, where the recipe has pp 2 x ep 32 and mbs 1. In BF16 on GB200 the experts'
# up-projection is recomputed, too.
# Not here: 64 H100, whose ep 64 is larger than the 8 GPUs of a stage; 64 and 128 GB300 with FSDP
# over the 64 GPUs of ep, of which a shard of embed is no whole number of MXFP8's blocks.
LAYOUTS = """
gpu_type dtype          scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs   gbs stages             remat
h100     bf16           weak    1024     61 4096 16  2  2    1 32  1  1   1 16384 Et|(tt|)*30mL      full
h100     fp8            weak    1024     61 4096 16  2  4    1 16  1  1   1 16384 Et|(tt|)*30mL      full
b200     bf16           weak     256     61 4096 16  2  2    1  8  1  1   1  4096 Et|(tt|)*30mL      latent,context,attn_out
b200     fp8,nvfp4      weak     256     61 4096 16  2  2    1  8  1  1   1  4096 Et|(tt|)*30mL      save_gemms_recompute_mla_up_and_mlp
b200     fp8            weak     512     61 4096  8  2  8    1  8  1  1   1  8192 Et*4|(t*4|)*14tmL  save_context
b200     bf16           weak     512     61 4096  8  2  8    1  8  1  1   1  8192 Et*4|(t*4|)*14tmL  full
b300     bf16           weak     256     61 4096  8  4  4    1  8  1  1   1  4096 Et|(tt|)*30mL      save_gemms_recompute_mla_up
b300     fp8,nvfp4      weak     256     61 4096 16  2  2    1  8  1  1   2  4096 Et|(tt|)*30mL      save_gemms_recompute_mla_up_and_mlp
b300     nvfp4          weak     512     61 4096  8  2  8    1  8  1  1   2  8192 Et*4|(t*4|)*14tmL  save_gemms_recompute_mla_up_and_mlp
b300     fp8            weak     512     61 4096  8  2  8    1  8  1  1   1  8192 Et*4|(t*4|)*14tmL  save_gemms_recompute_mla_up
b300     bf16           weak     512     61 4096  8  2  8    1  8  1  1   1  8192 Et*4|(t*4|)*14tmL  selective
gb200    bf16           weak     256     61 4096  4  4  1    1 64  1  1   1  4096 Et*4|(t*4|)*14tmL  save_gemms_recompute_mla_up_and_mlp
gb200    fp8,nvfp4      weak     256     61 4096  4  4  1    1 64  1  1   1  4096 Et*4|(t*4|)*14tmL  save_gemms_recompute_mla_up
gb200    nvfp4,fp8      weak     512     61 4096  4  4  2    1 64  1  1   1  8192 Et*4|(t*4|)*14tmL  save_gemms_recompute_mla_up
gb200    bf16           weak     512     61 4096  4  4  2    1 64  1  1   1  8192 Et*4|(t*4|)*14tmL  save_gemms_recompute_mla_up_and_mlp
gb300    bf16           weak     256     61 4096  4  4  1    1 64  1  1   1  4096 Et*4|(t*4|)*14tmL  save_gemms_recompute_act
gb300    fp8,nvfp4      weak     256     61 4096  4  4  1    1 64  1  1   2  4096 Et*4|(t*4|)*14tmL  save_gemms_recompute_mla_up
gb300    nvfp4          weak     512     61 4096  2  8  8    1 32  1  1   2  8192 Et*4|(t*4|)*14tmL  save_gemms_recompute_mla_up
gb300    fp8            weak     512     61 4096  2  8  8    1 32  1  1   1  8192 Et*4|(t*4|)*14tmL  none
gb300    bf16           weak     512     61 4096  4  4  2    1 64  1  1   1  8192 Et*4|(t*4|)*14tmL  save_gemms_recompute_act
"""  # noqa: E501


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="deepseek_v3",
            size="671b",
            layers=61,
            embed=7168,
            heads=128,
            kv_heads=128,
            head_dim=192,
            value_dim=128,
            q_rank=1536,
            kv_rank=512,
            rope_head_dim=64,
            mlp=2048,
            layer_groups=((3, (DENSE,)), (58, (ROUTED,))),
            vocab=129280,
            norm_eps=1e-6,
            rope_base=10_000.0,
            rope_scaling="yarn",
            rope_factor=40.0,
            rope_context=4096,
            rope_mscale=1.0,
            init_std=0.006,
            experts=256,
            top_k=8,
            shared_mlp=2048,
            router="sigmoid",
            router_groups=8,
            router_groups_top=4,
            router_scale=2.5,
            expert_bias_rate=0.001,
            capacity_factor=0.0,
            force_balance=True,
            mtp_layers=1,
            mtp_loss=0.1,
        ),
        train=dict(
            seq=4096,
            remat="none",
        ),
        optim=dict(lr=3e-4, lr_min=3e-5, warmup=2000, eps=1e-5),
        layouts=LAYOUTS,
        launch=dict(rank=11, aliases=("deepseek", "deepseekv3", "deepseek-v3"), stops=False),
        published=dict(convention="causal"),
    )
