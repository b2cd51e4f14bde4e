"""Endings of a run: stop requests; status, reason and exit code of an exception."""

import signal
from collections.abc import Callable
from typing import NamedTuple

from maxbench.config import exit_codes
from maxbench.config.errors import UserError
from maxbench.config.run import Run
from maxbench.distributed.peer_watch import PeerWatch
from maxbench.run.log_writer import FolderDeleted, Log
from maxbench.run.step_timer import RunFailed
from maxbench.run_logs import deaths

DISK_FULL = ("No space left on device", "Disk quota exceeded")


# Of errors that a process sees if another does not take part in a collective: Gloo gives up after
# 30 s, before the peer watch knows which process is frozen.
COMMUNICATION = ("gloo", "nccl", "timeout", "timed out", "deadline", "unavailable", "connection")


class Ending(NamedTuple):
    """The end of a run that raised."""

    status: str  # stopped | failed
    reason: str
    code: int  # exit code; 0: a defect of the program, which keeps its traceback

    @property
    def remedy(self) -> str:
        """The remedy, by the table of causes; '' if the reason has it."""
        says_it = self.status == "stopped" or self.code == exit_codes.BAD_INPUT
        return "" if says_it else deaths.of_reason(self.reason).remedy


def explain(e: BaseException, run: Run, log: Log | None, peers: PeerWatch | None) -> Ending:
    """The ending of a run from its exception."""
    if isinstance(e, KeyboardInterrupt):
        steps = log.times if log else {}
        when = f"at step {max(steps)}" if steps else "before the first step"
        return Ending("stopped", f"stopped by you {when}", exit_codes.INTERRUPTED)
    if log and (deleted := _folder_deleted(log)):
        return Ending("failed", deleted, exit_codes.FAILED)
    if isinstance(e, UserError):
        return Ending("failed", str(e), exit_codes.BAD_INPUT)
    if isinstance(e, RunFailed):
        return Ending("failed", str(e), exit_codes.FAILED)
    if peers and peers.explains(_is_of_communication(e)):
        return Ending("failed", peers.reason, peers.exit_code)
    for text in DISK_FULL:
        if text in str(e):  # tensorstore raises no OSError
            reason = f"{text}: output_dir={run.output.dir!r}"
            return Ending("failed", reason, exit_codes.FAILED)
    first_line = str(e).splitlines()[0] if str(e) else ""
    return Ending("failed", f"{type(e).__name__}: {first_line}", 0)


def _is_of_communication(e: BaseException) -> bool:
    return any(word in str(e).lower() for word in COMMUNICATION)


def _folder_deleted(log: Log) -> str:
    """Why the exception is a consequence of a deleted folder, or ''."""
    try:
        log.check_folder()
    except FolderDeleted as e:
        return str(e)
    return ""


def stop_requests(peers: PeerWatch | None) -> Callable[[int], str]:
    """Handles SIGTERM: the step in progress is finished, and saved if checkpoints are on.

    Several processes agree on their last step, whichever of them gets the signal.

    Returns:
      A function of the next step: why that one is the last, or ''.
    """
    received: list[str] = []
    record = lambda number, _: received.append(signal.Signals(number).name)
    signal.signal(signal.SIGTERM, record)
    if peers:
        return lambda step: "SIGTERM" if peers.is_last_step(step, bool(received)) else ""
    return lambda step: received[0] if received else ""
