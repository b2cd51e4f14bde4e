"""Progress of one process in the steps of a run, which it reports to the other processes."""

import collections
import dataclasses
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

MEDIAN_STEPS = 50  # newest steps that the median is of
# Phases of a run in their order. In those of WAITS a process may work for long between two steps.
PHASES = ("start", "compile", "steps", "profile", "evaluate", "replicas", "save", "compare")
BEFORE_STEPS, WAITS = {"start", "compile"}, {"profile", "evaluate", "replicas", "save"}
AFTER_STEP = ("evaluate", "replicas", "save", "compare")


@dataclasses.dataclass
class Progress:
    """Progress of a process; a step of -1 is none.

    The main thread and the step timer's thread write it, the peer watch reads it.
    """

    phase: str = "start"  # one of PHASES
    began: int = -1  # the newest step whose dispatch began
    dispatched: int = -1
    finished: int = -1
    step_s: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=MEDIAN_STEPS), compare=False, repr=False
    )

    def finish(self, step: int, step_s: float) -> None:
        """Records that a step ended, after so many seconds."""
        self.finished = step
        self.step_s.append(step_s)

    def median_s(self) -> float | None:
        """Median of the newest step times; None before the second step."""
        times = list(self.step_s)[1:] if len(self.step_s) < MEDIAN_STEPS else list(self.step_s)
        return statistics.median(times) if times else None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Sets a phase, and the former one again at the end."""
        former, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = former

    def report(self) -> list:
        """The values that a message contains, in the order of the fields."""
        return [self.phase, self.began, self.dispatched, self.finished]

    @property
    def key(self) -> tuple[bool, int, int, int, int]:
        """Orders processes: the one with the lowest key is behind.

        An evaluation, a comparison or a save follows a step, so a process in it is ahead of one
        before it.
        """
        after = AFTER_STEP.index(self.phase) + 1 if self.phase in AFTER_STEP else 0
        return self.phase not in BEFORE_STEPS, self.began, self.dispatched, self.finished, after

    def __str__(self) -> str:
        if self.phase in BEFORE_STEPS:
            return f"before its first step, in phase {self.phase}"
        names = (f"{self.dispatched} dispatched", f"{self.finished} finished")
        steps = ", ".join(names).replace("-1 ", "none ")
        within = f", in phase {self.phase}" if self.phase != "steps" else ""
        return f"last step {steps}{within}"
