"""Runs a job's processes on one node: `python -m maxbench.launch.node -- COMMAND...`.

The command of a pod on Kubernetes, and of an ssh connection with CLUSTER_TYPE=hosts. COMMAND is
that of maxbench.train; the same flags go to the preflight before it. NodeJob lists the variables
that describe the job; all nodes of a job get the same ones but for the number of the node.
"""

import base64
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from maxbench.config import exit_codes, flag_words
from maxbench.config.recipes import ROOT
from maxbench.host import identity

PREFIX = "MB_"
GRACE_S = 60  # for the other processes of a node after one has failed
SAVE_S = 120  # from SIGTERM to SIGKILL at the time limit: a checkpoint is written
CLOSED = "the connection that started it was closed"  # a reason to stop: stdin has ended
MAX_SHIPPED_BYTES = 4 << 20  # of one file in the output
BEGIN, END = "maxbench-files: begin", "maxbench-files: end"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeJob:
    """A job as one of its nodes sees it, in variables named MB_ and the field in capitals."""

    job: str = ""  # its name on the cluster
    scheduler: str = ""
    namespace: str = ""
    context: str = ""
    name: str = ""  # of the run
    out: str = "."  # folder of results, on this node
    stamp: int = 0  # of the first start; a restart adds its number
    attempt: int = 0  # 0 = first start
    nodes: int = 1
    node_index: int = 0
    node_name: str = ""
    tasks_per_node: int = 1
    coordinator: str = ""  # host:port of process 0; the preflight uses it, the run the next port
    gpus: int = 0  # of this node; 0 = the run is on CPU devices
    preflight: str = ""  # 'true' | '' = none
    allow_tcp: str = ""
    time_limit_s: int = 0  # 0 = none
    start_timeout_s: int = 0  # to wait for pending nodes; 0 = the trainer's default
    source: str = ""  # script that sets variables before the processes start
    ship: str = ""  # node 0 writes the run's files to its output: 'true' | 'if-not-shared'
    own_log: str = "true"  # 'false' = whoever reads the output of this node writes its log
    until_eof: str = ""  # 'true' = the end of stdin ends the job
    label: str = ""  # of the run in job.json
    profile: str = ""  # kind of the job

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "NodeJob":
        """The job of this node's variables. An empty one has its default."""
        values = {f.name: env.get(PREFIX + f.name.upper(), "") for f in dataclasses.fields(cls)}
        kinds = {f.name: f.type for f in dataclasses.fields(cls)}
        return cls(**{n: int(v) if kinds[n] is int else v for n, v in values.items() if v})  # type: ignore[arg-type]

    def env(self) -> dict[str, str]:
        """The variables, without those that have their default."""
        pairs = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return {PREFIX + n.upper(): str(value) for n, value, default in pairs if value != default}

    @property
    def processes(self) -> int:
        """Processes of the whole job."""
        return self.nodes * self.tasks_per_node

    @property
    def experiment(self) -> pathlib.Path:
        """The folder of all runs of this name."""
        return pathlib.Path(self.out, "experiments", self.name)

    def folder(self, attempt: int | None = None) -> pathlib.Path:
        """The folder of a start of the job (default: this one)."""
        attempt = self.attempt if attempt is None else attempt
        return self.experiment / f"{self.name}_{self.stamp + attempt}"

    def earlier_checkpoints(self) -> list[str]:
        """Folders of earlier starts that saved a complete checkpoint."""
        folders = (self.folder(i) for i in range(self.attempt))
        return [str(folder) for folder in folders if saved(folder)]


def saved(folder: pathlib.Path) -> bool:
    """Whether a run's folder has a complete checkpoint."""
    return any(folder.glob("checkpoints/[0-9]*/about/run.json"))


def main(words: Sequence[str], env: Mapping[str, str] = os.environ) -> int:
    """Runs preflight and training on this node; returns the exit code of the node.

    0: done. 75: start the job again, by the rule of exit_codes.restarts(). 124, 143: stopped by the
    time limit or the end of stdin. Others: of the first process that failed.
    """
    job, stop = NodeJob.from_env(env), Stop()
    signal.signal(signal.SIGTERM, lambda *_: stop.request(exit_codes.SIGTERM))
    if job.until_eof:
        threading.Thread(target=_stop_at_eof, args=(stop,), daemon=True).start()
    folder = job.folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        print(f"maxbench: error: {folder} cannot be created: {e.strerror}", flush=True)
        return exit_codes.BAD_INPUT
    own = [f"--config.output.stamp={job.stamp + job.attempt}"]
    if resumed := job.earlier_checkpoints():
        own += ["--resume", ",".join(resumed)]
    if job.start_timeout_s:
        own.append(f"--config.runtime.rendezvous_timeout_s={job.start_timeout_s}")
    train = flag_words.replaced(words, *own)
    log_file = f"node-{job.node_index}.log" if job.own_log == "true" else os.devnull
    shared = (folder / "submission.json").exists()  # written by the launcher
    with open(folder / log_file, "a", buffering=1) as log:
        output = Output(log)
        output.line(
            f"maxbench: JOB={job.job} RESTART={job.attempt} NODE={job.node_index} of {job.nodes} "
            f"({job.node_name or os.uname().nodename}) COORDINATOR={job.coordinator or 'none'} "
            f"FOLDER={folder} RESUME={','.join(resumed) or 'none'}"
        )
        if job.node_index == 0:
            _write_job(job)
        phase, code = "train", 0
        if job.preflight:
            phase, output.phase = "preflight", "preflight"
            code = _processes(job, preflight_of(train, job), 0, output, stop)
        if code == 0 and stop.reason:
            code = exit_codes.TERMINATED
        elif code == 0:
            phase = output.phase = "train"
            code = _processes(job, train, 1, output, stop, job.time_limit_s)
        code = exit_code(code, stop.reason, saved(folder))
        if job.node_index == 0:
            _write_exit(job, code, phase, stop.reason if code else "")
        output.line(f"maxbench: {phase} ended with exit code {code}; results: {folder}")
    if job.node_index == 0 and (job.ship == "true" or (job.ship and not shared)):
        ship(folder, sys.stdout)
    return code


