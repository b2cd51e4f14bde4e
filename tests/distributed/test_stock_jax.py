"""Losses and stops as jax.distributed alone handles them: why maxbench.distributed has its own.

A test that fails with a later jax means that a mechanism of maxbench.distributed can go.
"""

import signal
import time

import pytest

from tests.distributed import stock

pytestmark = pytest.mark.exhaustive
ABORTED = -signal.SIGABRT  # by XLA, with a C++ stack trace


@pytest.fixture
def start(tmp_path):
    """Starts processes, and waits until they step."""
    started = []

    def start_and_step(waits_for="step 3", **options) -> stock.Processes:
        started.append(run := stock.Processes(tmp_path, **options))
        for i in run.processes if not options.get("absent") else ():
            run.wait_for(waits_for, i)
        return run

    yield start_and_step
    for run in started:
        run.close()


def test_missing_process_is_not_named(start):
    """rendezvous.py names it and its host, says each 30 s what it waits for, and exits with 2."""
    run = start(count=3, absent=(1,))
    assert run.exit_code(0) == run.exit_code(2) == ABORTED
    printed = run.printed(0)
    assert "DEADLINE_EXCEEDED" in printed
    assert "RegisterTask" in printed
    assert "task:1" not in printed
    assert "process 1" not in printed


def test_process_that_dies_is_known_by_an_address_of_gloo(start):
    """peer_watch.py writes its number, host and log into the result. NCCL says nothing at all."""
    run = start(count=3)
    run.signal(1, signal.SIGKILL)
    assert 0 not in (run.exit_code(0), run.exit_code(2))
    printed = run.printed(0) + run.printed(2)
    assert "[127.0.0.1]" in printed  # in "by peer [ADDRESS]" or "Read error [ADDRESS]:PORT"
    assert "process 1" not in printed


@pytest.mark.parametrize("recoverable", [False, True])
def test_process_0_takes_the_others_with_it_when_it_dies(start, recoverable):
    """They name no process, and write no result. service_relay.py keeps their connections."""
    run = start(recoverable=recoverable)
    run.signal(0, signal.SIGKILL)
    assert run.exit_code(1, stock.RESULT_S) == ABORTED
    assert "CoordinationService/PollForError" in run.printed(1)
    assert "result written" not in run.printed(1)


def test_heartbeats_abort_all_and_name_the_frozen_process_by_number_in_one_log(start):
    """hang_detector.py names its host in the run's log and result, and exit code 75 restarts."""
    run = start(count=3)
    run.signal(1, signal.SIGSTOP)
    assert run.exit_code(0) == run.exit_code(2) == ABORTED
    assert "unhealthy (stopped sending heartbeats):\n1\n" in run.printed(0)
    assert "result written" not in run.printed(0) + run.printed(2)


def test_frozen_recoverable_process_is_not_noticed(start):
    run = start(count=3, recoverable=True)
    run.signal(1, signal.SIGSTOP)
    assert run.exit_code(0, 12) is None
    assert "result written" not in run.printed(0)


def test_frozen_process_0_is_not_named(start):
    run = start()
    run.signal(0, signal.SIGSTOP)
    assert run.exit_code(1) == ABORTED
    assert "CoordinationService/Heartbeat" in run.printed(1)
    assert "result written" not in run.printed(1)


@pytest.mark.parametrize("number", [stock.STUCK, stock.LOCKED])
def test_heartbeats_go_on_while_python_is_stuck(start, number):
    """A thread of C++ sends them. hang_detector.py finds both, and prints the stack."""
    run = start()
    run.signal(1, number)
    assert run.exit_code(0, 12) is None  # Gloo gives up after 30 s, NCCL never
    assert "heartbeat" not in run.printed(0).lower()


@pytest.mark.parametrize("lost", [0, 1])
def test_callback_for_errors_ends_the_process(start, lost):
    """jaxlib's own way to go on after a lost process: it cannot convert the status for Python."""
    run = start(callback=True)
    run.signal(lost, signal.SIGSTOP)
    assert run.exit_code(1 - lost) == ABORTED
    assert "std::bad_cast" in run.printed(1 - lost)


def test_all_processes_stop_after_the_same_step(start):
    """As stop_consensus.py, while all processes run."""
    run = start(count=3)
    run.signal(1, signal.SIGTERM)
    assert {run.exit_code(i) for i in range(3)} == {0}
    steps = {run.printed(i).rpartition("stopped at step ")[2] for i in range(3)}
    assert len(steps) == 1


def test_stop_waits_for_a_frozen_process_with_pythons_lock(start):
    """For 3 minutes: no thread could find the frozen process. stop_consensus.py ends its wait."""
    run = start(heartbeat_s=1000, collectives=False)
    run.signal(1, signal.SIGSTOP)
    run.signal(0, signal.SIGTERM)
    time.sleep(8)
    run.signal(1, signal.SIGCONT)
    printed = run.wait_for("paused for ")
    assert float(printed.partition("paused for ")[2].split()[0]) >= 5


def test_stop_during_the_start_of_a_resumed_run_is_lost(start):
    """The step that was agreed on is the second of a new run, and long past."""
    run = start(first_step=500, heartbeat_s=1000, waits_for="initialized")
    run.signal(0, signal.SIGTERM)
    run.wait_for("step 530")
    assert "SIGTERM caught" in run.printed(0)
    assert "stopped at step" not in run.printed(0)
