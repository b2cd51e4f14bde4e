"""Decides from messages and a clock which processes of a run are frozen or stuck.

A frozen process sends nothing: its host is stopped, or a thread keeps Python's lock. A stuck one
answers, but its main thread does not go on, so all others wait for it in a collective. jax's
heartbeats find only the first kind, and not if a thread keeps Python's lock.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from maxbench.distributed.progress import BEFORE_STEPS, WAITS, Progress

MEDIANS = 10  # step times without the end of a step
LONG = 10  # times the timeout: the first two steps, which connect GPUs; saves; profiles
MAX_NAMES = 20  # processes that a reason or a log names
BEATS = 12  # messages of a process within the timeout
PROCESSES_PER_S = 200  # messages that process 0 reads per second, at most


@dataclasses.dataclass
class StalledProcess:
    """A process that others wait for."""

    process: int
    host: str
    state: str  # frozen | stuck | waiting
    progress: str
    log_path: str = ""
    stack: str = ""  # of its main thread; '' if it did not answer


@dataclasses.dataclass
class Hang:
    """A run that does not go on, with the processes that cause it."""

    reason: str
    processes: list[StalledProcess]
    must_end: bool = True  # False: a save that takes long may still succeed

    def lines(self) -> list[str]:
        """Lines for the log: the reason, and the stack of each process."""
        lines = [f"hang: {self.reason}"]
        for p in self.processes:
            lines.append(f"hang: process {p.process} on {p.host} is {p.state}: {p.progress}")
            stack = p.stack or f"no Python stack, it does not answer; see {p.log_path or 'its log'}"
            lines += [f"hang:   {line}" for line in stack.splitlines()]
        return lines

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Hang":
        return cls(value["reason"], [StalledProcess(**p) for p in value["processes"]])


class HangDetector:
    """Progress and silence of the processes of a run, as one of them sees them.

    Process 0 receives the messages of all others, which receive those of process 0 alone. So
    process 0 decides, unless it is itself the one that is silent. A suspicion is confirmed by a
    probe, which all must answer.

    Args:
      process: number of this process.
      hosts, log_paths: of each process.
      timeout_s: seconds of silence, or without the end of a step.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        process: int,
        hosts: Sequence[str],
        log_paths: Sequence[str],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.process, self.hosts, self.log_paths = process, hosts, log_paths
        self.timeout_s, self.clock = timeout_s, clock
        self.beat_s = max(timeout_s / BEATS, len(hosts) / PROCESSES_PER_S)
        self.probe_s = min(10.0, max(3.0, timeout_s / 6))
        self.peers = [i for i in range(len(hosts)) if (i == 0) != (process == 0)]
        # If process 0 is silent, each of the others decides, not all at the same instant.
        later_s = self.probe_s + min(process, 25) / 5 if process else 0.0
        self.silence_timeout_s = timeout_s + later_s
        self.progress = {i: Progress() for i in [*self.peers, process]}
        self.stacks: dict[int, str] = {}  # answers to the probe
        self.probe_start: float | None = None
        self.probed_silent: list[int] = []
        self.last_tick = self.last_change = clock()
        self.last_message = dict.fromkeys(self.peers, self.last_tick)
        self.step_s: float | None = None
        self.collective_failed = False  # then slow steps get no more time

    def receive(self, process: int, report: list | None = None, stack: str | None = None) -> None:
        """Takes a message of a process into account.

        Args:
          report: Progress.report().
          stack: its answer to a probe.
        """
        self.last_message[process] = self.clock()
        if report is not None and self.progress[process].report() != report:
            self.progress[process] = Progress(*report)
            self.last_change = self.clock()
        if stack is not None:
            self.stacks[process] = stack

    def tick(self, progress: Progress) -> float:
        """Must be called at least once per beat, after the messages that have arrived.

        Args:
          progress: of this process.

        Returns:
          Seconds that this process was itself frozen, or 0. The others get new time then.
        """
        now = self.clock()
        gap, self.last_tick = now - self.last_tick, now
        if self.progress[self.process].report() != progress.report():
            self.progress[self.process] = Progress(*progress.report())
            self.last_change = now
        self.step_s = progress.median_s()
        if gap < self.beat_s + self.timeout_s / 4:
            return 0.0
        self.last_change, self.probe_start = now, None
        self.last_message = dict.fromkeys(self.peers, now)
        return gap

    def step_timeout_s(self) -> float:
        """Seconds without progress after which the run hangs; inf while all processes compile."""
        if self.process or all(p.phase in BEFORE_STEPS for p in self.progress.values()):
            return math.inf
        if self.collective_failed:
            return self.timeout_s
        phases = {self.progress[i].phase for i in self._behind()}
        if phases & (BEFORE_STEPS | WAITS) or self.step_s is None:
            return LONG * self.timeout_s
        return max(self.timeout_s, MEDIANS * self.step_s)

    def _behind(self) -> list[int]:
        """The processes that the others wait for; all if none is behind."""
        keys = {i: p.key for i, p in self.progress.items()}
        lowest = min(keys.values())
        return sorted(i for i, key in keys.items() if key == lowest)

    def stalled_s(self) -> float:
        """Seconds since the last progress of any process."""
        return self.clock() - self.last_change

    def suspects(self) -> bool:
        """Whether a process may be frozen or stuck, long before the timeout."""
        now, soon_s = self.clock(), self.timeout_s / 4
        silent = any(now - last > soon_s for last in self.last_message.values())
        return silent or self.stalled_s() > soon_s

    def must_probe(self) -> bool:
        """Whether to ask all processes for their stacks now; begins a probe."""
        if self.probe_start is not None:
            return False
        now = self.clock()
        silence_s = {i: now - self.last_message[i] for i in self.peers}
        self.probed_silent = [i for i in self.peers if silence_s[i] > self.silence_timeout_s]
        if not self.probed_silent and self.stalled_s() <= self.step_timeout_s():
            return False
        self.probe_start, self.stacks = now, {}
        return True

    def verdict(self, own_stack: Callable[[], str]) -> Hang | None:
        """The hang once the probe is over; None before, and if the run goes on.

        Args:
          own_stack: returns the stack of this process.
        """
        if (start := self.probe_start) is None:
            return None
        now = self.clock()
        silent = [i for i in self.peers if i not in self.stacks]
        if self.process:  # process 0 was silent for the time of a probe before
            silent = [i for i in self.probed_silent if self.last_message[i] < start]
        elif silent and (now - start < self.probe_s or self._may_answer_late(silent)):
            return None
        self.probe_start = None
        if self.last_change > start:
            silent = [i for i in silent if i in self.probed_silent]
        if silent:
            return self._frozen(silent)
        stalled = self.stalled_s() > self.step_timeout_s()
        return self._stuck(own_stack()) if stalled else None

    def _may_answer_late(self, silent: Sequence[int]) -> bool:
        """Whether a process without an answer sent a message lately: its host may be slow."""
        newest = max(self.last_message[i] for i in silent)
        return self.clock() - newest < self.timeout_s / 3

    def _frozen(self, silent: Sequence[int]) -> Hang:
        are = "is frozen: it has" if len(silent) == 1 else "are frozen: they have"
        logs = self.log_paths[silent[0]] or "its output"
        where = f", see {logs}" if len(silent) == 1 else ""
        reason = f"{self._names(silent)} {are} not answered for {self.timeout_s:.0f} s{where}"
        return Hang(reason, [self._stalled(i, "frozen", "") for i in silent[:MAX_NAMES]])

    def _stuck(self, stack: str) -> Hang:
        stacks = self.stacks | {self.process: stack}
        behind = self._behind()
        seconds = f"no step has ended for {self.step_timeout_s():.0f} s"
        if len(behind) == len(self.progress):
            step = self.progress[0].began
            reason = (
                f"{seconds}: all processes wait in step {step}, and none is behind; a GPU or the "
                "network between the hosts may hang"
            )
            state = "waiting"
        else:
            is_or_are = "is" if len(behind) == 1 else "are"
            reason = (
                f"{self._names(behind)} {is_or_are} stuck, {self.progress[behind[0]]}, and the "
                f"others wait: {seconds}"
            )
            state = "stuck"
        stalled = [self._stalled(i, state, stacks[i]) for i in behind[:MAX_NAMES]]
        waits = {self.progress[i].phase for i in behind} & WAITS
        return Hang(reason, stalled, must_end=not waits)

    def _stalled(self, process: int, state: str, stack: str) -> StalledProcess:
        progress = f"{'last reported: ' * (state == 'frozen')}{self.progress[process]}"
        host, log_path = self.hosts[process], self.log_paths[process]
        return StalledProcess(process, host, state, progress, log_path, stack)

    def _names(self, processes: Sequence[int]) -> str:
        """'process 3 of 16 on node7', 'processes 3 on node7, 4 on node8 of 16'."""
        count = len(self.hosts)
        if len(processes) == 1:
            return f"process {processes[0]} of {count} on {self.hosts[processes[0]]}"
        names = ", ".join(f"{i} on {self.hosts[i]}" for i in processes[:MAX_NAMES])
        return f"processes {names}{', ...' * (len(processes) > MAX_NAMES)} of {count}"
