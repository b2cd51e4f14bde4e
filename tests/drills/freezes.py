"""Freezes, blocks and kills processes of small runs; each must be named by the others.

  python -m tests.drills.freezes --ends 60 --series 16 --seed 1
  python -m tests.drills.freezes --ends 8 --timeout_s 60 --parallel 4

A run of `ends` has a short stop, which must have no consequence, and then one that ends the run
with exit code 75. A run of a `series` goes on after some of them (on_hang=continue), and ends by
SIGKILL. Each must name the right process in result.json or in the log within 90 s, leave the log,
the metrics and the last checkpoint complete, and print no C++ stack trace. A process that is
continued after the end of the others must not write another reason.
"""

import argparse
import collections
import ctypes
import json
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent import futures

import jax

from maxbench.config import command_line
from maxbench.run import restore
from maxbench.run.checksums import array_checksums
from maxbench.sharding import mesh
from maxbench.step.train_step import Step, on_device
from tests.drills import kills

MAX_MESSAGE_S = 90
START_S, STEPS_S, EXIT_S = 600, 300, 120  # timeouts of the drill on a busy host
STUCK, LOCKED, RELEASE = signal.SIGUSR1, signal.SIGRTMIN, signal.SIGUSR2
# Kind -> the signal that begins it.
KINDS = {
    "SIGSTOP": signal.SIGSTOP,
    "SIGSTOP, SIGCONT after the end": signal.SIGSTOP,
    "main thread stuck": STUCK,
    "Python's lock kept": LOCKED,
}
CPP_TRACE = re.compile(r"Check failure stack trace|^F\d{4} |terminate called|absl::", re.M)


def start_process(flags: Sequence[str], output_path: str, devices: int = 1, **variables: str):
    """kills.start_process() of a process that blocks itself on a signal."""
    arguments = (flags, output_path, devices, variables)
    process = kills.fork_server().Process(target=_train, args=arguments)
    process.start()
    return process


def _train(*arguments) -> None:
    signal.signal(STUCK, lambda *_: _block(STUCK, signal.pause))
    signal.signal(LOCKED, lambda *_: _block(LOCKED, ctypes.PyDLL(None).pause))
    signal.signal(RELEASE, lambda *_: None)
    kills._train(*arguments)


def _block(number: int, wait: Callable[[], object]) -> None:
    """Blocks the main thread until RELEASE; but not in a save, which may take long."""
    frame, names = sys._getframe(), set()
    while frame:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    if "save" in names:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    else:
        wait()


class Stoppable(kills.RunProcesses):
    """A run whose processes block themselves on a signal."""

    start, axis = staticmethod(start_process), "dp"  # three do not divide the weights


