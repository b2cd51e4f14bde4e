"""Watch over processes, here threads: a lost one ends the run with its name; all stop together."""

import contextlib
import socket
import threading
import time
from concurrent import futures

import pytest

from maxbench.distributed import peer_watch
from maxbench.distributed.progress import Progress
from tests.distributed.peers import connect
from tests.drills.kills import free_address

Pool = futures.ThreadPoolExecutor


def die(peer: peer_watch.PeerWatch) -> None:
    """Closes the connections, as the kernel does for a process that died."""
    peer.closed.set()
    for connection in peer.connections.values():
        with contextlib.suppress(OSError):  # its own watch was first
            connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("how", ["dies", "fails"])
def test_lost_process_is_named_everywhere_and_its_result_written(monkeypatch, lost, how):
    exits, written = [], []

    def exit_process(code):
        exits.append(code)
        (itself,) = [p for p in peers if p.thread is threading.current_thread()]
        die(itself)

    monkeypatch.setattr(peer_watch, "GRACE_S", 0.1)
    monkeypatch.setattr(peer_watch.os, "_exit", exit_process)
    peers = connect(free_address(), [0, 1, 2], 3)
    others = [p for p in peers if p is not peers[lost]]
    text = {"dies": f" died, see {lost}.log", "fails": ": out of memory"}[how]
    reason = f"process {lost} of 3 on n{lost}{text}"
    for one in peers:
        one.on_peer_loss(lambda reason, one=one: written.append((one.process, reason)))
    if how == "fails":
        with Pool(1) as pool:  # close() waits for process 0
            pool.submit(peers[lost].close, "out of memory")
    else:
        die(peers[lost])
    for one in others:
        one.thread.join(10)
        assert one.reason == reason
    assert exits == [1, 1]  # no other process ends in its own way
    # Process 0 writes, at once after a death; if it is the one that died, all others do.
    writers = {0} if lost else {1, 2} if how == "dies" else set()
    assert {process for process, _ in written} == writers
    assert {reason} >= {text for _, text in written}


def test_loss_before_the_result_exists_is_written_later(monkeypatch):
    monkeypatch.setattr(peer_watch.os, "_exit", lambda code: None)
    peers, written = connect(free_address(), [0, 1], 2), []
    die(peers[0])
    assert peers[1].lost.wait(10)
    peers[1].on_peer_loss(written.append)
    assert written == ["process 0 of 2 on n0 died, see 0.log"]
    peers[1].close()


@pytest.mark.parametrize("requested", [[0], [1], [2], [0, 1, 2]])
def test_all_processes_stop_after_the_same_step(monkeypatch, requested):
    """Whichever is asked. The empty steps must outlast the agreement on a busy host, too."""
    steps = 5000
    monkeypatch.setattr(peer_watch.os, "_exit", lambda code: None)
    peers = connect(free_address(), [0, 1, 2], 3)
    barriers = [threading.Barrier(3) for _ in range(steps)]  # as a collective in each step

    def train(peer):
        for step in range(steps):
            last = peer.is_last_step(step, peer.process in requested and step >= 5)
            barriers[step].wait(10)
            if last:
                return step
        return steps

    with Pool(3) as pool:
        last_steps = {*pool.map(train, peers)}
    assert len(last_steps) == 1
    assert 5 <= last_steps.pop() < steps
    for one in peers:
        one.close()


def test_process_in_its_final_step_delays_no_stop():
    first, second = peers = connect(free_address(), [0, 1], 2)
    # The second begins its final step, and never asks again.
    assert not any(second.is_last_step(step, False) for step in range(3))
    with Pool(1) as pool:
        assert not first.is_last_step(0, False)
        assert not first.is_last_step(1, True)
        assert not first.is_last_step(2, False)
        assert pool.submit(first.is_last_step, 3, False).result(10)
    for one in peers:
        one.close()


@pytest.fixture
def watched(monkeypatch):
    """Connects three processes that find hangs after 2 s; collects exit codes and log lines."""
    exits, lines = [], {0: [], 1: [], 2: []}
    monkeypatch.setattr(peer_watch, "GRACE_S", 0.1)
    monkeypatch.setattr(peer_watch.os, "_exit", exits.append)
    monkeypatch.setattr(peer_watch.stacks, "print_stacks_after", lambda seconds: None)
    peers = connect(free_address(), [0, 1, 2], 3)

    def start(on_hang="exit"):
        for one in peers:
            log = lambda hang, new, i=one.process: lines[i].extend(new)
            one.on_peer_loss(lambda reason: None, log)
            one.progress = Progress("steps", 8, 8, 7)
            for step in range(3):
                one.progress.finish(5 + step, 0.01)
            one.watch_hangs(2, on_hang)
        return peers

    yield start, exits, lines
    for one in peers:
        one.closed.set()
    for one in peers:
        die(one)
        one.thread.join(10)


@pytest.mark.parametrize("stuck", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_stuck_process_is_named_everywhere_with_its_stack(watched, stuck):
    start, _, lines = watched
    peers = start()
    peers[stuck].progress = Progress("steps", 7, 7, 7, peers[stuck].progress.step_s)
    for one in peers:
        assert one.lost.wait(20)
        assert one.reason.startswith(f"process {stuck} of 3 on n{stuck} is stuck, last step 7")
        assert one.exit_code == 75
        assert [p.process for p in one.hang.processes] == [stuck]
        assert "test_stuck_process" in one.hang.processes[0].stack
    assert f"hang: {peers[0].reason}" in lines[0]


@pytest.mark.parametrize("frozen", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_frozen_process_is_named_by_the_others(watched, monkeypatch, frozen):
    peers = watched[0]()
    monkeypatch.setattr(peers[frozen], "_send", lambda message: None)
    for one in (p for p in peers if p.process != frozen):
        assert one.lost.wait(30)
        reason = f"process {frozen} of 3 on n{frozen} is frozen: it has not answered for 2 s"
        assert one.reason == f"{reason}, see {frozen}.log"
        assert one.exit_code == 75


def test_run_goes_on_after_a_hang_if_it_is_told_to(watched):
    start, exits, lines = watched
    peers = start("continue")
    peers[1].progress = Progress("steps", 7, 7, 7)
    deadline = time.monotonic() + 20
    while not lines[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "process 1 of 3 on n1 is stuck" in lines[0][0]
    for one in peers:
        one.progress = Progress("steps", 9, 9, 8, one.progress.step_s)
    while "hang: the run goes on" not in lines[0][-1] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(one.reason for one in peers)
    assert not exits


@pytest.mark.exhaustive
@pytest.mark.parametrize("frozen", [0, 2])
def test_failed_collective_waits_for_the_name_of_the_frozen_process(watched, monkeypatch, frozen):
    """Gloo gives up earlier than the peer watch. An error of another kind waits for nothing."""
    peers = watched[0]("continue")
    monkeypatch.setattr(peers[frozen], "_send", lambda message: None)
    others = [p for p in peers if p.process != frozen]
    time.sleep(1)
    with Pool(3) as pool:
        assert not any(pool.map(lambda one: one.explains(False), others))
        assert all(pool.map(lambda one: one.explains(True), others))
    for one in others:
        assert one.reason.startswith(f"process {frozen} of 3 on n{frozen} is frozen")
        assert one.exit_code == 75
