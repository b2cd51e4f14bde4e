"""Address of process 0, and the processes that look for it there."""

import dataclasses
import ipaddress
import re
import socket
import sys
import time
from collections.abc import Sequence

from maxbench.config.errors import UserError

MESSAGE_S = 30.0  # between two messages of a process that waits


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
    start: float = dataclasses.field(init=False)  # of time.monotonic()
    deadline: float = dataclasses.field(init=False)
    next_message: float = dataclasses.field(init=False)

    def __post_init__(self):
        self.host, self.port = split_address(self.address)
        self.start = time.monotonic()
        self.deadline, self.next_message = self.start + self.timeout_s, self.start + MESSAGE_S

    @property
    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    def error(self, text: str) -> UserError:
        return UserError(f"coordinator={self.address!r} {text}")

    def report_wait(self, text: str) -> None:
        """Prints what a process waits for, every MESSAGE_S: a sibling may still be pending."""
        now = time.monotonic()
        if now >= self.next_message:
            self.next_message = now + MESSAGE_S
            waited = f"{now - self.start:.0f} of {self.timeout_s:.0f} s"
            print(f"maxbench: waiting since {waited}: {text}", file=sys.stderr, flush=True)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of 'host:port' or '[IPv6]:port'.

    Raises:
      UserError: it is malformed.
    """
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:]+)):(\d{1,5})", address, re.ASCII)
    if not match or not 0 < int(match[3]) < 1 << 16:
        raise UserError(
            f"coordinator={address!r} is not host:port, as node1:12345 or [fd00::1]:12345"
        )
    return match[1] or match[2], int(match[3])


def check_name(coordinator: Coordinator, member: Member) -> None:
    """Checks that the coordinator's name has an address.

    Raises:
      UserError: it has none.
    """
    try:
        socket.getaddrinfo(coordinator.host, coordinator.port)
    except OSError as e:
        text = f"cannot be resolved on {member.host}: {e.strerror}"
        raise coordinator.error(text) from None


def loopback_address(host: str) -> str:
    """The address of a name that has loopback addresses alone, or ''."""
    try:
        addresses = [str(address[0]) for *_, address in socket.getaddrinfo(host, 0)]
    except OSError:
        return ""
    parsed = [ipaddress.ip_address(address.partition("%")[0]) for address in addresses]
    return addresses[0] if parsed and all(x.is_loopback for x in parsed) else ""


def check_loopback(address: str, member: Member, hosts: Sequence[str] = ()) -> None:
    """Checks that an address of process 0 is no loopback address on a host that is not process 0's.

    The name of process 0's host may be one on that host itself (/etc/hosts of Debian): it listens
    on all addresses.

    Args:
      hosts: host of each process, if known.

    Raises:
      UserError: the address is a loopback address, and there are other hosts.
    """
    host, _ = split_address(address)
    if not (loopback := loopback_address(host)):
        return
    names = {name.partition(".")[0] for name in (socket.gethostname(), member.host)}
    is_literal = host == "localhost" or host == loopback
    if len({*hosts}) > 1 and (is_literal or hosts[member.process] != hosts[0]):
        other = next(x for x in hosts if x != hosts[0]) if member.process == 0 else hosts[0]
        why = f"process 0 and others run on several hosts, as {other}"
    elif member.process and not is_literal and host.partition(".")[0] not in names:
        why = f"{host} is another host"
    else:
        return
    raise UserError(
        f"coordinator={address!r} is the loopback address {loopback} on {member.host}, which no "
        f"other host can reach, and {why}: give an address of process 0's host, or correct "
        "/etc/hosts"
    )
