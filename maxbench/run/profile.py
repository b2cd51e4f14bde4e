"""Profiles of chosen steps, by Nsight Systems or as XPlane."""

import contextlib
import ctypes
import gzip
import pathlib
import sys
from collections.abc import Callable

from maxbench.config.errors import UserError
from maxbench.config.run import Profile

PROGRAM = "step.hlo.txt.gz"


class Window:
    """Starts the profiler before the first profiled step and stops it after the last.

    Under nsys, which launch/task.sh starts with --capture-range=cudaProfilerApi, it opens and
    closes CUDA's profiler range. xplane needs jax alone, and writes <folder>/xplane: the trace, and
    by the first process the program, whose operations the events of the trace name.

    Args:
      process: number of this process; those not in profile.ranks record nothing.
      program: returns the text of the compiled step.
    """

    def __init__(
        self, profile: Profile, process: int, folder: pathlib.Path, program: Callable[[], str]
    ):
        ranks = [int(rank) for rank in profile.ranks.split(",")]
        chosen, self.program = process in ranks, program
        self.first = process == min(ranks)
        self.tool = profile.tool if chosen and profile.tool in ("nsys", "xplane") else ""
        self.profile, self.folder, self.recording = profile, folder, False

    def changes_at(self, step: int) -> bool:
        """Whether the profiler starts or stops before this step: no step may be in flight then."""
        return bool(self.tool) and step in (self.profile.start, self.profile.stop)

    def before_step(self, step: int) -> None:
        """Starts or stops the profiler, if this is the step to do so."""
        if self.changes_at(step):
            self._record(step == self.profile.start)

    def close(self) -> None:
        """Stops the profiler if it still records."""
        self._record(False)

    def _record(self, on: bool) -> None:
        if self.recording == on:
            return
        self.recording = on
        if self.tool == "nsys":
            _call_cuda_profiler("cudaProfilerStart" if on else "cudaProfilerStop")
            return
        from jax import profiler  # importing this module needs no jax

        folder = self.folder / "xplane"
        if on and self.first:
            folder.mkdir(exist_ok=True)
            (folder / PROGRAM).write_bytes(gzip.compress(self.program().encode()))
        profiler.start_trace(str(folder)) if on else profiler.stop_trace()


def _call_cuda_profiler(function: str) -> None:
    """Calls a function without arguments of the CUDA runtime.

    Raises:
      UserError: the CUDA runtime is not installed, or the call fails.
    """
    wheels = pathlib.Path(sys.prefix).glob("lib/python*/site-packages/nvidia/**/libcudart.so.1?")
    for library in [*map(str, wheels), "libcudart.so.13", "libcudart.so.12", "libcudart.so"]:
        with contextlib.suppress(OSError):  # not installed: try the next
            if code := getattr(ctypes.CDLL(library), function)():
                raise UserError(
                    f"profile=nsys: {function} failed with CUDA error {code}; profile=xplane does "
                    "not need it"
                )
            return
    raise UserError(
        "profile=nsys needs the CUDA runtime (libcudart), which is not installed; profile=xplane "
        "does not"
    )
