"""Rendezvous of a run's processes before jax starts: a missing or misplaced one is named.

jax itself aborts the others after its timeout and names none: tests/distributed/test_stock_jax.py.
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
from maxbench.distributed.coordinator import (
    MESSAGE_S,
    Coordinator,
    Member,
    check_name,
    loopback_address,
)
from maxbench.distributed.peer_watch import PeerWatch

WAIT_LONGER = "--config.runtime.rendezvous_timeout_s waits longer"
MAX_NAMES = 20  # hosts or processes that a message names


def default_timeout_s(process_count: int) -> float:
    """Timeout of the rendezvous: 2,048 Pythons take minutes to start from a shared disk."""
    return 60 + process_count / 4


def rendezvous(
    address: str,
    process_count: int,
    member: Member,
    timeout_s: float,
    expected_hosts: Sequence[str] = (),
    wait_for_name: bool = False,
) -> PeerWatch:
    """Waits until all processes are connected to process 0. Prints every 30 s which are missing.

    Args:
      address: host:port of process 0.
      member: this process.
      expected_hosts: host of each process, if known, to name those that do not connect.
      wait_for_name: wait for the coordinator's name, too: a pod's exists once it is scheduled.

    Raises:
      UserError: the address is malformed, unknown, or not that of process 0; two processes have
        one number; or some did not connect in time.
    """
    coordinator = Coordinator(address, timeout_s)
    if not wait_for_name:
        check_name(coordinator, member)
    if member.process == 0:
        return _accept_all(coordinator, process_count, member, expected_hosts)
    connection = _connect(coordinator, member)
    try:
        reply = _receive_reply(coordinator, connection)
    except (OSError, ValueError):
        connection.close()
        raise coordinator.error("closed the connection: see the log of process 0") from None
    if "error" in reply:
        connection.close()
        raise UserError(reply["error"])
    connection.settimeout(None)
    return PeerWatch(member.process, reply["hosts"], reply["log_paths"], {0: connection})


def _receive_reply(coordinator: Coordinator, connection: socket.socket) -> dict:
    """Waits for the message of process 0 that all are connected."""
    while True:
        connection.settimeout(min(MESSAGE_S, max(1.0, coordinator.remaining_s + 10)))
        with contextlib.suppress(TimeoutError):
            connection.recv(1, socket.MSG_PEEK)
            connection.settimeout(10)
            return messages.receive(connection)
        if coordinator.remaining_s < -10:
            raise TimeoutError
        coordinator.report_wait("connected to process 0, which waits for other processes")


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
        coordinator.report_wait(f"process 0 cannot be reached at {coordinator.address} ({error})")
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
    known = expected_hosts if len(expected_hosts) == process_count else ()
    with _listen(coordinator, process_count) as server:
        arguments = (coordinator, itself)
        threading.Thread(target=_connect_and_close, args=arguments, daemon=True).start()
        while len(members) < process_count and not error and coordinator.remaining_s > 0:
            error = _accept(server, min(coordinator.remaining_s, 1.0), members, connections)
            coordinator.report_wait(
                f"no connection from process {_listed(members, process_count, known)} of "
                f"{process_count}; {len(members)} connected"
            )
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
    if member.process in members and _is_closed(connections[member.process]):
        connections.pop(member.process).close()  # a pod that was started again
        del members[member.process]
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
    if len(members) == process_count:
        return ""
    known = expected_hosts if len(expected_hosts) == process_count else ()
    listed = _listed(members, process_count, known)
    connected = ", ".join(sorted({m.host for m in members.values()})[:MAX_NAMES])
    remedy = WAIT_LONGER
    if loopback := loopback_address(coordinator.host):
        remedy += f"; no other host reaches {loopback}, the address of {coordinator.host} on {host}"
    return (
        f"process {listed} of {process_count} did not connect in {coordinator.timeout_s:.0f} s; "
        f"connected: {connected}; {remedy}"
    )


def _listed(members: dict[int, Member], process_count: int, known: Sequence[str]) -> str:
    """The processes that are missing, with their hosts if known: '3 on node7, 5 on node9'."""
    missing = [i for i in range(process_count) if i not in members]
    names = [f"{i} on {known[i]}" if known else str(i) for i in missing[:MAX_NAMES]]
    return ", ".join([*names, "..."] if len(missing) > MAX_NAMES else names)


def _is_closed(connection: socket.socket) -> bool:
    """Whether the process at the other end has ended."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _connect_and_close(coordinator: Coordinator, member: Member) -> None:
    with contextlib.suppress(UserError, OSError):
        _connect(coordinator, member).close()
