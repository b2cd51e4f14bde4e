"""Flags that describe a run, of every command that takes one."""

from maxbench.config.number_formats import DTYPES
from maxbench.config.recipes import PRESETS
from maxbench.hardware.gpus import GPU_TYPES

# Flags that describe a run, in groups: flag -> (the setting that it sets, or '', help text).
FLAG_GROUPS = {
    "workload": {
        "config": ("", f"workload or path of its file, with presets: NAME[:{','.join(PRESETS)}]"),
        "gpus": ("", "take the recipe's row for this many GPUs"),
        "gpu_type": ("layout.gpu_type", " | ".join(GPU_TYPES)),
        "dtype": ("precision.dtype", " | ".join(DTYPES)),
        "strong_scaling": ("", "take the recipe's rows with a constant global batch"),
        "seq": ("train.seq", "tokens per sequence"),
        "layers": ("model.layers", "layers of the model"),
        "hardware": ("", "TOML file of further GPU types, as maxbench/hardware/gpus.toml"),
    },
    "layout": {
        "pp": ("layout.pp", "pipeline stages"),
        "vp": ("layout.vp", "virtual stages per pipeline stage"),
        "dp": ("layout.dp", "data parallel with replicated weights, sharded optimizer (ZeRO-1)"),
        "fsdp": ("layout.fsdp", "data parallel with sharded weights (ZeRO-3)"),
        "ep": ("layout.ep", "expert parallel"),
        "cp": ("layout.cp", "context parallel"),
        "tp": ("layout.tp", "tensor parallel, with sequence parallelism"),
        "mbs": ("layout.mbs", "sequences per microbatch of a data-parallel shard"),
        "gbs": ("layout.gbs", "sequences per step over all GPUs"),
        "tp_overlap": (
            "runtime.tp_overlap",
            "overlap TP collectives with kernels (default; --notp_overlap)",
        ),
    },
    "run": {
        "steps": ("train.steps", "steps to train"),
        "output_dir": ("output.dir", "folder in which experiments/ is created"),
        "checkpoint": ("output.checkpoint", "save a checkpoint at the end"),
        "resume": ("output.resume", "checkpoint to start from: a run's folder, or one step of it"),
        "wandb": ("output.wandb", "send metrics to Weights & Biases"),
        "profile": (
            "profile.tool",
            "nsys | xplane | nccltrace: profile steps --config.profile.start to stop",
        ),
    },
    "devices and processes": {
        "cpu_devices": ("runtime.cpu_devices", "virtual CPU devices instead of GPUs"),
        "mock_gpus": (
            "runtime.mock_gpus",
            "run one GPU's share of a step on this many GPUs, without the network",
        ),
        "coordinator": ("runtime.coordinator", "host:port of process 0 (default: by Slurm)"),
        "processes": ("runtime.processes", "number of processes"),
        "process": ("runtime.process", "index of this process, from 0"),
    },
}
FLAGS = {name: path for group in FLAG_GROUPS.values() for name, (path, _) in group.items() if path}
