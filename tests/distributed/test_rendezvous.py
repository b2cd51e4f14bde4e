"""Rendezvous of processes, here threads: all connect, or learn which one is missing."""

import socket
from concurrent import futures

import pytest

from maxbench.config.errors import UserError
from maxbench.distributed import rendezvous
from tests.distributed.peers import connect
from tests.drills.kills import free_address


def test_all_processes_learn_the_hosts_of_all():
    peers = connect(free_address(), [2, 0, 1], 3)
    assert [p.hosts for p in peers] == [["n1", "n2", "n0"]] * 3
    for one in peers:
        one.close()
    assert not any(p.reason for p in peers)


def test_connections_of_other_programs_are_ignored():
    address = free_address()
    host, port = address.split(":")
    join = lambda i: rendezvous.rendezvous(address, 2, rendezvous.Member(i, f"n{i}"), 20.0)
    with futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, 0)
        for text in (b"", b"GET / HTTP/1.0\r\n\r\n", b"[]\n", b"{}\n"):
            while True:
                try:
                    with socket.create_connection((host, int(port))) as connection:
                        connection.sendall(text)
                    break
                except ConnectionRefusedError:
                    pass
        second = join(1)
        assert first.result().hosts == second.hosts == ["n0", "n1"]
        for one in (first.result(), second):
            one.close()


def test_missing_processes_are_named_in_all_others():
    for error in connect(free_address(), [0, 2], 4, 0.5, ["n0", "n7", "n1", "n8"]):
        assert isinstance(error, UserError)
        text = "process 1 on n7, 3 on n8 of 4 did not connect in 0 s; connected: n0, n1"
        assert text in str(error)
    (error,) = connect(free_address(), [0], 2, 0.1)
    assert "process 1 of 2 did not connect" in str(error)


def test_timeout_grows_with_the_number_of_processes():
    assert rendezvous.default_timeout_s(2) == 60.5
    assert rendezvous.default_timeout_s(2048) > 500


def test_two_processes_of_one_number_are_refused():
    for error in connect(free_address(), [0, 1, 1], 3):
        assert "two processes are process 1: on n" in str(error)


@pytest.mark.parametrize(
    "address", ["garbage", ":1", "n0:", "n0:x", "n0:0", "n0:65536", "no.such.host.invalid:1"]
)
def test_malformed_or_unknown_address_is_refused(address):
    (error,) = connect(address, [1], 2)
    assert isinstance(error, UserError)
    assert repr(address) in str(error)


def test_address_without_process_0_is_refused():
    address = free_address()
    (error,) = connect(address, [1], 2, 0.5)
    assert f"{address!r} cannot be reached from process 1 on n0 in 0 s" in str(error)
    # Process 0 runs, but the address is another host's.
    (error,) = connect(address.replace("127.0.0.1", "192.0.2.1"), [0], 2, 0.5)
    assert "is not an address of n0, where process 0 runs" in str(error)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (error,) = connect(f"127.0.0.1:{taken.getsockname()[1]}", [0], 2)
        assert "Address already in use" in str(error)