class Run:
    """A run of several processes, with the checks that each must pass."""

    def __init__(self, out: pathlib.Path, processes: int, timeout_s: int, *flags: str):
        timeout = ["--config.runtime.hang_timeout_s", str(timeout_s)] * (timeout_s != 60)
        every = "--config.output.checkpoint_every=10"
        self.run = Stoppable(out, kills.ENDLESS, *timeout, every, *flags, processes=processes)
        self.count = processes
        self.wait(lambda: self.run.folder() and self.steps() >= 3, START_S, "three steps")
        self.folder = self.run.folder()

    def steps(self) -> int:
        return len(kills.losses(self.run.folder()))

    def wait(self, event: Callable[[], object], timeout_s: float, text: str) -> float:
        """Waits for an event; returns the seconds that it took."""
        start = time.monotonic()
        while not event():
            ended = not self.run.is_running() and not event()
            if ended or time.monotonic() - start > timeout_s:
                seconds = time.monotonic() - start
                raise AssertionError(f"no {text} in {seconds:.0f} s: {self.run.printed()[-2000:]}")
            time.sleep(0.1)
        return time.monotonic() - start

    def wait_for_steps(self, count: int = 3) -> None:
        before = self.steps()
        self.wait(lambda: self.steps() >= before + count, STEPS_S, "more steps")

    def signal(self, process: int, number: int) -> None:
        os.kill(self.run.processes[process].pid, number)

    def result(self) -> dict:
        return json.loads((self.folder / "result.json").read_text())

    def log(self) -> str:
        return next(self.folder.glob("log-*.out")).read_text()

    def name(self, process: int) -> str:
        return f"process {process} of {self.count} on n{process}"

    def stop_shortly(self, process: int, seconds: float) -> None:
        """Stops a process for less than the timeout: the run goes on."""
        self.signal(process, signal.SIGSTOP)
        time.sleep(seconds)
        self.signal(process, signal.SIGCONT)
        self.wait_for_steps()

    def end(self, process: int, kind: str, rng: random.Random) -> float:
        """Ends the run by a frozen or stuck process; returns the seconds until it is named."""
        self.signal(process, KINDS[kind])
        named = lambda: self.result()["status"] != "running"
        message_s = self.wait(named, 2 * MAX_MESSAGE_S, "result")
        self.check_hang(process, kind)
        others = [p for i, p in enumerate(self.run.processes) if i != process]
        if "SIGCONT" in kind:
            time.sleep(rng.uniform(0, 12))
            self.signal(process, signal.SIGCONT)
            others = self.run.processes
        for other in others:
            other.join(EXIT_S)
        codes = {other.exitcode for other in others}
        assert codes == {75}, f"exit codes {codes}"
        self.run.processes[process].kill()
        self.check_hang(process, kind)
        self.check_files()
        return message_s

    def check_hang(self, process: int, kind: str) -> None:
        result, stuck = self.result(), kind == "main thread stuck"
        expected = f"{self.name(process)} is {'stuck' if stuck else 'frozen'}"
        assert result["status"] == "failed", result
        assert result["reason"].startswith(expected), result
        (stalled,) = result["stalled"]
        assert stalled["process"] == process, stalled
        assert not stuck or "in _block" in stalled["stack"], stalled
        assert f"hang: {expected}" in self.log(), "no line in the log"

    def pause(self, process: int, kind: str) -> float:
        """Blocks a process of a run that goes on afterwards; returns the seconds until named."""
        self.signal(process, KINDS[kind])
        expected = f"hang: {self.name(process)} is "
        before = self.log().count(expected)
        named = lambda: self.log().count(expected) > before
        message_s = self.wait(named, 2 * MAX_MESSAGE_S, "line in the log")
        assert self.log().count("hang: process") >= before, self.log()
        last = [x for x in self.log().splitlines() if x.startswith("hang: process") and " of " in x]
        assert last[-1].startswith(expected), last[-1]
        self.signal(process, signal.SIGCONT if kind.startswith("SIGSTOP") else RELEASE)
        self.wait_for_steps()
        return message_s

    def kill(self, process: int) -> float:
        """Kills a process; returns the seconds until it is named."""
        self.signal(process, signal.SIGKILL)
        named = lambda: self.result()["status"] != "running"
        message_s = self.wait(named, 2 * MAX_MESSAGE_S, "result")
        for p in self.run.processes:
            p.join(EXIT_S)
        codes = [p.exitcode for p in self.run.processes]
        assert codes.pop(process) == -signal.SIGKILL, codes
        assert {*codes} == {1}, f"exit codes {codes}"
        reason = f"{self.name(process)} died, see {self.run.output_path}"
        assert (self.result()["status"], self.result()["reason"]) == ("failed", reason)
        self.check_files()
        return message_s

    def check_files(self) -> None:
        """Checks that nothing is lost: every step, the last checkpoint; and no C++ trace."""
        losses = kills.losses(self.folder)
        assert [*losses] == [*range(len(losses))], "steps are missing"
        assert self.log().count("completed step:") == len(losses), "steps are missing in the log"
        printed = pathlib.Path(self.run.output_path).read_text()
        assert not CPP_TRACE.search(printed), CPP_TRACE.search(printed)
        if saved := kills.last_saved_step(self.folder):
            with RESTORING:
                flags = [*kills.FLAGS, f"--steps={kills.ENDLESS}"]
                run = on_device(command_line.run_of(flags), jax.local_devices()[0])
                step = Step(run, mesh.make_mesh(run.layout))
                candidates = restore.find_checkpoints(str(self.folder), run)
                read = restore.read_onto(lambda order: step.abstract)
                restored, state = restore.restore(candidates, read)
                expected = kills.fingerprints(self.folder / "checkpoints", restored.info.step)
                assert restored.info.step >= saved, f"step {saved} is lost"
                assert array_checksums(state) == expected, "other bits"

    def close(self) -> None:
        for process in self.run.processes:
            process.kill()


