"""Plain hosts by ssh: CLUSTER_TYPE=hosts. A process of this machine runs the jobs one by one.

A job uses the first hosts of SSH_HOSTS. Each gets one ssh connection, whose command is
maxbench.launch.node; the end of the connection ends the processes there. The checkout and its
Python environment must be at the same path on all hosts. Results are in the folder that this
machine sees, or are copied into it at the end of the job.
"""

import contextlib
import ipaddress
import itertools
import json
import os
import pathlib
import re
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from maxbench.config import ports
from maxbench.config.errors import UserError
from maxbench.config.recipes import ROOT
from maxbench.launch import jobs, slurm, submission
from maxbench.launch.submission import Submission
from maxbench.launch.variables import SECRETS, JobConfig
from maxbench.run_logs import folders

SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o",
       "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8")  # fmt: skip
SPEC, DRIVER, CANCEL = "hosts.json", "driver.json", "cancel"  # files of a job's first folder
STAMP_STEP = 100  # stamps of first starts are multiples: a restart adds its number
Spec = dict[str, Any]


def expand(text: str) -> list[str]:
    """'node[1-3,07] user@b [fd00::1]' as node1, node2, node3, node07, user@b, fd00::1.

    Raises:
      UserError: brackets are malformed, a host has a port, or is listed twice.
    """
    found = []
    if text.count("[") != text.count("]"):
        raise UserError(f"SSH_HOSTS={text!r} has a bracket without its pair")
    for pattern in re.findall(r"(?:[^,\s\[]|\[[^\]]*\]?)+", text):
        pattern = re.sub(r"\[([^\]]*:[^\]]*)\]$", r"\1", pattern)  # an IPv6 address
        parts = re.findall(r"([^\[]+)|\[([^\]]*)\]", pattern)
        choices = [[literal] if literal else _range(ranges, text) for literal, ranges in parts]
        found += ["".join(words) for words in itertools.product(*choices)]
    for name in found:
        host = name.rpartition("@")[2]
        if ":" in host and not _is_ipv6(host):
            raise UserError(
                f"SSH_HOSTS={text!r} has {name}, and takes no ports: give them in ~/.ssh/config, "
                "'Host node1' with 'Port 2222'"
            )
    if twice := next((host for host in found if found.count(host) > 1), ""):
        raise UserError(f"SSH_HOSTS={text!r} lists {twice} twice")
    return found


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _range(ranges: str, text: str) -> list[str]:
    """'1-3,07' as 1, 2, 3, 07."""
    found = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"SSH_HOSTS={text!r}: {part!r} in brackets is no range; as node[1-8]")
        last = int(match[2] or match[1])
        found += [str(i).zfill(len(match[1])) for i in range(int(match[1]), last + 1)]
    return found


def spec(s: JobConfig, kind: str, stamp: int) -> Spec:
    """The job as hosts.json describes it to the driver.

    Raises:
      UserError: there are too few hosts, or a variable cannot be used here.
    """
    names = expand(s.values["SSH_HOSTS"])
    excluded = {name for name in s.values["EXCLUDE_NODES"].split(",") if name}
    names = [name for name in names if name.rpartition("@")[2] not in excluded]
    if len(names) < s.nodes:
        given = f"SSH_HOSTS has {len(names)}" if names else "SSH_HOSTS is not set"
        without = " without those of EXCLUDE_NODES" if excluded else ""
        raise UserError(f"{s.run.layout.describe()} needs {s.nodes} hosts, and {given}{without}")
    if s.values["RUN_CONF_IMAGE"]:
        raise UserError(
            "RUN_CONF_IMAGE is set, and CLUSTER_TYPE=hosts uses the Python environment of the "
            "hosts: remove it, or use CLUSTER_TYPE=slurm or kubernetes"
        )
    if (restarts := s.number("MAX_RESTARTS")) >= STAMP_STEP:
        raise UserError(f"MAX_RESTARTS={restarts} must be below {STAMP_STEP}")
    if kind == "nsys" and not (ROOT / "launch" / "task.sh").is_file():
        raise UserError(
            "PROFILER='nsys' needs launch/task.sh of a checkout: launch from one, or use "
            "PROFILER=xplane"
        )
    job = f"hosts-{stamp}"
    first = names[0].rpartition("@")[2]
    many = s.nodes * s.tasks_per_node > 1
    node = jobs.node_job(
        s,
        kind,
        stamp,
        job=job,
        scheduler="hosts",
        out=str(s.out),
        coordinator=ports.address(first, jobs.port(job)) if many else "",
        own_log="false",  # the driver writes the output of the connection
        until_eof="true",
        ship="if-not-shared",
    )
    env = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **jobs.environment(s, kind)}
    env |= {} if s.on("DISABLE_PINNING") else {"MB_BIND": "numa"}
    env |= jobs.nsys_variables(s) if kind == "nsys" else {}
    return {
        "job": job,
        "hosts": names[: s.nodes],
        "root": str(ROOT),
        "python": slurm.python_of_nodes(),
        "env": env | node.env(),
        "train": jobs.command(s, kind, slurm.python_of_nodes()),
        "restarts": restarts,
    }


