"""One run as its files tell it, whoever wrote them."""

import dataclasses
import pathlib


@dataclasses.dataclass(kw_only=True)
class Record:
    """Zero and '' stand for what the files do not tell."""

    path: pathlib.Path
    name: str
    source: str  # maxbench | nemo | megatron | maxtext
    status: str = ""  # done | stopped | failed | died | running
    reason: str = ""
    model: str = ""
    size: str = ""
    dtype: str = ""
    gpu_type: str = ""  # a name of gpus.GPUS
    device: str = ""  # as the run called it
    gpus: int = 0
    gbs: int = 0
    seq: int = 0
    layers: int = 0
    planned: int = 0  # steps
    started: float = 0.0  # seconds since 1970
    mocked: bool = False
    profiled: str = ""
    step_s: dict[int, float] = dataclasses.field(default_factory=dict)
    tflops: dict[int, float] = dataclasses.field(default_factory=dict)  # as logged
    loss: dict[int, float] = dataclasses.field(default_factory=dict)
    peak_bytes: int = 0
    power_w: float = 0.0  # mean over GPUs while they are busy
    saves: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # seconds, bytes
    loads: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    result: dict = dataclasses.field(default_factory=dict)

    @property
    def last(self) -> int:
        """The last step that was logged; -1 where there is none."""
        return max(self.step_s, default=-1)