RESTORING = threading.Lock()


def drill(out: pathlib.Path, number: int, series: bool, args) -> list[tuple[str, float]]:
    """One run; returns its events, each with the seconds until the process was named."""
    rng = random.Random(f"{args.seed} {series} {number}")
    processes = 2 + number % 2
    victim = number // 2 % processes
    run = Run(out, processes, args.timeout_s, *["--config.runtime.on_hang=continue"] * series)
    events = []
    try:
        if series:
            for i in range(args.pauses):
                victim = rng.randrange(processes)
                kind = [*KINDS][(0, 2, 3)[(number + i) % 3]]
                events.append((f"{kind}, run goes on", run.pause(victim, kind), victim))
            victim = number // 2 % processes
            return [*events, ("SIGKILL", run.kill(victim), victim)]
        other = rng.randrange(processes)
        run.stop_shortly(other, args.timeout_s * rng.uniform(0.1, 0.6))
        events.append(("short SIGSTOP, no consequence", 0.0, other))
        kind = [*KINDS][(number // 2 + number // 8) % len(KINDS)]
        return [*events, (kind, run.end(victim, kind, rng), victim)]
    except BaseException as e:
        e.add_note(f"{run.run.output_path}, {processes} processes, victim {victim}, {events}")
        raise
    finally:
        run.close()


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ends", type=int, default=8, help="runs that end by one process")
    parser.add_argument("--series", type=int, default=2, help="runs that go on after hangs")
    parser.add_argument("--pauses", type=int, default=9, help="hangs of one series")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--timeout_s", type=int, default=10, help="60: the default setting")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    os.nice(19 - os.nice(0))
    kills.fork_server()
    seconds, failures = collections.defaultdict(list), 0
    root = pathlib.Path(tempfile.mkdtemp(prefix="freezes-"))
    cases = [
        (i, series) for series in (False, True) for i in range((args.ends, args.series)[series])
    ]
    random.Random(args.seed).shuffle(cases)
    with futures.ThreadPoolExecutor(args.parallel) as pool:
        runs = {}
        for i, series in cases:
            folder = root / f"{i}{'series' * series}"
            runs[pool.submit(drill, folder, i + args.first, series, args)] = folder
        for future in futures.as_completed(runs):
            try:
                for kind, message_s, victim in future.result():
                    seconds[kind, "process 0" if victim == 0 else "another"].append(message_s)
                    print(f"{kind}: process {victim}, {message_s:.1f} s", flush=True)
                shutil.rmtree(runs[future])
            except Exception:
                failures += 1
                print(f"FAILED {runs[future]}: {traceback.format_exc()[-3000:]}", flush=True)
    for (kind, who), values in sorted(seconds.items()):
        print(f"| {kind} | {who} | {len(values)} | {min(values):.1f} to {max(values):.1f} s |")
    longest = max((max(values) for values in seconds.values()), default=0.0)
    print(f"{sum(map(len, seconds.values()))} events, {failures} failed runs; {longest:.1f} s")
    return int(failures > 0 or longest > MAX_MESSAGE_S)


if __name__ == "__main__":
    sys.exit(main())
