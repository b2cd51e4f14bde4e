"""One run as its files tell it, whoever wrote them."""

import dataclasses
import json
import pathlib
from typing import Any

from maxbench.config import resolve
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.hardware.gpus import GPU_TYPES, GpuTypes


def dig(data: Any, path: str, default: Any) -> Any:
    """What nested dicts hold at 'config.model.name', if it is of the default's type.

    Numbers are finite and not negative; whatever else is there, the default is returned.
    """
    for key in path.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    kind = type(default)
    if kind not in (int, float):
        return data if isinstance(data, kind) else default
    number = isinstance(data, int | float) and not isinstance(data, bool)
    return kind(data) if number and 0 <= data < 1e30 else default


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object; {} for what is none, as the line that is being written."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _told(path: str, default: Any = "") -> Any:
    """A field, and where result.json has it."""
    return dataclasses.field(default=default, metadata={"path": path})


@dataclasses.dataclass(kw_only=True)
class RunRecord:
    """Zero and '' stand for what the files do not tell."""

    path: pathlib.Path
    name: str
    source: str  # maxbench | nemo | megatron | maxtext; '' = could not be read
    status: str = _told("status")  # done | stopped | failed | died | running | skipped
    reason: str = _told("reason")
    model: str = _told("config.model.name")
    size: str = _told("config.model.size")
    dtype: str = _told("config.precision.dtype")
    gpu_type: str = _told("device.gpu_type")
    device: str = _told("device.kind")  # as the run called it
    gpus: int = _told("device.count", 0)
    gbs: int = _told("config.layout.gbs", 0)
    seq: int = _told("config.train.seq", 0)
    layers: int = _told("config.model.layers", 0)
    planned: int = _told("config.train.steps", 0)  # steps
    started: float = _told("started", 0.0)  # seconds since 1970
    mocked: bool = _told("mocked", False)
    profiled: str = _told("config.profile.tool")
    step_s: dict[int, float] = dataclasses.field(default_factory=dict)
    tflops: dict[int, float] = dataclasses.field(default_factory=dict)  # as logged
    loss: dict[int, float] = dataclasses.field(default_factory=dict)
    peak_bytes: int = _told("peak_bytes", 0)
    power_w: float = 0.0  # mean over GPUs while they are busy
    saves: list[float] = dataclasses.field(default_factory=list)  # seconds of each checkpoint
    loads: list[float] = dataclasses.field(default_factory=list)
    result: dict = dataclasses.field(default_factory=dict)
    damaged: int = 0  # lines about steps that could not be read
    unread: list[str] = dataclasses.field(default_factory=list)  # what else could not, in words

    @property
    def last(self) -> int:
        """The last step that was logged; -1 where there is none."""
        return max(self.step_s, default=-1)

    def to_run(self, gpu_types: GpuTypes = GPU_TYPES) -> Run:
        """The run of the same program, for plan.

        Raises:
          UserError: it is none of this version, or ran on something else than it was for.
        """
        try:
            run = resolve.run_from_dict(self.result["config"], gpu_types)
        except UserError as e:
            raise UserError(f"its configuration is of another version of maxbench: {e}") from None
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
            raise UserError("its configuration is of another version of maxbench") from None
        if self.mocked or self.gpu_type != run.layout.gpu_type:
            ran = "with its network mocked" if self.mocked else f"on {self.device or self.gpu_type}"
            raise UserError(f"the run was {ran}, a plan would be for {run.layout.gpu_type}")
        return run
