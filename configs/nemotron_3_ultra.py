"""Nemotron 3 Ultra 550B-A55B, https://arxiv.org/abs/2606.15007, as Megatron-Bridge trains it.

A wider Nemotron 3 Super (nemotron_3_super.py), with another order of layers. Tokens choose experts
at random and evenly, as in the recipes' benchmarks (force_balance).
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
PATTERN = 4 * ("MEMEMEM*E" + "MEMEM*E" + "MEMEMEM*E") + "MEMEMEME"

# Megatron-Bridge 067f987, perf_recipes/nemotronh; FP8 is MXFP8. NVIDIA has ep over the 64 GPUs of
# an NVLink domain, over which FSDP shards all other weights, and the optimizer over the 4 domains.
# Here experts are over fsdp 2 x ep 32 of a domain. NVIDIA recomputes the experts' activation alone,
# and offloads its input to the host; here save_gemms_recompute_act takes 288 GiB, so that slots and
# context are recomputed too, and XLA combines fewer all-gathers, which takes 5 GiB less.
# Not here, as not planned yet: 256 GB200 with tp 2.
LAYOUTS = """
gpu_type dtype scaling gpus layers  seq pp vp dp fsdp ep cp tp mbs gbs remat
gb300    fp8   weak     256    108 8192  1  1  4    2 32  1  1   1 256 query,key,value,mlp_up,mlp_down
"""  # noqa: E501


def get_config(presets=""):
    return workload(
        presets,
        model=dict(
            name="nemotron_3_ultra",
            size="550b_a55b",
            layers=len(PATTERN),
            layer_groups=((1, tuple(KINDS[letter] for letter in PATTERN)),),
            embed=8192,
            heads=64,
            kv_heads=2,
            head_dim=128,
            rope_fraction=0.0,
            # Mamba-2's heads, the latent and the shared expert: from readers of the published files
            ssm_heads=256,
            ssm_head_dim=64,
            ssm_groups=8,
            ssm_state=128,
            mlp=5120,
            act="relu2",
            vocab=131072,
            init_std=0.0099,
            experts=512,
            top_k=22,
            shared_mlp=10240,
            expert_latent=2048,
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
            collective_combine_bytes=(128 << 20, 128 << 20, 128 << 20),
        ),
        optim=dict(lr=8e-4, lr_min=8e-6, warmup=0, eps=1e-8),
        layouts=LAYOUTS,
        launch=dict(aliases=("nemotron3_ultra", "nemotron-3-ultra"), stops=False),
        # NVIDIA counts 7 x width x state FLOPs for a scan: those of chunks of 361 tokens.
        published=dict(convention="bridge-hybrid", ssm_chunk=361),
    )
