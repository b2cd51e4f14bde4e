"""The Python API, `import maxbench as mb`: mb.plan(), mb.train(), mb.report() and mb.sweep().

Keywords are the flags of the commands with the same names; None stands for a flag that is not set.
Importing this module loads no other of the package: each function imports what it needs.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from maxbench.planning.result import PlanResult
    from maxbench.reporting.build_report import Report
    from maxbench.reporting.sweep import Sweep
    from maxbench.run.subprocess_run import TrainResult

T = TypeVar("T")
OneOrList: TypeAlias = T | list[T] | None  # a list is tried value by value


def train(
    config: str,
    *,
    gpus: int | None = None,
    gpu_type: str | None = None,
    dtype: str | None = None,
    strong_scaling: bool | None = None,
    seq: int | None = None,
    layers: int | None = None,
    hardware: str | None = None,
    pp: int | None = None,
    vp: int | None = None,
    dp: int | None = None,
    fsdp: int | None = None,
    ep: int | None = None,
    cp: int | None = None,
    tp: int | None = None,
    mbs: int | None = None,
    gbs: int | None = None,
    tp_overlap: bool | None = None,
    steps: int | None = None,
    output_dir: str | None = None,
    checkpoint: bool | None = None,
    resume: str | None = None,
    wandb: bool | None = None,
    profile: str | None = None,
    cpu_devices: int | None = None,
    mock_gpus: int | None = None,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    settings: Mapping[str, Any] | None = None,
    show: bool = True,
) -> TrainResult:
    """Trains a workload on the local devices and measures it, in a process of its own.

    `mb.train("llama31_8b:tiny", steps=8)` is `maxbench train --config llama31_8b:tiny --steps 8`.

    Args:
      config: workload name or path of its file, with presets: 'llama31_8b:tiny'.
      gpus: GPUs; takes the recipe's row for this many.
      gpu_type: GPU type, as 'h100'.
      dtype: 'bf16', 'fp32', 'fp8' or 'nvfp4'.
      strong_scaling: take the recipe's rows with a constant global batch.
      seq: tokens per sequence.
      layers: layers of the model.
      hardware: TOML file of further GPU types.
      pp: pipeline stages.
      vp: virtual stages per pipeline stage.
      dp: data parallel degree with replicated weights (ZeRO-1).
      fsdp: data parallel degree with sharded weights (ZeRO-3).
      ep: expert parallel degree.
      cp: context parallel degree.
      tp: tensor parallel degree, with sequence parallelism.
      mbs: sequences per microbatch of a data-parallel shard.
      gbs: sequences per step over all GPUs.
      tp_overlap: overlap TP collectives with kernels (default: True).
      steps: steps to train.
      output_dir: folder in which experiments/ is created.
      checkpoint: save a checkpoint at the end.
      resume: checkpoint to start from: a run's folder, or one step of it.
      wandb: send metrics to Weights & Biases.
      profile: 'nsys', 'xplane' or 'nccltrace': profile some steps.
      cpu_devices: virtual CPU devices instead of GPUs.
      mock_gpus: run one GPU's share of a step on this many GPUs, without the network.
      coordinator: host:port of process 0.
      processes: number of processes.
      process: index of this process.
      settings: any other setting by its path, as {'train.remat': 'full'}.
      show: print the run's output, a line per step.

    Returns:
      The run's summary, its folder, and its figures per step.

    Raises:
      UserError: an argument is invalid, or the run did not start.
    """
    flags = _flags(locals(), "settings", "show")
    from maxbench.config import command_line, commands
    from maxbench.run import subprocess_run

    words = command_line.flag_words(flags, settings)
    # Invalid arguments raise here, before a process starts.
    command_line.parse(commands.define("train"), ["maxbench train", *words])
    return subprocess_run.train(words, show)


def plan(
    config: str,
    *,
    gpus: int | None = None,
    gpu_type: str | None = None,
    dtype: str | None = None,
    strong_scaling: bool | None = None,
    seq: int | None = None,
    layers: int | None = None,
    hardware: str | None = None,
    pp: int | None = None,
    vp: int | None = None,
    dp: int | None = None,
    fsdp: int | None = None,
    ep: int | None = None,
    cp: int | None = None,
    tp: int | None = None,
    mbs: int | None = None,
    gbs: int | None = None,
    tp_overlap: bool | None = None,
    best_remat: bool | None = None,
    as_published: bool | None = None,
    search: bool | None = None,
    compiled: int | None = None,
    search_s: int | None = None,
    memory_margin: float | None = None,
    network: str | None = None,
    network_gbps: float | None = None,
    gpus_per_node: int | None = None,
    nvlink_gpus: int | None = None,
    tokens: float | None = None,
    usd_per_gpu_hour: float | None = None,
    gpu_watts: float | None = None,
    mtbf_hours_per_gpu: float | None = None,
    checkpoint_s: float | None = None,
    restart_s: float | None = None,
    explain: bool | None = None,
    sensitivity: bool | None = None,
    timeline: str | None = None,
    scaling: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> PlanResult:
    """Compiles a run for GPUs that need not be present, and predicts its memory and step time.

    `mb.plan("llama31_405b", gpus=512)` is `maxbench plan --config llama31_405b --gpus 512`. The
    first plan that is not cached makes the jax of this process a GPU compiler without devices.

    Args:
      config: workload name or path of its file, with presets: 'llama31_8b:tiny'.
      gpus: GPUs; takes the recipe's row for this many.
      gpu_type: GPU type, as 'h100'.
      dtype: 'bf16', 'fp32', 'fp8' or 'nvfp4'.
      strong_scaling: take the recipe's rows with a constant global batch.
      seq: tokens per sequence.
      layers: layers of the model.
      hardware: TOML file of further GPU types.
      pp: pipeline stages.
      vp: virtual stages per pipeline stage.
      dp: data parallel degree with replicated weights (ZeRO-1).
      fsdp: data parallel degree with sharded weights (ZeRO-3).
      ep: expert parallel degree.
      cp: context parallel degree.
      tp: tensor parallel degree, with sequence parallelism.
      mbs: sequences per microbatch of a data-parallel shard.
      gbs: sequences per step over all GPUs.
      tp_overlap: overlap TP collectives with kernels (default: True).
      best_remat: save as many activations as fit, and recompute the rest.
      as_published: use the published run's recomputation and microbatches, even if that does not
        fit.
      search: compare other layouts and remat policies for the same batch and GPUs.
      compiled: number of layouts that `search` compiles (default: 8).
      search_s: seconds after which `search` compiles no further, once a layout fits (default: 90).
      memory_margin: fraction of a GPU's memory that must stay free.
      network: a name of hardware/networks.toml, as 'roce400'.
      network_gbps: GB/s of each GPU to the network, one direction.
      gpus_per_node: GPUs of a node.
      nvlink_gpus: GPUs of an NVLink domain.
      tokens: token budget: adds days, failures, checkpoints, cost and energy.
      usd_per_gpu_hour: price, for the cost of `tokens`.
      gpu_watts: power of a GPU with its share of the server.
      mtbf_hours_per_gpu: GPU hours between failures (default: 50,670, of Llama 3).
      checkpoint_s: seconds that a step waits for a checkpoint (default: 10).
      restart_s: seconds from a failure to the next step (default: 600).
      explain: add the longest operations, with source lines and bounds (PlanResult.explain).
      sensitivity: add the step time with a slower or faster network, NVLink, memory and GEMM.
      timeline: write the step's timeline to this .json file, and drawings next to it.
      scaling: add the step time at up to 65,536 GPUs, and draw it to this .svg file.
      settings: any other setting by its path, as {'train.remat': 'full'}.

    Returns:
      The plan, or the plans of a search.

    Raises:
      UserError: an argument is invalid, or no program of the run can fit.
    """
    flags = _flags(locals(), "settings")
    from maxbench.cli import plan as command
    from maxbench.config import command_line, commands

    words = command_line.flag_words(flags, settings)
    with _unchanged_environment():
        result, _ = command.plan_and_draw(commands.define("plan"), ["maxbench plan", *words])
    return result


def report(
    *paths: str,
    full_names: bool | None = None,
    title: str | None = None,
    suite: str | None = None,
    window: str | tuple[int, int] | None = None,
    gpu_type: str | None = None,
    hardware: str | None = None,
    cost: float | None = None,
    interval: float | None = None,
    mtbf: float | None = None,
) -> Report:
    """Reads finished runs, at and below paths (default: experiments).

    `mb.report("experiments", cost=2.5)` is `maxbench report --cost 2.5 experiments`.

    Args:
      paths: folders of runs, and logs, event files and CSV exports of other programs.
      full_names: show paths instead of names.
      title: heading of the HTML page.
      suite: file of a suite of runs, which is judged PASS or FAIL.
      window: first and last step that are measured (default: (35, 44)).
      gpu_type: GPU type of logs that do not name it.
      hardware: TOML file of further GPU types.
      cost: dollars per GPU hour.
      interval: minutes between checkpoints (default: the optimum of Young and Daly).
      mtbf: hours between failures of the whole job (default: 24).

    Returns:
      The runs with their figures; text(format) is the output of `maxbench report --format`.

    Raises:
      UserError: an argument is invalid, or there is no run.
    """
    flags = _flags(locals(), "paths", "full_names")
    from maxbench.config import command_line, commands
    from maxbench.reporting import build_report

    words = command_line.flag_words({"full-names": full_names, **flags})
    argv = ["maxbench report", *words, "--", *map(str, paths)]
    return build_report.report_from_flags(commands.define("report"), argv)


def sweep(
    kind: Literal["plan", "train"],
    config: str | Sequence[str],
    *,
    layouts: Sequence[Mapping[str, Any]] = ({},),
    gpus: OneOrList[int] = None,
    gpu_type: OneOrList[str] = None,
    dtype: OneOrList[str] = None,
    strong_scaling: OneOrList[bool] = None,
    seq: OneOrList[int] = None,
    layers: OneOrList[int] = None,
    hardware: OneOrList[str] = None,
    pp: OneOrList[int] = None,
    vp: OneOrList[int] = None,
    dp: OneOrList[int] = None,
    fsdp: OneOrList[int] = None,
    ep: OneOrList[int] = None,
    cp: OneOrList[int] = None,
    tp: OneOrList[int] = None,
    mbs: OneOrList[int] = None,
    gbs: OneOrList[int] = None,
    tp_overlap: OneOrList[bool] = None,
    steps: OneOrList[int] = None,
    output_dir: OneOrList[str] = None,
    checkpoint: OneOrList[bool] = None,
    resume: OneOrList[str] = None,
    wandb: OneOrList[bool] = None,
    profile: OneOrList[str] = None,
    cpu_devices: OneOrList[int] = None,
    mock_gpus: OneOrList[int] = None,
    coordinator: OneOrList[str] = None,
    processes: OneOrList[int] = None,
    process: OneOrList[int] = None,
    best_remat: OneOrList[bool] = None,
    as_published: OneOrList[bool] = None,
    search: OneOrList[bool] = None,
    compiled: OneOrList[int] = None,
    search_s: OneOrList[int] = None,
    memory_margin: OneOrList[float] = None,
    network: OneOrList[str] = None,
    network_gbps: OneOrList[float] = None,
    gpus_per_node: OneOrList[int] = None,
    nvlink_gpus: OneOrList[int] = None,
    tokens: OneOrList[float] = None,
    usd_per_gpu_hour: OneOrList[float] = None,
    gpu_watts: OneOrList[float] = None,
    mtbf_hours_per_gpu: OneOrList[float] = None,
    checkpoint_s: OneOrList[float] = None,
    restart_s: OneOrList[float] = None,
    explain: OneOrList[bool] = None,
    sensitivity: OneOrList[bool] = None,
    timeline: OneOrList[str] = None,
    scaling: OneOrList[str] = None,
    settings: Mapping[str, Any] | None = None,
    show: bool = True,
) -> Sweep:
    """Plans or trains every combination of workloads, layouts and values, one after another.

    `mb.sweep("plan", "llama31_8b", gpus=[8, 16], dtype=["bf16", "fp8"])` is four plans. A
    combination that fails is a row with its error.

    Args:
      kind: 'plan' or 'train', the function that is called.
      config: one workload or several.
      layouts: flags that vary together, as [{'fsdp': 8}, {'fsdp': 4, 'tp': 2}].
      settings: any other setting by its path; a list is tried value by value.
      show: print a line for each combination that is done.

    All other keywords are those of plan() or train(); a list is tried value by value.

    Returns:
      A row per combination.

    Raises:
      UserError: an unknown kind, or a keyword that plan() or train() has not.
    """
    values = _flags(locals(), "kind", "config", "layouts", "settings", "show")
    from maxbench.config.errors import check_choice
    from maxbench.reporting import sweep as sweeps

    calls: dict[str, Callable[..., Any]] = {
        "plan": plan,
        "train": functools.partial(train, show=False),
    }
    check_choice("kind", kind, calls)
    points = sweeps.combinations(kind, config, layouts, values, settings or {})
    return sweeps.run(calls[kind], points, show)


def _flags(keywords: Mapping[str, Any], *excluded: str) -> dict[str, Any]:
    """The keywords of a call that are set and are flags of the command."""
    return {k: v for k, v in keywords.items() if v is not None and k not in excluded}


@contextlib.contextmanager
def _unchanged_environment() -> Iterator[None]:
    """Restores the environment: child processes must not inherit what the compiler sets in it."""
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
