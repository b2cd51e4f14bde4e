"""Processes meet, and learn who is missing or lost: here threads, with sockets between them."""

import contextlib
import socket
import threading
from concurrent import futures

import pytest

from benchmarks.kills import free_address
from maxbench.config.errors import UserError
from maxbench.distributed import rendezvous, slurm_env

Pool = futures.ThreadPoolExecutor


def meet(address, numbers, processes, wait=20.0, expected=()):
    """What each of the processes gets that come: Peers, or what it was told."""
    with Pool(len(numbers)) as pool:
        calls = [
            pool.submit(
                rendezvous.rendezvous, address, processes, i, wait, f"n{k}", f"{i}.log", expected
            )
            for k, i in enumerate(numbers)
        ]
        return [call.exception() or call.result() for call in calls]


def test_all_meet_and_leave():
    found = meet(free_address(), [2, 0, 1], 3)
    assert [p.hosts for p in found] == [["n1", "n2", "n0"]] * 3
    for one in found:
        one.close()
    assert not any(p.why for p in found)


def test_strangers_are_not_counted():
    address = free_address()
    host, port = address.split(":")
    with Pool(1) as pool:
        first = pool.submit(rendezvous.rendezvous, address, 2, 0, 20.0, "n0")
        for text in (b"", b"GET / HTTP/1.0\r\n\r\n", b"[]\n", b"{}\n"):
            while True:
                try:
                    with socket.create_connection((host, int(port))) as line:
                        line.sendall(text)
                    break
                except ConnectionRefusedError:
                    pass
        second = rendezvous.rendezvous(address, 2, 1, 20.0, "n1")
        assert first.result().hosts == second.hosts == ["n0", "n1"]
        for one in (first.result(), second):
            one.close()


def test_who_does_not_come_is_named_everywhere():
    for told in meet(free_address(), [0, 2], 4, 0.5, ["n0", "n7", "n1", "n8"]):
        assert isinstance(told, UserError)
        text = "process 1 on n7, 3 on n8 of 4 did not come in 0 s; those that did are on n0, n1"
        assert text in str(told)
    (told,) = meet(free_address(), [0], 2, 0.1)
    assert "process 1 of 2 did not come" in str(told)
    assert rendezvous.seconds(2) == 60.5
    assert rendezvous.seconds(2048) > 500


def test_two_that_are_the_same_are_told():
    for told in meet(free_address(), [0, 1, 1], 3):
        assert "two processes are process 1: on n" in str(told)


@pytest.mark.parametrize(
    "address", ["garbage", ":1", "n0:", "n0:x", "n0:0", "n0:65536", "no.such.host.invalid:1"]
)
def test_addresses_that_cannot_be(address):
    (told,) = meet(address, [1], 2)
    assert repr(address) in str(told)


def test_addresses_that_lead_nowhere():
    address = free_address()
    (told,) = meet(address, [1], 2, 0.5)
    assert f"{address!r} cannot be reached from process 1 on n0 in 0 s" in str(told)
    # 0 is there, but not where the others are told to look for it.
    (told,) = meet(address.replace("127.0.0.1", "192.0.2.1"), [0], 2, 0.5)
    assert "does not lead to process 0 on n0" in str(told)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (told,) = meet(f"127.0.0.1:{taken.getsockname()[1]}", [0], 2)
        assert "Address already in use" in str(told)


def die(one: rendezvous.PeerWatch) -> None:
    """Hangs up, as the kernel does for the dead."""
    one.left.set()
    for line in one.lines.values():
        with contextlib.suppress(OSError):  # its own watch was first
            line.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("how", ["dies", "fails"])
def test_the_others_are_told_who_is_lost_and_one_writes_it(monkeypatch, lost, how):
    ended, wrote = [], []

    def end(code):
        ended.append(code)
        (one,) = [p for p in found if p.thread is threading.current_thread()]
        die(one)

    monkeypatch.setattr(rendezvous, "GRACE", 0.1)
    monkeypatch.setattr(rendezvous.os, "_exit", end)
    found = meet(free_address(), [0, 1, 2], 3)
    others = [p for p in found if p is not found[lost]]
    why = {"dies": f"died, see {lost}.log", "fails": "out of memory"}[how]
    why = f"process {lost} of 3 on n{lost}" + {"dies": " ", "fails": ": "}[how] + why
    for one in found:
        one.on_peer_loss(lambda why, one=one: wrote.append((one.process, why)))
    if how == "fails":
        with Pool(1) as pool:  # it waits for process 0
            pool.submit(found[lost].close, "out of memory")
    else:
        die(found[lost])
    for one in others:
        one.thread.join(10)
        assert one.why == why
    assert ended == [1, 1]  # nobody else went on to an end of its own
    # Process 0 writes, at once where no word came; and where it is the one that died, the others.
    writers = {0} if lost else {1, 2} if how == "dies" else set()
    assert {process for process, _ in wrote} == writers
    assert {why} >= {said for _, said in wrote}


def test_a_loss_that_nobody_could_write_yet_is_written(monkeypatch):
    monkeypatch.setattr(rendezvous.os, "_exit", lambda code: None)
    found, wrote = meet(free_address(), [0, 1], 2), []
    die(found[0])
    assert found[1].lost.wait(10)
    found[1].on_peer_loss(wrote.append)
    assert wrote == ["process 0 of 2 on n0 died, see 0.log"]
    found[1].close()


def test_all_stop_after_the_same_step(monkeypatch):
    """Whoever is asked, and however far the others are. Steps of no length must last until they
    have agreed, on a busy machine too."""
    most = 5000
    monkeypatch.setattr(rendezvous.os, "_exit", lambda code: None)
    for asked in ([0], [1], [2], [0, 1, 2]):
        found = meet(free_address(), [0, 1, 2], 3)
        steps = [threading.Barrier(3) for _ in range(most)]  # as a collective does

        def train(one, asked=asked, steps=steps):
            for i in range(most):
                last = one.stop(i, one.process in asked and i >= 5)
                steps[i].wait(10)
                if last:
                    return i
            return most

        with Pool(3) as pool:
            last = {*pool.map(train, found)}
        assert len(last) == 1
        assert 5 <= last.pop() < most
        for one in found:
            one.close()


def test_one_that_has_begun_its_last_step_keeps_nobody_waiting():
    found = meet(free_address(), [0, 1], 2)
    assert not any(found[1].stop(i, False) for i in range(3))  # and it does not come again
    with Pool(1) as pool:
        assert not found[0].stop(0, False)
        assert not found[0].stop(1, True)
        assert not found[0].stop(2, False)
        assert pool.submit(found[0].stop, 3, False).result(10)
    for one in found:
        one.close()


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NODELIST": "gpu-[07-09,12],b1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x3)",
}


def test_slurm_says_where_each_process_is():
    names = ["gpu-07", "gpu-08", "gpu-09", "gpu-12", "b1"]
    assert slurm_env.hosts("gpu-[07-09,12],b1") == names
    assert slurm_env.hosts("r[1-2]n[01,3]x") == ["r1n01x", "r1n3x", "r2n01x", "r2n3x"]
    assert slurm_env.places(SLURM) == [names[0], names[0], names[1], *names[1:]]
    assert slurm_env.places(SLURM | {"SLURM_DISTRIBUTION": "cyclic"}) == []
    one = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x5)", "SLURM_DISTRIBUTION": "cyclic:block"}
    assert slurm_env.places(one) == names
    assert slurm_env.places({}) == []
    assert slurm_env.address(SLURM) == f"gpu-07:{61440 + 8}"
