"""Profiles: windows of steps under Nsight Systems or XPlane."""

import contextlib
import ctypes
import pathlib
import sys

from maxbench.config.errors import UserError
from maxbench.config.run import Profile


class Window:
    """Opens the profiler before its first step and closes it after its last, on chosen processes.

    Under nsys (started by launch/task.sh with --capture-range=cudaProfilerApi) it moves CUDA's
    profiler range; xplane needs nothing but jax, and writes <folder>/xplane.
    """

    def __init__(self, profile: Profile, process: int, folder: pathlib.Path):
        chosen = process in {int(r) for r in profile.ranks.split(",")}
        self.tool = profile.tool if chosen and profile.tool in ("nsys", "xplane") else ""
        self.profile, self.folder, self.open = profile, folder, False

    def edge(self, step: int) -> bool:
        """Whether the window opens or closes before this step: the queue must be empty then."""
        return bool(self.tool) and step in (self.profile.start, self.profile.stop)

    def before(self, step: int) -> None:
        """To be called before each step is started."""
        if self.edge(step):
            self.switch(on=step == self.profile.start)

    def switch(self, on: bool) -> None:
        """Opens the window or closes it, if it is not so already."""
        if self.open == on:
            return
        self.open = on
        if self.tool == "nsys":
            _cuda_profiler("cudaProfilerStart" if on else "cudaProfilerStop")
            return
        from jax import profiler  # late: importing this module needs no jax

        profiler.start_trace(str(self.folder / "xplane")) if on else profiler.stop_trace()


def _cuda_profiler(name: str) -> None:
    """Calls the CUDA runtime's profiler switch.

    Raises:
      UserError: there is no CUDA runtime, so nsys cannot see a range.
    """
    packed = pathlib.Path(sys.prefix).glob("lib/python*/site-packages/nvidia/**/libcudart.so.1?")
    for library in [*map(str, packed), "libcudart.so.13", "libcudart.so.12", "libcudart.so"]:
        with contextlib.suppress(OSError):  # another one, then
            if code := getattr(ctypes.CDLL(library), name)():
                why = f"{name} failed with CUDA error {code}"
                raise UserError(f"{why}; profile=xplane does not need it")
            return
    raise UserError(
        "profile=nsys needs CUDA's runtime (libcudart), which is not here; profile=xplane does not"
    )
