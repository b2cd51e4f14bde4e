"""The record of one run, from files of any program."""

import dataclasses
import enum
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxbench.config import precedence, resolve
from maxbench.config.errors import UserError
from maxbench.config.model import Model
from maxbench.config.run import Run
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes
from maxbench.run_logs import deaths, formats


class Origin(enum.StrEnum):
    """Source of a run's setting. The first one that names the setting counts, in this order."""

    LOG = "log"  # lines of the log, figures that follow from them, or result.json
    USER = "user"  # a flag of the report
    NAME = "name"  # the name of the log or of its folder
    PROGRAM = "program"  # the convention of the log's program
    UNKNOWN = "unknown"


class Setting(NamedTuple):
    """A setting that a verdict needs: its name in sentences, and the flag that sets it."""

    words: str
    flag: str


# Field of RunRecord -> the setting.
SETTINGS = {
    "model": Setting("model", "config"),
    "seq": Setting("sequence length", "seq"),
    "gbs": Setting("batch size", "gbs"),
    "gpus": Setting("number of GPUs", "gpus"),
    "gpu_type": Setting("GPU type", "gpu_type"),
    "dtype": Setting("number format", "dtype"),
}


class ReachedTarget(NamedTuple):
    """The evaluation that reached the target loss of a run of maxbench."""

    target: float
    step: int  # the last one before it
    tokens: int  # of all steps so far
    elapsed_s: float  # since the first step began


@dataclasses.dataclass(frozen=True)
class Given:
    """Settings of the user for all logs: GPU types, formats, and settings that a log may not name.

    `settings` are fields of RunRecord and their values.
    """

    gpu_types: GpuTypes = GPU_TYPES
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    table: formats.FormatTable = formats.FORMATS


def dig(data: Any, path: str, default: Any) -> Any:
    """A value of nested dicts, by a path as 'config.model.name'.

    Returns the default if the value is missing or of another type, or a number that is negative or
    not finite.
    """
    for key in path.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    kind = type(default)
    if kind not in (int, float):
        return data if isinstance(data, kind) else default
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    return kind(data) if is_number and 0 <= data < 1e30 else default


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object; {} if the text is none, as the incomplete last line of a running run."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _at(path: str, default: Any = "") -> Any:
    """A field with its path in result.json."""
    return dataclasses.field(default=default, metadata={"path": path})


