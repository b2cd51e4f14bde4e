"""Steps of JAX programs that were measured on GPUs, with what it takes to plan them.

The rows of measured.csv are programs of MaxText and Pax. tools/very_programs.py plans MaxText's
program itself; tools/measured.py plans this program in the layout of each row.
"""

import csv
import dataclasses
import functools
import pathlib
from typing import Any

GRADES = {
    "a": "layout and software known, of 2025 or later",
    "b": "software of 2023 or 2024, or details are assumed",
    "c": "contradicted by another figure of the same work, or known at second hand",
}
AXES = ("pp", "dp", "fsdp", "cp", "tp")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measured step. A text that does not apply is ''."""

    config: str  # workload file
    overrides: str  # further settings, 'model.layers=32 model.embed=4096'
    dtype: str
    scaling: str  # of precision.scaling
    gpu_type: str
    gpus: int
    network_gbytes_per_s: float  # per GPU, one direction
    pp: int
    dp: int
    fsdp: int
    cp: int
    tp: int
    seq: int
    mbs: int
    gbs: int
    remat: str  # of train.remat: a policy, or names of tensors
    step_s: float
    framework: str  # maxtext | pax
    software: str  # versions, as the source gives them
    date: str  # year and month of the software or the measurement
    source: str
    grade: str  # a key of GRADES

    @property
    def work(self) -> str:
        """Model, dtype and GPU type: 'llama2 7b bf16 h100'."""
        settings = dict(setting.split("=") for setting in self.overrides.split())
        name, _, size = self.config.partition("_")
        name, size = settings.get("model.name", name), settings.get("model.size", size)
        return f"{name} {size} {self.dtype} {self.gpu_type}"

    @property
    def words(self) -> list[str]:
        """Words of the `maxbench plan` command for this program on this cluster."""
        flags = ("config", "dtype", "gpu_type", *AXES, "seq", "mbs", "gbs")
        values = [f"--{name}={getattr(self, name)}" for name in flags]
        settings = [f"train.remat={self.remat}", "layout.vp=1", *self.overrides.split()]
        if self.scaling:
            settings.append(f"precision.scaling={self.scaling}")
        return [*values, *(f"--config.{setting}" for setting in settings)]


@functools.cache
def rows() -> tuple[Measured, ...]:
    """All rows of measured.csv, whose columns are the fields of Measured."""
    kinds: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(Measured)}
    with open(pathlib.Path(__file__).with_name("measured.csv"), newline="") as f:
        lines = [*csv.DictReader(f)]
    return tuple(Measured(**{k: kinds[k](text) for k, text in x.items()}) for x in lines)
