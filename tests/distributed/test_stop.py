"""SIGTERM during the start of a run of several processes."""

import os
import signal
import time

from maxbench.config import command_line
from maxbench.distributed import runtime
from tests.drills import kills


def _initialize(flags: list[str], output_path: str) -> None:
    """A process whose GPUs take long to initialize."""
    run = command_line.run_of(flags)
    runtime.init_distributed(run)
    with open(output_path, "w") as file:
        file.write("initialized")
    time.sleep(60)


def test_signal_before_the_first_step_is_not_lost(tmp_path):
    """jax's preemption service would take it, and tell nobody."""
    flags = [*kills.FLAGS, "--fsdp=2", "--processes=2", "--coordinator", kills.free_address()]
    paths = [tmp_path / str(i) for i in range(2)]
    start = kills.fork_server().Process
    processes = [
        start(target=_initialize, args=([*flags, "--process", str(i)], str(path)))
        for i, path in enumerate(paths)
    ]
    for process in processes:
        process.start()
    try:
        end = time.monotonic() + 60
        while not all(path.exists() and path.read_text() for path in paths):
            assert time.monotonic() < end
            time.sleep(0.05)
        os.kill(processes[1].pid, signal.SIGTERM)
        processes[1].join(10)
        assert processes[1].exitcode == -signal.SIGTERM
    finally:
        for process in processes:
            process.kill()
            process.join()
