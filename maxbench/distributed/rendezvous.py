"""Rendezvous of a run's processes before jax starts: a missing or misplaced one is named.

All connect to process 0 at the coordinator's address, where jax's own service listens later.
"""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from maxbench.config.errors import UserError
from maxbench.distributed import messages
from maxbench.distributed.peer_watch import PeerWatch

WAIT_LONGER = "--config.runtime.rendezvous_timeout_s waits longer"
MAX_NAMES = 20  # hosts or processes that a message names


def default_timeout_s(process_count: int) -> float:
    """Timeout of the rendezvous: 2,048 Pythons take minutes to start from a shared disk."""
    return 60 + process_count / 4


@dataclasses.dataclass(frozen=True)
class Member:
    """One process, as it introduces itself to process 0."""

    process: int
    host: str
    log_path: str = ""


@dataclasses.dataclass
class Coordinator:
    """The address of process 0, and how long to try it."""

    address: str  # host:port
    timeout_s: float
    host: str = dataclasses.field(init=False)
    port: int = dataclasses.field(init=False)
    deadline: float = dataclasses.field(init=False)  # of time.monotonic()

    def __post_init__(self):
        host, _, port = self.address.rpartition(":")
        self.host = host.strip("[]")
        if not self.host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UserError(f"coordinator={self.address!r} is not host:port, as node1:12345")
        self.port = int(port)
        self.deadline = time.monotonic() + self.timeout_s

    @property
    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    def error(self, text: str) -> UserError:
        return UserError(f"coordinator={self.address!r} {text}")


def rendezvous(
    address: str,
    process_count: int,
    member: Member,
    timeout_s: float,
    expected_hosts: Sequence[str] = (),
) -> PeerWatch:
    """Waits until all processes are connected to process 0.

    Args:
      address: host:port of process 0.
      member: this process.
      expected_hosts: host of each process, if known, to name those that do not connect.

    Raises:
      UserError: the address is malformed, unknown, or not that of process 0; two processes have
        one number; or some did not connect in time.
    """
    coordinator = Coordinator(address, timeout_s)
    try:
        socket.getaddrinfo(coordinator.host, coordinator.port)
    except OSError as e:
        raise coordinator.error(f"cannot be resolved on {member.host}: {e.strerror}") from None
    if member.process == 0:
        return _accept_all(coordinator, process_count, member, expected_hosts)
    connection = _connect(coordinator, member)
    connection.settimeout(max(1.0, coordinator.remaining_s) + 10)
    try:
        reply = messages.receive(connection)
    except (OSError, ValueError):
        connection.close()
        raise coordinator.error("closed the connection: see the log of process 0") from None
    if "error" in reply:
        connection.close()
        raise UserError(reply["error"])
    connection.settimeout(None)
    return PeerWatch(member.process, reply["hosts"], reply["log_paths"], {0: connection})


def _connect(coordinator: Coordinator, member: Member) -> socket.socket:
    """Connects to process 0 and introduces this process; retries until the deadline."""
    while True:
        try:
            target = (coordinator.host, coordinator.port)
            connection = socket.create_connection(target, timeout=5)
            messages.enable_keepalive(connection)
            messages.send(connection, dataclasses.asdict(member))
            return connection
        except OSError as e:
            error = e.strerror or str(e)
        if coordinator.remaining_s < 0:
            raise coordinator.error(
                f"cannot be reached from process {member.process} on {member.host} in "
                f"{coordinator.timeout_s:.0f} s ({error}): start process 0, or give its address; "
                f"{WAIT_LONGER}"
            )
        time.sleep(0.2)


def _accept_all(
    coordinator: Coordinator, process_count: int, itself: Member, expected_hosts: Sequence[str]
) -> PeerWatch:
    """Accepts the connections of all processes; sends each the list of all, or the error.

    Process 0 connects to itself too, through the address that all use: it may be another host's.
    """
    members: dict[int, Member] = {}
    connections: dict[int, socket.socket] = {}
    error = ""
    with _listen(coordinator, process_count) as server:
        arguments = (coordinator, itself)
        threading.Thread(target=_connect_and_close, args=arguments, daemon=True).start()
        while len(members) < process_count and not error and coordinator.remaining_s > 0:
            error = _accept(server, min(coordinator.remaining_s, 1.0), members, connections)
    error = error or _missing(coordinator, process_count, members, itself.host, expected_hosts)
    reply: dict[str, Any] = {"error": error}
    if not error:
        ordered = [members[i] for i in range(process_count)]
        hosts, log_paths = [m.host for m in ordered], [m.log_path for m in ordered]
        reply = {"hosts": hosts, "log_paths": log_paths}
    for connection in connections.values():
        with contextlib.suppress(OSError):
            messages.send(connection, reply)
    for connection in connections.values() if error else [connections.pop(0)]:
        connection.close()
    if error:
        raise UserError(error)
    return PeerWatch(0, hosts, log_paths, connections)


def _listen(coordinator: Coordinator, process_count: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    address, backlog = ("", coordinator.port), process_count + 64
    try:
        return socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=dual)
    except OSError as e:
        raise coordinator.error(f"cannot be listened on: {e.strerror}") from None


def _accept(
    server: socket.socket,
    timeout_s: float,
    members: dict[int, Member],
    connections: dict[int, socket.socket],
) -> str:
    """Accepts one connection into the two dicts; returns an error, or ''.

    Ignores whoever does not introduce itself as a process of a run, as a port scanner.
    """
    server.settimeout(timeout_s)
    try:
        connection, _ = server.accept()
    except OSError:  # timeout
        return ""
    connection.settimeout(5)
    try:
        member = Member(**messages.receive(connection))
        messages.enable_keepalive(connection)
    except (OSError, ValueError, TypeError):
        connection.close()
        return ""
    if member.process in members:
        connections[-1] = connection
        first = members[member.process].host
        return f"two processes are process {member.process}: on {first} and on {member.host}"
    connection.settimeout(None)
    members[member.process], connections[member.process] = member, connection
    return ""


def _missing(
    coordinator: Coordinator,
    process_count: int,
    members: dict[int, Member],
    host: str,
    expected_hosts: Sequence[str],
) -> str:
    """Names the processes that did not connect; '' if all did."""
    if 0 not in members:
        text = f"is not an address of {host}, where process 0 runs: give one of that host"
        return str(coordinator.error(text))
    missing = [i for i in range(process_count) if i not in members]
    if not missing:
        return ""
    known = expected_hosts if len(expected_hosts) == process_count else ()
    names = [f"{i} on {known[i]}" if known else str(i) for i in missing]
    listed = ", ".join(names[:MAX_NAMES]) + ", ..." * (len(names) > MAX_NAMES)
    connected = ", ".join(sorted({m.host for m in members.values()})[:MAX_NAMES])
    return (
        f"process {listed} of {process_count} did not connect in {coordinator.timeout_s:.0f} s; "
        f"connected: {connected}; {WAIT_LONGER}"
    )


def _connect_and_close(coordinator: Coordinator, member: Member) -> None:
    with contextlib.suppress(UserError, OSError):
        _connect(coordinator, member).close()
