"""Watch over the processes of a run: a lost, frozen or stuck one is named, and ends the run.

The connections of the rendezvous stay open. If a process dies, the kernel of its host closes them;
if the host dies, keepalive does within a minute. A frozen or stuck process keeps its connections:
hang_detector.py finds it by its silence, or by its steps.

Process 0 then writes result.json with the name of the lost process, sends the name to the others,
and exits after them, because Slurm kills all processes once one has failed. If process 0 is the
lost one, the others write result.json.
docs/explanation/lost_and_frozen_processes.md has what jax does without this.
"""

import contextlib
import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable

from maxbench.config import exit_codes
from maxbench.distributed import messages, stacks
from maxbench.distributed.hang_detector import Hang, HangDetector
from maxbench.distributed.progress import Progress
from maxbench.distributed.stop_consensus import StopConsensus

GRACE_S = 5.0  # time for a process to exit by itself after another was lost
TICK_S = 0.5  # between two looks at the clock, and less for a timeout below 12 s


class PeerWatch:
    """Connections to the other processes of a run, and the thread that watches them.

    Process 0 is connected to all others, which are connected to process 0 alone.

    Attributes:
      hosts: host of each process.
      log_paths: log of each process, or ''.
      progress: of this process; the run updates it.
      reason: why the run ended for all processes, or ''.
      exit_code: of a run that ended for that reason.
      hang: the frozen or stuck processes, if they are the reason.
      lost: set once a process is lost or has failed.
    """

    def __init__(
        self,
        process: int,
        hosts: list[str],
        log_paths: list[str],
        connections: dict[int, socket.socket],
    ):
        self.process, self.hosts, self.log_paths = process, hosts, log_paths
        self.connections = connections
        self.progress = Progress()
        self.reason, self.exit_code = "", exit_codes.FAILED
        self.hang: Hang | None = None
        self.write_result: Callable[[str], None] = lambda reason: None
        self.write_hang: Callable[[Hang | None, list[str]], None] = lambda hang, lines: None
        self.detector: HangDetector | None = None
        self.on_hang, self.tick_s, self.next_beat = "exit", TICK_S, 0.0
        self.reported_at, self.hang_start = -1.0, 0.0
        self.cannot_go_on = False  # a collective of this process failed
        self.lost, self.closed = threading.Event(), threading.Event()
        self.sending = threading.Lock()
        self.stop_consensus = StopConsensus(process, len(hosts), self._send)
        self.thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)
        self.thread.start()

    def watch_hangs(self, timeout_s: float, on_hang: str) -> None:
        """Finds frozen and stuck processes from now on; all processes must call it.

        Args:
          timeout_s: see hang_detector.HangDetector; 0: never.
          on_hang: exit | continue.
        """
        if timeout_s:
            self.on_hang, self.tick_s = on_hang, min(TICK_S, timeout_s / 24)
            self.detector = HangDetector(self.process, self.hosts, self.log_paths, timeout_s)

    def on_peer_loss(
        self,
        write_result: Callable[[str], None],
        write_hang: Callable[[Hang | None, list[str]], None] = lambda hang, lines: None,
    ) -> None:
        """Sets the functions that write what the watch has found.

        Args:
          write_result: writes result.json with a reason. Process 0 calls it; the others do if
            process 0 is the one that died or froze.
          write_hang: writes lines to the log, and the hang, if it is not None, to result.json.
        """
        self.write_hang, self.write_result = write_hang, write_result
        if self.reason:
            self._write_result()

    def is_last_step(self, step: int, stop_requested: bool) -> bool:
        """Whether all processes stop after `step`; each must call it before each of its steps.

        Args:
          stop_requested: this process has received SIGTERM.
        """
        return self.stop_consensus.is_last(step, stop_requested, self.lost)

    def explains(self, communication_failed: bool) -> bool:
        """Whether another process caused an exception of the main thread; sets `reason` then.

        The message that names the other process may arrive after the exception: this waits GRACE_S
        for it. A collective may fail before a frozen process is found, because Gloo waits for 30 s
        only: this then waits until the hang detector has decided.

        Args:
          communication_failed: the exception is one of a collective.
        """
        if self.lost.wait(GRACE_S):
            return True
        detector = self.detector
        if not communication_failed or not detector or not detector.suspects():
            return False
        self.cannot_go_on = detector.collective_failed = True
        return self.lost.wait(detector.timeout_s + 2 * detector.probe_s + 2 * GRACE_S)

    def close(self, failure: str = "") -> None:
        """Ends the watch. A failure ends all other processes with this one's name."""
        self.closed.set()
        stacks.cancel()
        self._notify(self._loss() if self.reason else {"failed": failure})
        if failure and self.process:
            self.thread.join(3 * GRACE_S)

    def _watch(self) -> None:
        reported = set()  # processes that have announced their end before they close
        buffers = {process: messages.Buffer() for process in self.connections}
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for process, connection in self.connections.items():
                selector.register(stack.enter_context(connection), selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select(self.tick_s):
                    process = key.data
                    try:
                        received = buffers[process].receive(self.connections[process])
                    except (OSError, ValueError):
                        selector.unregister(key.fileobj)
                        received = [{} if process in reported else {"died": True}]
                    for message in received:
                        if {"failed", "lost"} & {*message}:
                            reported.add(process)
                        self._handle(process, message)
                self._find_hang()

    def _handle(self, process: int, message: dict) -> None:
        self.stop_consensus.receive(process, message)
        if self.detector:
            self.detector.receive(process, message.get("progress"), message.get("stack"))
        if "probe" in message:
            self._send({"stack": stacks.main_thread_stack(), "progress": self.progress.report()})
        if reason := self._reason(message, process):
            hang = Hang.from_json(message["hang"]) if message.get("hang") else None
            self._end_run(reason, "died" in message, hang)

    def _find_hang(self) -> None:
        """Sends this process's progress, and ends the run if a process is frozen or stuck."""
        detector = self.detector
        if not detector or self.closed.is_set() or self.reason:
            return
        now = detector.clock()
        if frozen_s := detector.tick(self.progress):
            name = f"process {self.process} on {self.hosts[self.process]}"
            self._report(None, [f"hang: {name} was itself frozen for {frozen_s:.0f} s"])
        if now >= self.next_beat:
            self.next_beat = now + detector.beat_s
            stacks.print_stacks_after(detector.timeout_s)
            self._send({"progress": self.progress.report()})
        if self.reported_at == detector.last_change:
            if not self.cannot_go_on:
                return
        elif self.reported_at >= 0:
            self._report(None, [f"hang: the run goes on after {now - self.hang_start:.0f} s"])
            self.reported_at = -1.0
        if detector.must_probe():
            self._send({"probe": True})
        if hang := detector.verdict(stacks.main_thread_stack):
            # While the run goes on, one process is enough to report that process 0 froze.
            if self.on_hang == "exit" or self.process <= 1:
                self._report(hang, hang.lines())
            if self.cannot_go_on or (self.on_hang == "exit" and hang.must_end):
                self._end_run(hang.reason, False, hang, found_here=True)
            self.reported_at, self.hang_start = detector.last_change, now - detector.stalled_s()

    def _report(self, hang: Hang | None, lines: list[str]) -> None:
        try:
            self.write_hang(hang, lines)
        except OSError as e:
            print(f"maxbench: the log cannot be written: {e}", file=sys.stderr)

    def _reason(self, message: dict, process: int) -> str:
        """Why the run must end, from a message of a process; '' if it need not."""
        if "lost" in message:
            return message["lost"]
        name = f"process {process} of {len(self.hosts)} on {self.hosts[process]}"
        if "died" in message:
            return f"{name} died, see {self.log_paths[process] or 'its output'}"
        return f"{name}: {message['failed']}" if message.get("failed") else ""

    def _end_run(
        self, reason: str, died: bool, hang: Hang | None = None, found_here: bool = False
    ) -> None:
        if self.closed.is_set() or self.reason:
            return
        self.reason, self.hang = reason, hang
        if hang:
            self.exit_code = exit_codes.RESTART
            self._report(hang, [])
        if died or found_here:
            self._write_result()
        self._notify(self._loss(), everywhere=found_here)
        self.lost.set()
        # The main thread may wait for ever, in a collective that a lost process never joins.
        if not self.closed.wait(GRACE_S * (1 + (self.process > 0))):
            if self.process == 0:
                self._write_result()
            print(f"maxbench: error: {reason}", file=sys.stderr, flush=True)
            os._exit(self.exit_code)

    def _loss(self) -> dict:
        """The message that the run ends."""
        about = {"hang": self.hang.to_json()} if self.hang else {}
        return {"lost": self.reason, **about}

    def _write_result(self) -> None:
        try:
            self.write_result(self.reason)
        except OSError as e:
            print(f"maxbench: result.json cannot be written: {e}", file=sys.stderr)

    def _notify(self, message: dict, everywhere: bool = False) -> None:
        """Sends a message; that a process is lost, from process 0 alone, or from `everywhere`."""
        if self.process == 0 or everywhere or "lost" not in message:
            self._send(message)

    def _send(self, message: dict) -> None:
        """Sends a message to process 0, or from there to all others."""
        for connection in self.connections.values():
            with contextlib.suppress(OSError), self.sending:  # the watch notices
                messages.send(connection, message)