@dataclasses.dataclass(kw_only=True)
class RunRecord:
    """A run. Fields of unknown value are 0 or ''. Those of SETTINGS are set by learn().

    The metadata of a field has its path in result.json.
    """

    path: pathlib.Path
    name: str
    # maxbench, a name in the table of formats, tensorboard or wandb; '' = could not be read
    source: str
    log_format: formats.LogFormat | None = None  # of the lines of a log
    status: str = _at("status")  # done | stopped | failed | died | running | skipped
    reason: str = _at("reason")  # of the status: of a death, or when a run ended as asked
    remedy: str = ""  # of a death
    model: str = _at("run.model.name")
    size: str = _at("run.model.size")
    dtype: str = _at("run.precision.dtype")
    format: str = ""  # number format of GEMMs (config.number_formats)
    gpu_type: str = _at("device.gpu_type")
    device: str = _at("device.kind")  # the driver's or jax's name; a log may have several
    gpus: int = _at("device.count", 0)
    # Sequences of a step and tokens of a sequence. If they change from step to step: of the last
    # one here, and of each in `batches` and `seqs`, 0 = unknown.
    gbs: int = _at("run.layout.gbs", 0)
    seq: int = _at("run.train.seq", 0)
    batches: dict[int, int] = dataclasses.field(default_factory=dict)
    seqs: dict[int, int] = dataclasses.field(default_factory=dict)
    layers: int = _at("run.model.layers", 0)
    network: Model | None = None  # of the user's workload, for a model whose origin is USER
    origins: dict[str, Origin] = dataclasses.field(default_factory=dict)  # see origin()
    layout: dict[str, int] = dataclasses.field(default_factory=dict)  # as pp; logs have mbs too
    total_steps: int = _at("run.train.steps", 0)  # that the run was started for
    started: float = _at("started", 0.0)  # seconds since 1970
    mocked: bool = _at("mocked", False)
    profiled: str = _at("run.profile.tool")
    step_s: dict[int, float] = dataclasses.field(default_factory=dict)
    tflops: dict[int, float] = dataclasses.field(default_factory=dict)  # as logged
    mfu: dict[int, float] = dataclasses.field(default_factory=dict)  # as logged, from 0 to 1
    loss: dict[int, float] = dataclasses.field(default_factory=dict)
    grad_norm: dict[int, float] = dataclasses.field(default_factory=dict)
    eval_loss: dict[int, float] = dataclasses.field(default_factory=dict)  # of held-out data
    reached: ReachedTarget | None = None
    tokens_s: dict[int, float] = dataclasses.field(default_factory=dict)  # of one GPU, as logged
    interval: int = 1  # steps from a step time to the next; the time is their mean
    inferred: list[str] = dataclasses.field(default_factory=list)  # and other notes on the log
    peak_bytes: int = _at("peak_bytes", 0)
    power_w: float = 0.0  # mean over GPUs and the time in which they are busy
    saves: list[float] = dataclasses.field(default_factory=list)  # seconds of each checkpoint
    loads: list[float] = dataclasses.field(default_factory=list)
    result: dict = dataclasses.field(default_factory=dict)  # result.json of a run of maxbench
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)  # of a step, with padding
    damaged: int = 0  # lines of steps that cannot be read
    unread: list[str] = dataclasses.field(default_factory=list)  # files that cannot be, and why

    def learn(self, origin: Origin, **values: Any) -> None:
        """Sets the fields that are unknown so far, and their origin. 0 and '' are no values."""
        for name, value in values.items():
            if value and not getattr(self, name):
                setattr(self, name, value)
                self.origins[name] = origin

    def origin(self, name: str) -> Origin:
        """Source of a field of SETTINGS."""
        return self.origins.get(name, Origin.UNKNOWN)

    def work(self, step: int) -> tuple[int, int]:
        """Sequences of a step, and tokens of each; 0 = unknown."""
        return self.batches.get(step, self.gbs), self.seqs.get(step, self.seq)

    @property
    def program(self) -> str:
        """The program that wrote the log, for people."""
        if self.log_format:
            return self.log_format.program
        others = {"tensorboard": "the event file", "wandb": "the export"}
        return others.get(self.source, self.source)

    @property
    def last(self) -> int:
        """The last logged step; -1 before the first."""
        return max(self.step_s, default=-1)

    def die(self, cause: deaths.Cause) -> None:
        """Sets the status and the reason of a death."""
        self.status, self.reason, self.remedy = "died", cause.line, cause.remedy

    def may_be_running(self, *files: pathlib.Path) -> bool:
        """Whether one of the run's files was written within 15 minutes, or ten reports."""
        written = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
        reports = 10 * self.interval * max(self.step_s.values(), default=0.0)
        return time.time() - written < max(900.0, reports)

    def to_run(self, gpu_types: GpuTypes = GPU_TYPES) -> Run:
        """The run's configuration, from which plan predicts the same program.

        Raises:
          UserError: it is of another version of maxbench, or the run used other devices.
        """
        try:
            config = precedence.without_processes(self.result["config"])
            run = resolve.resolve(config, gpu_types)
        except UserError as e:
            raise UserError(f"its configuration is of another version of maxbench: {e}") from None
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
            raise UserError("its configuration is of another version of maxbench") from None
        if self.mocked or self.gpu_type != run.layout.gpu_type:
            ran = "with its network mocked" if self.mocked else f"on {self.device or self.gpu_type}"
            raise UserError(f"the run was {ran}, a plan would be for {run.layout.gpu_type}")
        return run
