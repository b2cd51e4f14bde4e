"""result.json: configuration, environment, timings and figures of one run."""

import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from maxbench.config.run import Run
from maxbench.evidence import published
from maxbench.host import environment, identity
from maxbench.metrics import flops, step_stats
from maxbench.step import data, xla_options

SCHEMA = 2  # of result.json
# Key of `job` -> the variable of Slurm that has it.
JOB = {"id": "SLURM_JOB_ID", "nodes": "SLURM_JOB_NODELIST", "restart": "SLURM_RESTART_COUNT"}


@dataclasses.dataclass
class CheckpointLoad:
    """The checkpoint that a run resumed from."""

    path: str
    seconds: float
    bytes: int
    skipped: list[str]  # newer checkpoints, with the reason why each cannot be used
    changed: list[str]  # settings that differ from the saved run's


@dataclasses.dataclass
class CheckpointSave:
    """Times of one save: training waits for `seconds`, the rest runs in the background."""

    step: int
    start: float  # seconds since 1970
    seconds: float
    background_s: float
    bytes: int


@dataclasses.dataclass
class Evaluation:
    """The loss of held-out sequences."""

    step: int  # the last one before it
    loss: float
    tokens: int  # of all steps so far
    seconds: float  # of the evaluation
    elapsed_s: float  # since this run's first step began, with saves and evaluations


@dataclasses.dataclass(kw_only=True)
class RunResult:
    """Contents of result.json. The file has no key for None, nor for an empty list."""

    schema: int = SCHEMA
    name: str
    status: str = "running"  # running | done | stopped | failed
    reason: str | None = None  # of the status; '' of a run that did all its steps
    command: list[str]
    started: float  # seconds since 1970
    ended: float | None = None
    device: dict[str, Any]
    mocked: bool
    parameters: int
    config: dict[str, Any]  # as written
    run: dict[str, Any]  # as resolved
    versions: dict[str, str]
    git: str
    environment: dict[str, str]
    xla_options: dict[str, Any]
    processes: int
    process: identity.Process | None  # the one that writes the file
    job: dict[str, str]
    flops_conventions: list[str]
    # Compilation, before the first step.
    lower_s: float | None = None
    compile_s: float | None = None
    state_gib: float | None = None  # per device
    temporary_gib: float | None = None  # per device
    attention: str | None = None
    quantization: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)  # by dtype
    compilation_cache: str | None = None  # hit | miss
    checkpoint_load: CheckpointLoad | None = None
    # Processes that froze or did not go on (distributed/hang_detector.py), each with its stack.
    stalled: list[dict[str, Any]] | None = None
    # Steps.
    start_to_first_step_s: float | None = None
    loss: dict[str, tuple[int, float]] | None = None  # first and last: step and loss
    loss_floor: float | None = None  # least mean loss that the data allow (data.entropy)
    peak_bytes: int | None = None
    checkpoint_saves: list[CheckpointSave] = dataclasses.field(default_factory=list)
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)
    target_reached: Evaluation | None = None  # the one that ended the run (train.target_loss)
    # Hosts side by side, after the last step (distributed/stragglers.py).
    hosts: dict[str, dict] | None = None
    slow_hosts: list[str] | None = None
    # Figures of the measured window.
    steps_done: int | None = None
    window: tuple[int, int] | None = None  # first and last measured step
    step_s: dict[str, float] | None = None  # step_stats.statistics_of()
    data_wait_s: float | None = None  # mean of a step's wait for its batch, if that is of files
    performance: dict[str, Any] = dataclasses.field(default_factory=dict)  # top level in the file
    published: dict[str, Any] | None = None  # comparison with a published figure

    @classmethod
    def of_run(
        cls, run: Run, devices: step_stats.Devices, command: Sequence[str], processes: int
    ) -> "RunResult":
        """The result at the start of a run, with all that is known before compilation."""
        return cls(
            name=run.name,
            command=list(command),
            started=time.time(),
            device=dataclasses.asdict(devices),
            mocked=bool(run.runtime.mock_gpus),
            parameters=flops.params(run.model),
            config=run.config.asdict(),
            run=run.asdict(),
            versions=environment.versions(),
            git=environment.git_revision(),
            environment=environment.variables(),
            xla_options=xla_options.xla_options(devices.platform, run),
            processes=processes,
            process=identity.of_this_process(),
            job={key: os.environ[name] for key, name in JOB.items() if name in os.environ},
            flops_conventions=list(flops.CONVENTIONS),
            loss_floor=data.entropy(run),
        )

    def record_loss(self, step: int, loss: float) -> None:
        """Records the loss of a step as the last, and the first one as the first, too."""
        first = self.loss["first"] if self.loss else (step, loss)
        self.loss = {"first": first, "last": (step, loss)}

    def record_figures(
        self,
        run: Run,
        devices: step_stats.Devices,
        times: dict[int, float],
        data_waits: dict[int, float],
    ) -> None:
        """Computes the figures of the measured window, each with its convention.

        Args:
          times: seconds of each step.
          data_waits: those of it in which the devices waited for its batch.
        """
        steps, step_s = step_stats.measured_window(run.train.window, times)
        self.steps_done = len(times)
        if not step_s:
            return
        self.window = (steps[0], steps[-1])
        self.step_s = step_stats.statistics_of(step_s)
        mean_s = self.step_s["mean"]
        if run.train.reads_files:
            self.data_wait_s = statistics.fmean(data_waits[i] for i in steps)
        self.performance = step_stats.performance_figures(run, devices.gpu_type, mean_s)
        self.published = _compare_with_published(run, devices, mean_s)

    def to_json(self) -> dict[str, Any]:
        """The object that result.json contains."""
        values = dataclasses.asdict(self)
        quantization, performance = values.pop("quantization"), values.pop("performance")
        present = {name: value for name, value in values.items() if value not in (None, [])}
        return present | quantization | performance


def _compare_with_published(run: Run, devices: step_stats.Devices, step_s: float) -> dict[str, Any]:
    """The published figure of the same work, and this run's share of its tokens/s per GPU."""
    if devices.gpu_type is None:
        return {"verdict": f"not comparable: ran on {devices.kind}"}
    if run.runtime.mock_gpus:
        return {"verdict": "not comparable: the network was mocked"}
    comparison = published.compare_run(run, devices.gpu_type)
    return comparison.about | {"verdict": comparison.verdict(step_s)}
