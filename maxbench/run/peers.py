"""Processes of a run: they meet before jax starts, and each is told, by name, when one is lost.

All meet at the coordinator's address, where jax's own service will be. The connections stay open:
a process that dies, or whose host does, takes its own with it, and the run ends everywhere within
a minute. jax itself would wait for 100 s of silence and abort without a name.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time

from maxbench.spec.errors import UserError

GRACE = 5.0  # seconds in which a process may end by itself once another is lost
# A host that is silent: asked after 10 s, then every 5 s, given up after 35 s.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 35000}


def seconds(processes: int) -> float:
    """How long to wait for so many processes: 2,048 Pythons from a shared disk take minutes."""
    return 60 + processes / 4


class Peers:
    """The other processes of a run.

    Attributes:
      hosts: of each process, in their order.
      why: what ended the run for all, or ''.
    """

    def __init__(self, process: int, hosts: list[str], lines: dict[int, socket.socket]):
        self.process, self.hosts, self.lines, self.why = process, hosts, lines, ""
        self.lost, self.left = threading.Event(), threading.Event()
        self.on_loss = lambda why: None
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def _watch(self) -> None:
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for process, line in self.lines.items():
                selector.register(stack.enter_context(line), selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)  # each says one thing, or dies
                    if why := self._last_words(key.fileobj, key.data):
                        return self._end(why)

    def _last_words(self, line: socket.socket, process: int) -> str:
        try:
            said = _hear(line)
        except (OSError, ValueError):  # nothing: its end was not its own
            said = {"failed": "it died, see its output"}
        if "lost" in said:
            return said["lost"]
        name = f"process {process} of {len(self.hosts)} on {self.hosts[process]}"
        return said["failed"] and f"{name}: {said['failed']}"

    def _end(self, why: str) -> None:
        if self.left.is_set():
            return
        self.why = why
        self._tell({"lost": why})
        self.lost.set()
        if not self.left.wait(GRACE):  # in a collective that will never end
            try:
                self.on_loss(why)
            finally:
                print(f"maxbench: error: {why}", file=sys.stderr, flush=True)
                os._exit(1)

    def _tell(self, what: dict) -> None:
        text = json.dumps(what).encode() + b"\n"
        for line in self.lines.values() if self.process == 0 or "lost" not in what else ():
            with contextlib.suppress(OSError):
                line.sendall(text)

    def leave(self, failed: str = "") -> None:
        """Ends the watch; the others are told, and fail too if this process has."""
        self.left.set()
        self._tell({"lost": self.why} if self.why else {"failed": failed})


def meet(address: str, processes: int, process: int, wait: float, here: str) -> Peers:
    """Returns when all processes are there.

    Raises:
      UserError: the address cannot be, or leads elsewhere; or some did not come in `wait` seconds.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(f"coordinator={address!r} is not host:port, as node1:12345")
    try:
        socket.getaddrinfo(host, int(port))
    except OSError as e:
        raise UserError(
            f"coordinator={address!r}: no such host from {here}: {e.strerror}"
        ) from None
    end, hello = time.monotonic() + wait, {"process": process, "host": here}
    if process == 0:
        return _gather(address, host, int(port), processes, end, wait, hello)
    line = _call(address, host, int(port), end, wait, hello)
    line.settimeout(max(1.0, end - time.monotonic()) + 10)
    try:
        said = _hear(line)
    except (OSError, ValueError):
        said = {"wrong": f"coordinator={address!r} hung up: process 0 ended, see there"}
    if "wrong" in said:
        line.close()
        raise UserError(said["wrong"])
    line.settimeout(None)
    return Peers(process, said["hosts"], {0: line})


def _call(address: str, host: str, port: int, end: float, wait: float, hello: dict):
    """A connection to process 0, tried until it is there."""
    while True:
        try:
            line = socket.create_connection((host, port), timeout=5)
            line.sendall(json.dumps(hello).encode() + b"\n")
            return _keep(line)
        except OSError as e:
            why = e.strerror or str(e)
        if time.monotonic() > end:
            raise UserError(
                f"coordinator={address!r} cannot be reached from process {hello['process']} on "
                f"{hello['host']} in {wait:.0f} s ({why}): is process 0 started, and this its "
                "address? --config.runtime.wait gives it longer"
            )
        time.sleep(0.2)


def _hear(line: socket.socket) -> dict:
    """The next line that comes, and nothing of what is after it."""
    text = b""
    while not text.endswith(b"\n"):
        if not (byte := line.recv(1)):
            raise ValueError("hung up")
        text += byte
    return json.loads(text)


def _keep(line: socket.socket) -> socket.socket:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return line


def _gather(address, host, port, processes, end, wait, hello) -> Peers:
    """Process 0's part: everyone calls, it itself too, through the address that all were given."""
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(
            ("", port), family=family, backlog=processes + 64, dualstack_ipv6=both
        )
    except OSError as e:
        raise UserError(f"coordinator={address!r}: port {port} here: {e.strerror}") from None
    said, lines, wrong = {}, {}, ""
    with server:
        itself = (address, host, port, end, wait, hello)
        threading.Thread(target=_call_and_hang_up, args=itself, daemon=True).start()
        while len(said) < processes and not wrong and (left := end - time.monotonic()) > 0:
            wrong = _accept(server, min(left, 1.0), said, lines)
    wrong = wrong or _absent(address, processes, said, wait, hello["host"])
    answer = {"wrong": wrong} if wrong else {"hosts": [said[i] for i in range(processes)]}
    for line in lines.values():
        with contextlib.suppress(OSError):
            line.sendall(json.dumps(answer).encode() + b"\n")
    for line in lines.values() if wrong else [lines.pop(0)]:
        line.close()
    if wrong:
        raise UserError(wrong)
    return Peers(0, answer["hosts"], lines)


def _absent(address: str, processes: int, said: dict[int, str], wait: float, here: str) -> str:
    """What to say of processes that did not come; '' if all did."""
    missing = [str(i) for i in range(processes) if i not in said]
    if 0 not in said:
        return (
            f"coordinator={address!r} does not lead to process 0 on {here}: give an address of "
            "that host"
        )
    names = ", ".join(missing[:20]) + ", ..." * (len(missing) > 20)
    there = ", ".join(sorted({*said.values()})[:20])
    return bool(missing) * (
        f"process {names} of {processes} did not come in {wait:.0f} s; those that did are on "
        f"{there}; --config.runtime.wait gives them longer"
    )


def _accept(server, left: float, said: dict[int, str], lines: dict[int, socket.socket]) -> str:
    """Takes one call; returns what is wrong with it."""
    server.settimeout(left)
    try:
        line, _ = server.accept()
    except OSError:  # nobody yet
        return ""
    line.settimeout(5)
    try:
        hello = _hear(line)
        process, host = hello["process"], hello["host"]
    except (OSError, ValueError, TypeError, KeyError):  # none of ours
        line.close()
        return ""
    if process in said:
        lines[-1] = line
        return f"two processes are process {process}: on {said[process]} and on {host}"
    line.settimeout(None)
    said[process], lines[process] = host, _keep(line)
    return ""


def _call_and_hang_up(*args) -> None:
    with contextlib.suppress(UserError, OSError):
        _call(*args).close()