def exit_code(code: int, stopped_by: str, has_saved: bool) -> int:
    """The exit code of a node from that of its processes; see main()."""
    if exit_codes.restarts(code, stopped_by, has_saved):
        return exit_codes.RESTART
    if not stopped_by or code in (exit_codes.DONE, exit_codes.BAD_INPUT):
        return code
    is_over = stopped_by == exit_codes.TIME_IS_OVER
    return exit_codes.TIME_LIMIT if is_over else exit_codes.TERMINATED


def preflight_of(train: Sequence[str], job: NodeJob) -> list[str]:
    """The command of the preflight, from that of the run."""
    words = ["maxbench.preflight" if word == "maxbench.train" else word for word in train]
    if job.allow_tcp:
        words.append("--allow_tcp")
    return [*words, f"--json={job.folder() / 'preflight.json'}"]


class Stop:
    """A request to stop, from a signal, the time limit, or the end of stdin."""

    def __init__(self):
        self.reason = ""  # exit_codes.SIGTERM, TIME_IS_OVER, or CLOSED
        self.requested = threading.Event()

    def request(self, reason: str) -> None:
        """Records the first reason."""
        self.reason = self.reason or reason
        self.requested.set()


def _stop_at_eof(stop: Stop) -> None:
    """Requests a stop when stdin ends: the connection that started this node is closed."""
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    stop.request(CLOSED)


class Output:
    """Writes lines of this node to stdout and to its log; a line at a time."""

    def __init__(self, log: IO[str]):
        self.log, self.lock, self.phase = log, threading.Lock(), ""

    def line(self, text: str) -> None:
        """Writes a line. A disk that is full does not end the job."""
        with self.lock:
            print(text, flush=True)
            with contextlib.suppress(OSError):
                self.log.write(text + "\n")

    def copy(self, process: int, stream: IO[bytes]) -> None:
        """Copies a process's output, with its number before each line as `srun --label` does."""
        for line in stream:
            self.line(f"{process}: {line.decode(errors='replace').rstrip()}")


def _processes(
    job: NodeJob,
    command: Sequence[str],
    port_offset: int,
    output: Output,
    stop: Stop,
    limit_s: int = 0,
) -> int:
    """Runs one process or one per GPU until all have ended; returns the first failure's code."""
    log_name = f"node-{job.node_index}.log"
    running: dict[int, subprocess.Popen] = {}
    copies = []
    for local in range(job.tasks_per_node):
        env = {**os.environ, **process_variables(job, local, port_offset), "MB_LOG": log_name}
        process = subprocess.Popen(
            _wrapped(job, command),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a signal to this node's group reaches them through here alone
        )
        number = job.node_index * job.tasks_per_node + local
        copies.append(threading.Thread(target=output.copy, args=(number, process.stdout)))
        copies[-1].start()
        running[number] = process
    code = _wait(running, output, stop, limit_s)
    for copy in copies:
        copy.join(10)  # a grandchild may hold the pipe open
    return code


def process_variables(job: NodeJob, local: int, port_offset: int) -> dict[str, str]:
    """Variables of one process of this node: its number, its peers and its GPU."""
    number = job.node_index * job.tasks_per_node + local
    env = {
        "MB_FOLDER": str(job.folder()) if port_offset else "",
        "MB_PROCESS": str(number),
        "MB_LOCAL_PROCESS": str(local),
    }
    if job.processes > 1:
        host, _, port = job.coordinator.rpartition(":")
        env["JAX_COORDINATOR_ADDRESS"] = f"{host}:{int(port) + port_offset}"
        env["JAX_NUM_PROCESSES"], env["JAX_PROCESS_ID"] = str(job.processes), str(number)
    if job.gpus and job.tasks_per_node > 1:
        env["JAX_CUDA_VISIBLE_DEVICES"] = str(local)
    return env