def remote_command(about: Spec, index: int, attempt: int) -> str:
    """The command that a host gets, for its shell."""
    env = {**about["env"], "MB_NODE_INDEX": str(index), "MB_ATTEMPT": str(attempt)}
    env["MB_NODE_NAME"] = about["hosts"][index].rpartition("@")[2]
    words = ["env", *(f"{name}={value}" for name, value in env.items())]
    words += [about["python"], "-m", "maxbench.launch.node", "--", *about["train"]]
    return f"cd {shlex.quote(about['root'])} && exec {shlex.join(words)}"


def ssh_command(about: Spec, index: int, attempt: int) -> list[str]:
    """The ssh command of a host."""
    return [*SSH, about["hosts"][index], remote_command(about, index, attempt)]


def dry_run(runs: Sequence[JobConfig]) -> str:
    """The commands that submit() would run, one for each host."""
    parts = []
    stamp = int(time.time()) // STAMP_STEP * STAMP_STEP
    for s in runs:
        for kind in jobs.job_kinds(s):
            about = spec(s, kind, stamp)
            commands = [shlex.join(ssh_command(about, i, 0)) for i in range(len(about["hosts"]))]
            title = f"# {jobs.job_name(s, kind)}: {s.describe()}"
            parts.append("\n".join([title, *commands]))
    return "\n\n".join(parts)


def submit(runs: Sequence[JobConfig], wait: bool, suite: str = "") -> int:
    """Starts a process that runs the jobs, the largest first; with `wait`, waits for it.

    Returns:
      0, or with `wait` 1 if a job did not complete.

    Raises:
      UserError: ssh is missing, or a job cannot run.
    """
    each = [(s, kind) for s in runs for kind in jobs.job_kinds(s)]
    for s, kind in each:
        spec(s, kind, 0)
    if not shutil.which("ssh"):
        raise UserError("ssh is not on PATH: CLUSTER_TYPE=hosts reaches the hosts through it")
    results, suite_list = runs[0].out / "experiments", None
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        place = str(runs[0].out)
        raise UserError(f"STAGE_PATH={place!r} cannot be written: {e.strerror}") from None
    if suite:
        suite_list = jobs.suite_writer(each, results, suite)
    made = []
    for s, kind in each:
        folder, stamp = folders.new_folder(s.out, jobs.job_name(s, kind), STAMP_STEP)
        about = spec(s, kind, stamp)
        (folder / SPEC).write_text(json.dumps(about, indent=1))
        submission.write(folder, Submission(about["job"], "hosts", context=str(folder)))
        write_state(folder, "PENDING")
        if suite_list and not kind:
            suite_list.add(folder)
        print(f"job {about['job']}: {jobs.job_name(s, kind)}: {s.describe()}: {folder}", flush=True)
        made.append(folder)
    env = {k: v for k, v in os.environ.items() if k not in SECRETS}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "maxbench.launch.hosts_driver", *map(str, made)]
    pid = _start_detached(command, env, made[0] / "driver.log")
    for folder in made:
        write_state(folder, "PENDING", pid=pid, only_new=True)
    submission.print_next_steps(results, str(suite_list.file) if suite_list else "")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if wait else 0


def _start_detached(command: list[str], env: Mapping[str, str], log: pathlib.Path) -> int:
    """Starts a process that outlives this one; returns its number."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(command[0], command, env, file_actions=actions, setsid=True)


def write_state(
    folder: pathlib.Path, state: str, why: str = "", pid: int = 0, only_new: bool = False
) -> None:
    """Writes driver.json of a job: its state, and which process runs it.

    Args:
      only_new: only if the driver itself has written nothing yet.
    """
    file = folder / DRIVER
    if only_new and submission.read_json(file).get("pid"):
        return
    about = {"state": state, "why": why, "pid": pid, "host": os.uname().nodename}
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(about) + "\n")
    part.replace(file)


def states(jobs_: Collection[Submission]) -> dict[Submission, tuple[str, str]]:
    """(state, reason) of jobs, from the files of their drivers."""
    found = {}
    for job in jobs_:
        about = submission.read_json(pathlib.Path(job.context) / DRIVER)
        state, why = str(about.get("state", "")), str(about.get("why", ""))
        pid, here = about.get("pid"), about.get("host") == os.uname().nodename
        if state and state not in submission.ENDED and here and pid and not _alive(int(pid)):
            state, why = "FAILED", f"the process that ran it, {pid} on {about['host']}, has ended"
        found[job] = (state, why)
    return found


def _alive(pid: int) -> bool:
    """Whether a process exists, and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        pass
    with contextlib.suppress(OSError, IndexError):  # macOS has no /proc
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    return True


def refresh(run_folders: Mapping[pathlib.Path, Submission]) -> None:
    """Does nothing: the driver writes all files of a job here."""


def cancel(job: Submission) -> str:
    """Asks a job's driver to stop it; returns why that failed, or ''."""
    try:
        (pathlib.Path(job.context) / CANCEL).touch()
    except OSError as e:
        return f"{job.context}: {e.strerror}"
    return ""
