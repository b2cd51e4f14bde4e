"""Runs jobs on hosts by ssh, one after the other: the process that `maxbench launch` leaves behind.

python -m maxbench.launch.hosts_driver FOLDER...
"""

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from maxbench.config import exit_codes
from maxbench.launch import hosts, node, submission
from maxbench.launch.hosts import Spec
from maxbench.launch.submission import Submission

LOCK = ".hosts.lock"  # in experiments/: jobs use the same hosts
NO_CONNECTION = 255  # exit code of ssh
GRACE_S = node.GRACE_S + node.SAVE_S + 30  # from the end of a connection to a kill
POLL_S = 0.5
Stopped = Callable[[], bool]


def main(paths: Sequence[str]) -> int:
    """Runs the jobs of the folders; returns 0 if all completed, else 1."""
    folders, stopping = [*map(pathlib.Path, paths)], []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    for folder in folders:
        hosts.write_state(folder, "PENDING", pid=os.getpid())
    states = []
    with open(folders[0].parents[1] / LOCK, "w") as lock:
        for folder in folders:
            stopped = lambda folder=folder: bool(stopping) or (folder / hosts.CANCEL).exists()
            _wait_for(lock, folder, stopped)
            state, why = ("CANCELLED", "") if stopped() else run(folder, stopped)
            hosts.write_state(folder, state, why, os.getpid())
            print(f"{folder.name}: {state} {why}".rstrip(), flush=True)
            states.append(state)
            fcntl.flock(lock, fcntl.LOCK_UN)
    return 0 if all(state == "COMPLETED" for state in states) else 1


def _wait_for(lock: IO[str], folder: pathlib.Path, stopped: Stopped) -> None:
    """Waits until no other job uses the hosts, or this one is cancelled."""
    said = False
    while not stopped():
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if not said:
            hosts.write_state(folder, "PENDING", "another job uses the hosts", os.getpid())
            said = True
        time.sleep(POLL_S)


def run(folder: pathlib.Path, stopped: Stopped) -> tuple[str, str]:
    """Runs one job, and starts it again while it can go on; returns its state and the reason."""
    about: Spec = json.loads((folder / hosts.SPEC).read_text())
    name, _, stamp = folder.name.rpartition("_")
    why = ""
    for attempt in range(about["restarts"] + 1):
        place = folder.with_name(f"{name}_{int(stamp) + attempt}")
        place.mkdir(exist_ok=True)
        submission.write(place, Submission(about["job"], "hosts", context=str(folder)))
        restarts = f"restart {attempt}" if attempt else ""
        hosts.write_state(folder, "RUNNING", restarts, os.getpid())
        codes = _start(about, place, attempt, stopped)
        _collect(place)
        code, why = _verdict(about, place, codes)
        unreachable = NO_CONNECTION in codes.values()
        if stopped():
            _write_exit(place, code or exit_codes.TERMINATED, "cancelled", "CANCELLED")
            return "CANCELLED", "cancelled"
        _write_exit(place, code, why, "FAILED" if unreachable else "")
        if code != exit_codes.RESTART:
            return ("COMPLETED", "") if code == 0 else ("FAILED", why)
    return "FAILED", f"stopped after {about['restarts']} restarts: {why}"


def _start(about: Spec, place: pathlib.Path, attempt: int, stopped: Stopped) -> dict[int, int]:
    """Starts a job on all hosts, and waits for its end.

    After the first host has failed the others have time to end by themselves; then their
    connections are closed, which ends what runs there.

    Returns:
      ssh's exit code of each host, in the order in which they ended.
    """
    running: dict[int, subprocess.Popen] = {}
    codes: dict[int, int] = {}
    close_at = kill_at = float("inf")
    with contextlib.ExitStack() as logs:
        for i in range(len(about["hosts"])):
            log = logs.enter_context(open(place / f"node-{i}.log", "ab"))
            command = hosts.ssh_command(about, i, attempt)
            running[i] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
            )
        while running:
            for i, process in [*running.items()]:
                if (code := process.poll()) is None:
                    continue
                del running[i]
                _close(process)
                codes[i] = code if code >= 0 else 128 - code
                if codes[i]:
                    wait_s = 0 if codes[i] == NO_CONNECTION else node.GRACE_S
                    close_at = min(close_at, time.monotonic() + wait_s)
            now = time.monotonic()
            if stopped() or now > close_at:
                if kill_at == float("inf"):
                    kill_at = now + GRACE_S
                for process in running.values():
                    _close(process)
            if now > kill_at:
                for process in running.values():
                    process.kill()
            time.sleep(POLL_S)
    return codes


def _close(process: subprocess.Popen) -> None:
    """Closes the connection of a host: what runs there gets SIGTERM."""
    if process.stdin:
        process.stdin.close()


def _collect(place: pathlib.Path) -> None:
    """Takes the run's files out of the first host's output, where it could not write them here."""
    log, lines = place / "node-0.log", list[str]()
    with open(log, encoding="utf-8", errors="replace") as file:
        archive = node.received(file, lines.append)
    if archive:
        node.unpack(archive, place.parent)
        log.write_text("".join(lines))


def _verdict(about: Spec, place: pathlib.Path, codes: Mapping[int, int]) -> tuple[int, str]:
    """Exit code of a job from those of its hosts as they ended, and the reason if it failed.

    A host that cannot be reached ends the job, which would fail again.
    """
    failed = [i for i, code in codes.items() if code]
    if not failed:
        return 0, ""
    lost = [i for i in failed if codes[i] == NO_CONNECTION]
    why = "; ".join(
        f"{about['hosts'][i]}: {_last_line(place, i, codes[i])}" for i in lost or failed[:1]
    )
    if exit_codes.RESTART in codes.values() and not lost:
        return exit_codes.RESTART, why
    own = [codes[i] for i in failed if codes[i] != exit_codes.RESTART]
    return own[0] if own else exit_codes.RESTART, why


def _last_line(place: pathlib.Path, i: int, code: int) -> str:
    """The last line of ssh's output if there was no connection, else the exit code."""
    if code != NO_CONNECTION:
        return f"exit code {code}"
    with contextlib.suppress(OSError):
        lines = (place / f"node-{i}.log").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no connection")
    return "no connection"


def _write_exit(place: pathlib.Path, code: int, why: str, state: str = "") -> None:
    """Adds to exit.json what the nodes could not know; writes it if they did not."""
    about = submission.read_json(place / "exit.json")
    if about.get("reason") == node.CLOSED:  # the driver closed it after another host failed
        state = state or "FAILED"
    if about and not state:
        return
    about |= {"code": code or about.get("code", 1), "phase": about.get("phase", "train")}
    about |= {"reason": why or about.get("reason", ""), "ended": int(time.time())}
    about |= {"state": state} if state else {}
    (place / "exit.json").write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