def _wrapped(job: NodeJob, command: Sequence[str]) -> list[str]:
    """The command, bound to its NUMA node where the checkout is present, and after job.source."""
    task = ROOT / "launch" / "task.sh"
    words = [*([str(task)] if task.is_file() else []), *command]
    if job.source:
        return ["bash", "-c", f'set -e; source "{job.source}"; exec "$@"', "bash", *words]
    return words


def _wait(running: dict[int, subprocess.Popen], output: Output, stop: Stop, limit_s: int) -> int:
    """Waits for the end of all processes; returns the code of the first that failed.

    Passes a stop on to them. After a failure, and after a stop, the others are killed when their
    time has passed.
    """
    started, code, signalled, kill_at = time.monotonic(), 0, False, float("inf")
    while running:
        for number, process in [*running.items()]:
            if process.poll() is None:
                continue
            del running[number]
            ended = process.returncode if process.returncode >= 0 else 128 - process.returncode
            if ended and not code:
                code, kill_at = ended, min(kill_at, time.monotonic() + GRACE_S)
                if running:
                    output.line(
                        f"maxbench: process {number} ended with exit code {ended}; the others of "
                        f"this node have {GRACE_S} s to end"
                    )
        now = time.monotonic()
        if limit_s and now - started > limit_s and not stop.requested.is_set():
            stop.request(exit_codes.TIME_IS_OVER)
            output.line(f"maxbench: the time limit of {limit_s} s has passed: SIGTERM")
        if stop.requested.is_set() and not signalled:
            signalled, kill_at = True, min(kill_at, now + SAVE_S)
            _signal(running, signal.SIGTERM)
        if now > kill_at:
            _signal(running, signal.SIGKILL)
            kill_at = now + 10
        time.sleep(0.1)
    return code


def _signal(running: Mapping[int, subprocess.Popen], number: signal.Signals) -> None:
    """Sends a signal to processes, SIGKILL also to their children."""
    for process in running.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)


def _write_job(job: NodeJob) -> None:
    """Writes job.json, and this start to the list of the job's starts."""
    about = {
        "job": job.job,
        "scheduler": job.scheduler,
        "namespace": job.namespace,
        "context": job.context,
        "shared": not job.ship,
        "restart": job.attempt,
        "nodes": job.node_name or os.uname().nodename,
        "label": job.label,
        "started": int(time.time()),
        "process": identity.of_this_process(),
    }
    (job.folder() / "job.json").write_text(json.dumps(about) + "\n")
    with open(job.experiment / f".job_{job.job}", "a") as starts:
        starts.write(f"{job.stamp + job.attempt}\n")


def _write_exit(job: NodeJob, code: int, phase: str, reason: str) -> None:
    """Writes exit.json for the report."""
    about: dict[str, Any] = {"code": code, "phase": phase, "ended": int(time.time())}
    if reason == exit_codes.TIME_IS_OVER:
        about["reason"] = f"DUE TO TIME LIMIT of {job.time_limit_s} s"
    elif reason:
        about["reason"] = CLOSED if reason == CLOSED else "stopped by SIGTERM"
    with contextlib.suppress(OSError):
        (job.folder() / "exit.json").write_text(json.dumps(about) + "\n")


def ship(folder: pathlib.Path, stream: IO[str]) -> None:
    """Writes the small files of a run's folder to a stream, between two marks, for received()."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path in sorted(folder.iterdir()):
            is_output = path.name.startswith("node-")
            if path.is_file() and not is_output and path.stat().st_size <= MAX_SHIPPED_BYTES:
                tar.add(path, f"{folder.name}/{path.name}")
    text = base64.b64encode(archive.getvalue()).decode()
    lines = [text[i : i + 120] for i in range(0, len(text), 120)]
    print(BEGIN, *lines, END, sep="\n", file=stream, flush=True)


def received(lines: Iterator[str] | Sequence[str], keep: Callable[[str], Any]) -> bytes:
    """The archive that ship() wrote to a stream, or b''; `keep` is called with all other lines."""
    found: list[str] = []
    shipping, whole = False, False
    for line in lines:
        text = line.rstrip("\n")
        if text == BEGIN:
            shipping, whole, found = True, False, []
        elif text == END:
            shipping, whole = False, True
        elif shipping:
            found.append(text)
        else:
            keep(line)
    with contextlib.suppress(ValueError):
        return base64.b64decode("".join(found), validate=True) if whole else b""
    return b""


def unpack(archive: bytes, parent: pathlib.Path) -> None:
    """Extracts the files of ship() below a folder; ignores anything but plain files in one folder.

    A damaged archive is ignored.
    """
    with (
        contextlib.suppress(OSError, tarfile.TarError, EOFError),
        tarfile.open(fileobj=io.BytesIO(archive)) as tar,
    ):
        for member in tar:
            path = pathlib.PurePosixPath(member.name)
            if not member.isfile() or path.is_absolute() or len(path.parts) != 2:
                continue
            if ".." in path.parts or (source := tar.extractfile(member)) is None:
                continue
            target = parent / path
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(target.name + ".part")
            part.write_bytes(source.read())
            part.replace(target)


if __name__ == "__main__":
    start = sys.argv.index("--") + 1 if "--" in sys.argv else 1
    sys.exit(main(sys.argv[start:]))
