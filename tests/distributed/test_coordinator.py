"""Addresses of process 0: names without an address yet, and loopback addresses."""

import socket
import threading

import pytest

from maxbench.config import ports
from maxbench.config.errors import UserError
from maxbench.distributed import coordinator, rendezvous
from maxbench.distributed.coordinator import Member, check_loopback
from tests.drills.kills import free_address

HOSTS = ["node1", "node1", "node2"]


@pytest.fixture
def names(monkeypatch):
    """Names and their addresses, instead of the resolver's."""
    known = {"node1": "10.0.0.1", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}

    def resolve(host, port, *args, **kwargs):
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port))]

    monkeypatch.setattr(coordinator.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(coordinator.socket, "gethostname", lambda: "node2")
    return known


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
@pytest.mark.parametrize("process", [0, 1, 2])
def test_loopback_address_of_several_hosts_is_refused(names, host, process):
    with pytest.raises(UserError) as error:
        check_loopback(f"{host}:1234", Member(process, HOSTS[process]), HOSTS)
    text = str(error.value)
    assert f"{host}:1234' is the loopback address 127.0.0.1 on {HOSTS[process]}" in text
    assert f"run on several hosts, as {'node1' if process else 'node2'}" in text


@pytest.mark.parametrize("hosts", [HOSTS, ()])
def test_name_of_another_host_that_is_loopback_here_is_refused(names, hosts):
    names["node1"] = "127.0.1.1"
    with pytest.raises(UserError, match=r"node1:1234' is the loopback address 127\.0\.1\.1 on"):
        check_loopback("node1:1234", Member(2, "node2"), hosts)


def test_loopback_address_of_one_host_is_accepted(names):
    check_loopback("127.0.0.1:1", Member(1, "node2"), ["node2", "node2"])
    check_loopback("localhost:1", Member(1, "node2"))
    check_loopback("node1:1", Member(2, "node2"), HOSTS)
    check_loopback("unknown:1", Member(2, "node2"), HOSTS)
    names["node1"] = "127.0.1.1"  # its own name, as Debian's /etc/hosts has it
    check_loopback("node1:1", Member(0, "node1"), HOSTS)


def test_rendezvous_waits_for_a_pending_pod_and_says_so(names, monkeypatch, capsys):
    """Its name has no address at first; then it is pending, while a third process connects."""
    monkeypatch.setattr(coordinator, "MESSAGE_S", 0.1)
    monkeypatch.setattr(rendezvous, "MESSAGE_S", 0.1)
    port, peers = free_address().split(":")[1], {}

    def join(i):
        member = Member(i, f"n{i}")
        peers[i] = rendezvous.rendezvous(f"pod-0:{port}", 3, member, 60.0, wait_for_name=True)

    threads = [threading.Thread(target=join, args=(i,)) for i in (0, 1, 2)]
    threads[1].start()
    wait_for(capsys, f"cannot be reached at pod-0:{port} (Name or service not known)")
    names["pod-0"] = "127.0.0.1"
    wait_for(capsys, f"process 0 cannot be reached at pod-0:{port}")
    threads[0].start()
    text = wait_for(capsys, "connected to process 0, which waits for other processes")
    if "no connection from process 2 of 3; 2 connected" not in text:
        wait_for(capsys, "no connection from process 2 of 3; 2 connected")
    threads[2].start()
    for thread in threads:
        thread.join(20)
    assert [peers[i].hosts for i in range(3)] == [["n0", "n1", "n2"]] * 3
    for one in peers.values():
        one.close()


def wait_for(capsys, text: str) -> str:
    """Waits until a text is printed; returns all that was printed meanwhile."""
    printed = ""
    for _ in range(200):
        printed += capsys.readouterr().err
        if text in printed:
            return printed
        threading.Event().wait(0.05)
    raise AssertionError(f"{text!r} is not printed: {printed}")


def test_process_that_starts_again_replaces_its_first_start():
    address, peers = free_address(), {}

    def join(i):
        peers[i] = rendezvous.rendezvous(address, 3, Member(i, f"n{i}"), 20.0)

    threads = [threading.Thread(target=join, args=(i,)) for i in range(3)]
    threads[0].start()
    rendezvous._connect(coordinator.Coordinator(address, 20.0), Member(1, "old")).close()
    threads[1].start()
    threads[1].join(0.5)  # before the last one, with which the rendezvous ends
    threads[2].start()
    for thread in threads:
        thread.join(20)
    assert [peers[i].hosts for i in range(3)] == [["n0", "n1", "n2"]] * 3
    for one in peers.values():
        one.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("node1:12345", ("node1", 12345)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[fd00::1]:12345", ("fd00::1", 12345)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_address_is_host_and_port(address, expected):
    assert coordinator.split_address(address) == expected
    assert ports.address(*expected) == address


@pytest.mark.parametrize(
    "address", ["node1", "node1:", ":1", "node1:0", "node1:65536", "fd00::1", "[::1]", "::1:1234"]
)
def test_address_of_another_form_is_refused(address):
    """Without brackets the last group of an IPv6 address would be the port."""
    with pytest.raises(UserError, match=r"is not host:port, as node1:12345 or \[fd00::1\]:12345"):
        coordinator.split_address(address)
