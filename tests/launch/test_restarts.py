"""The rule of restart: the same on Slurm, Kubernetes and hosts."""

import itertools
import pathlib
import subprocess

import pytest

from maxbench.config import exit_codes
from maxbench.launch import kubernetes, node

SLURM = pathlib.Path(__file__).parents[2] / "launch" / "slurm.sh"
STOPS = ("", exit_codes.SIGTERM, exit_codes.TIME_IS_OVER, node.CLOSED)
CODES = (0, 1, 2, 75, 124, 137, 143)


def in_script(function: str, commands: str) -> str:
    """Output of commands that use a function of the job script."""
    text = SLURM.read_text()
    start = text.index(f"\n{function}() {{")
    definition = text[start : text.index("\n}\n", start) + 3]
    words = ["bash", "-euc", definition + commands]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("code", "stopped_by", "saved", "restarts"),
    [
        (0, "", True, False),
        (0, "SIGTERM", True, False),  # in the last step: it is done
        (2, "", True, False),
        (1, "", False, False),
        (1, "", True, True),
        (75, "", False, True),  # SIGTERM or a frozen host, before the first checkpoint
        (143, "", False, True),  # SIGTERM before it is handled
        (137, "SIGTERM", False, True),  # killed, as it took too long to end
        (75, "time limit", False, False),
        (75, "time limit", True, True),
    ],
)
def test_job_starts_again_from_a_checkpoint_or_if_a_host_was_at_fault(
    code, stopped_by, saved, restarts
):
    assert exit_codes.restarts(code, stopped_by, saved) == restarts


def test_every_launcher_has_the_same_rule():
    cases = [*itertools.product(CODES, STOPS, (False, True))]
    expected = [exit_codes.restarts(*case) for case in cases]
    calls = [
        f"restarts {code} '{stop}' {str(saved).lower()} && echo 1 || echo 0\n"
        for code, stop, saved in cases
    ]
    of_slurm = in_script("restarts", "".join(calls)).split()
    assert [*map(int, of_slurm)] == expected
    assert [node.exit_code(*case) == exit_codes.RESTART for case in cases] == expected
    for saves in (False, True):
        _, failed = kubernetes.pod_failure_policy(saves)["rules"]
        codes = {*failed["onExitCodes"]["values"]}
        assert {c for c in CODES if exit_codes.restarts(c, "", saves)} - {1, 124} == codes


def test_code_of_a_job_is_that_of_the_process_that_failed_first(tmp_path):
    """As in maxbench.launch.node. The code of srun is that of the tasks which it ended."""
    messages = "echo 'srun: error: n1: task 0: Exited with exit code 2' >&2; "
    messages += "echo 'srun: error: n2: tasks 1-2: Terminated' >&2; exit 143"
    commands = f"SRUN=(bash -c {messages!r:s}) FOLDER={tmp_path} SLURM_JOB_ID=7 MB_ROOT=/\n"
    code = lambda: in_script("run", commands + "run train x 2>/dev/null || echo $?")
    assert code() == "2\n"
    commands = commands.replace("Exited with exit code 2", "Killed")
    assert code() == "137\n"
    commands = commands.replace("srun: ", "")
    assert code() == "143\n"


@pytest.mark.parametrize(
    ("end", "reason"), [("now + 30 seconds", "time limit\n"), ("now + 10 minutes", "")]
)
def test_sigterm_before_the_time_limit_is_of_the_time_limit(end, reason):
    job = f'JOB="JobId=7 EndTime=$(date -d "{end}" +%FT%T) Deadline=N/A"\n'
    assert in_script("stopped_by", job + "stopped_by") == reason
    assert in_script("stopped_by", "JOB='JobId=7 EndTime=Unknown Deadline=N/A'\nstopped_by") == ""
