"""Agreement of a run's processes on their last step, after one of them was asked to stop.

jax's reached_preemption_sync_point() agrees on a step in the same way. But it loses a SIGTERM that
arrives while a resumed run starts, and while it waits for a lost process, up to 180 s, it keeps
Python's lock: the peer watch could not run (tests/distributed/test_stock_jax.py).
"""

import threading
from collections.abc import Callable


class StopConsensus:
    """Chooses the last step of all processes, some of which are a step ahead of others.

    A process that was asked to stop sends `stop` to process 0, which sends it on to all. Each then
    answers with the `newest_step` that it began, and begins no other until process 0 names the
    `last_step`: the one after the newest of all.

    Args:
      process: number of this process.
      process_count: number of processes.
      send: sends a message to process 0, or from there to all others.
    """

    def __init__(self, process: int, process_count: int, send: Callable[[dict], None]):
        self.process, self.process_count, self.send = process, process_count, send
        self.newest_step, self.last_step = -1, -1
        self.newest_steps: dict[int, int] = {}  # by process, on process 0
        self.requested = False  # by this process
        self.started = False  # process 0 has asked for the newest steps
        self.decided = threading.Event()
        self.lock = threading.Lock()

    def is_last(self, step: int, stop_requested: bool, peer_lost: threading.Event) -> bool:
        """Whether `step` is the last one. Waits for the decision once a stop was requested.

        Args:
          step: the step that this process is about to begin.
          stop_requested: this process was asked to stop.
          peer_lost: ends the wait, for a lost process never answers.
        """
        if stop_requested and not self.requested:
            self.requested = True
            if self.process == 0:
                self.receive(0, {"stop": True})
            else:
                self.send({"stop": True})
        with self.lock:
            if not self.started:
                self.newest_step = step
                return False
        while not self.decided.wait(0.1) and not peer_lost.is_set():
            pass
        return self.decided.is_set() and step >= self.last_step

    def receive(self, process: int, message: dict) -> None:
        """Handles a message of a process; ignores those of other subjects."""
        with self.lock:
            if "stop" in message and not self.started:
                self.started, self.newest_steps[self.process] = True, self.newest_step
                everyone = self.process == 0
                self.send({"stop": True} if everyone else {"newest_step": self.newest_step})
            if "newest_step" in message:
                self.newest_steps[process] = message["newest_step"]
            if self.decided.is_set():
                return
            if "last_step" in message:
                self.last_step = message["last_step"]
                self.decided.set()
            elif self.process == 0 and len(self.newest_steps) == self.process_count:
                self.last_step = max(self.newest_steps.values()) + 1
                self.send({"last_step": self.last_step})
                self.decided.set()
