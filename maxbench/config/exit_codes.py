"""Exit codes of the commands and of the processes of a job, and which of them start it again."""

DONE = 0
FAILED = 1
BAD_INPUT = 2  # the same input would fail again
RESTART = 75  # EX_TEMPFAIL of sysexits.h: stopped by SIGTERM, or a host froze
TIME_LIMIT = 124  # as timeout(1)
INTERRUPTED = 130  # by Ctrl-C, as a shell reports it
KILLED = 137  # by SIGKILL, as for want of memory
TERMINATED = 143  # by SIGTERM before it is handled

SIGTERM, TIME_IS_OVER = "SIGTERM", "time limit"  # reasons to stop a job


def restarts(code: int, stopped_by: str, saved: bool) -> bool:
    """Whether a job is started again after one of its starts has ended.

    The rule of all launchers; launch/slurm.sh repeats it for nodes without Python. A job that saved
    a checkpoint goes on from there, so a job that always fails ends. Before its first checkpoint a
    job starts again if only its hosts were at fault: it was preempted, or one of them froze.

    Args:
      code: of the process that failed first; 0 if none did.
      stopped_by: what stopped the start: SIGTERM, TIME_IS_OVER, another text, or ''.
      saved: this start saved a checkpoint.
    """
    if code in (DONE, BAD_INPUT):
        return False
    if saved or not stopped_by:
        return saved or code in (RESTART, TERMINATED)
    return stopped_by == SIGTERM
