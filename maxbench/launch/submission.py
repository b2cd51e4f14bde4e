"""Which job a run folder belongs to: submission.json, or the files of a Slurm job."""

import contextlib
import json
import pathlib
import shlex
from typing import Any, NamedTuple

from maxbench.run_logs import log_files

FILE = "submission.json"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
         "DEADLINE", "OUT_OF_MEMORY", "REVOKED")  # fmt: skip


class Submission(NamedTuple):
    """A job as its scheduler knows it."""

    job: str  # number or name
    scheduler: str = "slurm"
    namespace: str = ""  # on Kubernetes
    context: str = ""  # of kubectl; on hosts the folder of the first start
    shared: bool = False  # the job's nodes write to the folder that this machine sees


def write(folder: pathlib.Path, job: Submission) -> None:
    """Writes submission.json and job_id, and the start to the list of the job's starts."""
    (folder / FILE).write_text(json.dumps(job._asdict()) + "\n")
    (folder / "job_id").write_text(job.job)
    with open(folder.parent / f".job_{job.job}", "a") as starts:
        starts.write(folder.name.rpartition("_")[2] + "\n")


def of(folder: pathlib.Path) -> Submission:
    """The job of a run folder; job '' if the folder has none."""
    for name in (FILE, "job.json"):
        content = read_json(folder / name)
        if number := content.get("job"):
            kinds = {n: type(default) for n, default in Submission._field_defaults.items()}
            known = {n: content[n] for n, kind in kinds.items() if isinstance(content.get(n), kind)}
            return Submission(str(number), **known)
    with contextlib.suppress(OSError):
        text = b"".join(log_files.blocks(folder / "job_id"))
        return Submission(text.decode("utf-8", "replace").strip())
    return Submission("")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object in a file; {} if it is missing or damaged, or no regular file."""
    from maxbench.run_logs.record import parse_json  # late: a launch needs no table of log formats

    with contextlib.suppress(OSError):
        return parse_json(b"".join(log_files.blocks(path)))
    return {}


def print_next_steps(results: pathlib.Path, suite: str = "") -> None:
    """Prints the commands that show the state and the results of what was submitted."""
    report = ["maxbench", "report", *(["--suite", suite] if suite else [str(results)])]
    print(f"state: {shlex.join(['maxbench', 'jobs', str(results)])}; results: {shlex.join(report)}")
