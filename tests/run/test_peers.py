"""Processes meet, and learn who is missing or lost: here threads, with sockets between them."""

import contextlib
import socket
import threading
from concurrent import futures

import pytest

from maxbench.run import peers
from maxbench.spec.errors import UserError
from tests.run.test_train import free_address

Pool = futures.ThreadPoolExecutor


def meet(address, numbers, processes, wait=20.0):
    """What each of the processes gets that come: Peers, or what it was told."""
    with Pool(len(numbers)) as pool:
        calls = [
            pool.submit(peers.meet, address, processes, i, wait, f"n{k}")
            for k, i in enumerate(numbers)
        ]
        return [call.exception() or call.result() for call in calls]


def test_all_meet_and_leave():
    found = meet(free_address(), [2, 0, 1], 3)
    assert [p.hosts for p in found] == [["n1", "n2", "n0"]] * 3
    for one in found:
        one.leave()
    assert not any(p.why for p in found)


def test_strangers_are_not_counted():
    address = free_address()
    host, port = address.split(":")
    with Pool(1) as pool:
        first = pool.submit(peers.meet, address, 2, 0, 20.0, "n0")
        for text in (b"", b"GET / HTTP/1.0\r\n\r\n", b"[]\n", b"{}\n"):
            while True:
                try:
                    with socket.create_connection((host, int(port))) as line:
                        line.sendall(text)
                    break
                except ConnectionRefusedError:
                    pass
        second = peers.meet(address, 2, 1, 20.0, "n1")
        assert first.result().hosts == second.hosts == ["n0", "n1"]
        for one in (first.result(), second):
            one.leave()


def test_who_does_not_come_is_named_everywhere():
    for told in meet(free_address(), [0, 2], 4, 1.0):
        assert isinstance(told, UserError)
        assert "process 1, 3 of 4 did not come in 1 s; those that did are on n0, n1" in str(told)
    assert peers.seconds(2) == 60.5
    assert peers.seconds(2048) > 500


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


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("how", ["dies", "fails"])
def test_the_others_are_told_who_is_lost(monkeypatch, lost, how):
    ended = []
    monkeypatch.setattr(peers, "GRACE", 0.1)
    monkeypatch.setattr(peers.os, "_exit", ended.append)
    found = meet(free_address(), [0, 1, 2], 3)
    if how == "fails":
        found[lost].leave("out of memory")
    else:  # as the kernel does with a dead process's
        found[lost].left.set()
        for line in found[lost].lines.values():
            with contextlib.suppress(OSError):  # its own watch was first
                line.shutdown(socket.SHUT_RDWR)
    why = {"dies": "it died, see its output", "fails": "out of memory"}[how]
    others = [p for p in found if p is not found[lost]]
    for one in others:
        assert one.lost.wait(10)
        assert one.why == f"process {lost} of 3 on n{lost}: {why}"
    for thread in threading.enumerate():
        if thread.name.startswith("peers"):
            thread.join(5)
    assert ended == [1, 1]  # nobody else went on to an end of its own
