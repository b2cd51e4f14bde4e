"""Watch over the processes of a run: a lost one is named, and ends the run everywhere.

The connections of the rendezvous stay open. The kernel closes those of a process that dies, and
keepalive those of a host that does, so the run ends on all hosts within a minute. jax by itself
would abort after 100 s of silence, and name no process.

Slurm kills all processes once the first one fails. So process 0 exits last, after the results are
written; if process 0 is the one that died, the others write them before they do anything else.
"""

import contextlib
import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable

from maxbench.distributed import messages
from maxbench.distributed.stop_consensus import StopConsensus

GRACE_S = 5.0  # time for a process to exit by itself after another was lost


class PeerWatch:
    """Connections to the other processes of a run, and the thread that watches them.

    Process 0 is connected to all others, which are connected to process 0 alone.

    Attributes:
      hosts: host of each process.
      log_paths: log of each process, or ''.
      reason: why the run ended for all processes, or ''.
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
        self.reason = ""
        self.write_result: Callable[[str], None] = lambda reason: None
        self.lost, self.closed = threading.Event(), threading.Event()
        self.stop_consensus = StopConsensus(process, len(hosts), self._send)
        self.thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)
        self.thread.start()

    def on_peer_loss(self, write_result: Callable[[str], None]) -> None:
        """Sets the function that writes the run's results, given the reason of its end.

        Process 0 calls it if the main thread does not return, the others if process 0 died.
        """
        self.write_result = write_result
        if self.reason:
            self._write_result()

    def is_last_step(self, step: int, stop_requested: bool) -> bool:
        """Whether `step` is the last one, the same in all processes.

        All processes must call it before each of their steps, with `stop_requested` if this
        process was asked to stop.
        """
        return self.stop_consensus.is_last(step, stop_requested, self.lost)

    def close(self, failure: str = "") -> None:
        """Ends the watch. With a failure the others fail too, and process 0 exits first."""
        self.closed.set()
        self._notify({"lost": self.reason} if self.reason else {"failed": failure})
        if failure and self.process:
            self.thread.join(3 * GRACE_S)

    def _watch(self) -> None:
        reported = set()  # processes whose end was announced: their hang-up is no death
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for process, connection in self.connections.items():
                selector.register(stack.enter_context(connection), selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    process = key.data
                    try:
                        message = messages.receive(self.connections[process])
                    except (OSError, ValueError):
                        selector.unregister(key.fileobj)
                        message = {} if process in reported else {"died": True}
                    if {"failed", "lost"} & {*message}:
                        reported.add(process)
                    self.stop_consensus.receive(process, message)
                    if reason := self._reason(message, process):
                        self._end_run(reason, "died" in message)

    def _reason(self, message: dict, process: int) -> str:
        """Why the run must end, from a message of a process; '' if it need not."""
        if "lost" in message:
            return message["lost"]
        name = f"process {process} of {len(self.hosts)} on {self.hosts[process]}"
        if "died" in message:
            return f"{name} died, see {self.log_paths[process] or 'its output'}"
        return f"{name}: {message['failed']}" if message.get("failed") else ""

    def _end_run(self, reason: str, died: bool) -> None:
        if self.closed.is_set() or self.reason:
            return
        self.reason = reason
        if died:
            self._write_result()
        self._notify({"lost": reason})
        self.lost.set()
        # The main thread may wait for ever, in a collective that a lost process never joins.
        if not self.closed.wait(GRACE_S * (1 + (self.process > 0))):
            if self.process == 0:
                self._write_result()
            print(f"maxbench: error: {reason}", file=sys.stderr, flush=True)
            os._exit(1)

    def _write_result(self) -> None:
        try:
            self.write_result(self.reason)
        except OSError as e:
            print(f"maxbench: result.json cannot be written: {e}", file=sys.stderr)

    def _notify(self, message: dict) -> None:
        """Sends a message; process 0 alone says which process is lost."""
        if self.process == 0 or "lost" not in message:
            self._send(message)

    def _send(self, message: dict) -> None:
        """Sends a message to process 0, or from there to all others."""
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # the watch notices
                messages.send(connection, message)
