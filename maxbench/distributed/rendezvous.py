"""Processes of a run: they meet before jax starts, and each is told, by name, when one is lost.

All meet at the coordinator's address, where jax's own service will be. The connections stay open:
a process that dies, or whose host does, takes its own with it, and the run ends everywhere within
a minute. jax itself would wait for 100 s of silence and abort without a name.

Slurm ends all processes at the first that fails. So process 0 is the last to go, when the results
are written; and where it is the one that died, the others write them before anything else.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

from maxbench.config.errors import UserError

GRACE = 5.0  # seconds in which a process may end by itself once another is lost
# A host that is silent: asked after 10 s, then every 5 s, given up after 35 s.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 35000}


def seconds(processes: int) -> float:
    """How long to wait for so many processes: 2,048 Pythons from a shared disk take minutes."""
    return 60 + processes / 4


class PeerWatch:
    """The other processes of a run.

    Attributes:
      hosts: of each process, in their order.
      outputs: of each, where its output is, or ''.
      why: what ended the run for all, or ''.
    """

    def __init__(
        self, process: int, hosts: list[str], outputs: list[str], lines: dict[int, socket.socket]
    ):
        self.process, self.hosts, self.outputs, self.lines = process, hosts, outputs, lines
        self.why, self.rescue = "", lambda why: None
        self.lost, self.left = threading.Event(), threading.Event()
        self.stopping = StopConsensus(process, len(hosts), self._send)
        self.thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self.thread.start()

    def on_peer_loss(self, rescue: Callable[[str], None]) -> None:
        """Sets what writes the results, given why the run ended, when process 0, or this process
        if it is that, may get to nothing else."""
        self.rescue = rescue
        if self.why:
            self._rescue()

    def _watch(self) -> None:
        heard = set()
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            for process, line in self.lines.items():
                selector.register(stack.enter_context(line), selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    try:
                        said = _hear(key.fileobj)
                    except (OSError, ValueError):
                        selector.unregister(key.fileobj)
                        said = {} if key.data in heard else {"died": True}
                    if {"failed", "lost"} & {*said}:
                        heard.add(key.data)
                    self.stopping.hear(key.data, said)
                    if why := self._reason(said, key.data):
                        self._end(why, "died" in said)

    def _reason(self, said: dict, process: int) -> str:
        if "lost" in said:
            return said["lost"]
        name = f"process {process} of {len(self.hosts)} on {self.hosts[process]}"
        if "died" in said:  # its end was not its own
            return f"{name} died, see {self.outputs[process] or 'its output'}"
        return said.get("failed", "") and f"{name}: {said['failed']}"

    def _end(self, why: str, died: bool) -> None:
        if self.left.is_set() or self.why:
            return
        self.why = why
        if died:
            self._rescue()
        self._tell({"lost": why})
        self.lost.set()
        if not self.left.wait(GRACE * (1 + (self.process > 0))):  # in a collective without end
            if self.process == 0:
                self._rescue()
            print(f"maxbench: error: {why}", file=sys.stderr, flush=True)
            os._exit(1)

    def _rescue(self) -> None:
        try:
            self.rescue(self.why)
        except OSError as e:
            print(f"maxbench: no results of the end: {e}", file=sys.stderr)

    def _tell(self, what: dict) -> None:
        if self.process == 0 or "lost" not in what:
            self._send(what)

    def _send(self, what: dict) -> None:
        """To process 0; from there, to all others."""
        text = json.dumps(what).encode() + b"\n"
        for line in self.lines.values():
            with contextlib.suppress(OSError):  # the watch sees to it
                line.sendall(text)

    def stop(self, step: int, asked: bool) -> bool:
        """Whether a step is the last one, which all processes say of the same. All must call it
        before each of their steps, with `asked` where this process was told to stop."""
        return self.stopping.stop(step, asked, self.lost)

    def close(self, failed: str = "") -> None:
        """Ends the watch; the others are told, and fail too if this process has: then it returns
        when process 0 has ended."""
        self.left.set()
        self._tell({"lost": self.why} if self.why else {"failed": failed})
        if failed and self.process:
            self.thread.join(3 * GRACE)


class StopConsensus:
    """How processes, some of which are a step ahead, agree on their last step: one asks process 0,
    which asks all how far they are; each answers, and begins no step before it is told which."""

    def __init__(self, process: int, processes: int, send: Callable[[dict], None]):
        self.process, self.processes, self.send = process, processes, send
        self.begun, self.last = -1, -1  # the newest step here; the last of all
        self.asks, self.asked, self.told = False, False, threading.Event()
        self.lock, self.far = threading.Lock(), {}

    def stop(self, step: int, asked: bool, lost: threading.Event) -> bool:
        if asked and not self.asks:
            self.asks = True
            if self.process == 0:
                self.hear(0, {"stop": True})
            else:
                self.send({"stop": True})
        with self.lock:
            if not self.asked:
                self.begun = step
                return False
        while not self.told.wait(0.1) and not lost.is_set():
            pass
        return self.told.is_set() and step >= self.last

    def hear(self, process: int, said: dict) -> None:
        """Takes what came from a process, if it is about this."""
        with self.lock:
            if "stop" in said and not self.asked:
                self.asked, self.far[self.process] = True, self.begun
                self.send({"stop": True} if self.process == 0 else {"far": self.begun})
            if "far" in said:
                self.far[process] = said["far"]
            if "last" in said or (self.process == 0 and len(self.far) == self.processes):
                self.last = said.get("last", max(self.far.values()) + 1)
                if self.process == 0:
                    self.send({"last": self.last})
                self.told.set()


def rendezvous(
    address: str,
    processes: int,
    process: int,
    wait: float,
    here: str,
    output: str = "",
    expected: Sequence[str] = (),
) -> PeerWatch:
    """Returns when all processes are there.

    Args:
      here: this host, as the others will call it.
      output: where the output of this process is, if that is known.
      expected: the host of each process, if that is known, to name those that do not come.

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
    end = time.monotonic() + wait
    hello = {"process": process, "host": here, "output": output}
    if process == 0:
        return _gather(address, host, int(port), processes, end, wait, hello, expected)
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
    return PeerWatch(process, said["hosts"], said["outputs"], {0: line})


def _call(address: str, host: str, port: int, end: float, wait: float, hello: dict):
    """A connection to process 0, tried until it is there."""
    while True:
        try:
            line = _keep(socket.create_connection((host, port), timeout=5))
            line.sendall(json.dumps(hello).encode() + b"\n")
            return line
        except OSError as e:
            why = e.strerror or str(e)
        if time.monotonic() > end:
            raise UserError(
                f"coordinator={address!r} cannot be reached from process {hello['process']} on "
                f"{hello['host']} in {wait:.0f} s ({why}): is process 0 started, and this its "
                "address? --config.runtime.rendezvous_timeout_s gives it longer"
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


def _gather(address, host, port, processes, end, wait, hello, expected) -> PeerWatch:
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
    wrong = wrong or _absent(address, processes, said, wait, hello["host"], expected)
    answer = {"wrong": wrong}
    if not wrong:
        hosts, outputs = zip(*(said[i] for i in range(processes)), strict=True)
        answer = {"hosts": hosts, "outputs": outputs}
    for line in lines.values():
        with contextlib.suppress(OSError):
            line.sendall(json.dumps(answer).encode() + b"\n")
    for line in lines.values() if wrong else [lines.pop(0)]:
        line.close()
    if wrong:
        raise UserError(wrong)
    return PeerWatch(0, list(hosts), list(outputs), lines)


def _absent(address, processes, said, wait: float, here: str, expected: Sequence[str]) -> str:
    """What to say of processes that did not come; '' if all did."""
    missing = [i for i in range(processes) if i not in said]
    if 0 not in said:
        return (
            f"coordinator={address!r} does not lead to process 0 on {here}: give an address of "
            "that host"
        )
    known = expected if len(expected) == processes else ()
    names = [f"{i} on {known[i]}" if known else str(i) for i in missing]
    names = ", ".join(names[:20]) + ", ..." * (len(names) > 20)
    there = ", ".join(sorted({host for host, _ in said.values()})[:20])
    return bool(missing) * (
        f"process {names} of {processes} did not come in {wait:.0f} s; those that did are on "
        f"{there}; --config.runtime.rendezvous_timeout_s gives them longer"
    )


def _accept(
    server, left: float, said: dict[int, tuple[str, str]], lines: dict[int, socket.socket]
) -> str:
    """Takes one call; returns what is wrong with it."""
    server.settimeout(left)
    try:
        line, _ = server.accept()
    except OSError:  # nobody yet
        return ""
    line.settimeout(5)
    try:
        hello = _hear(line)
        process, host, output = hello["process"], hello["host"], hello["output"]
        _keep(line)
    except (OSError, ValueError, TypeError, KeyError):  # none of ours, or gone again
        line.close()
        return ""
    if process in said:
        lines[-1] = line
        return f"two processes are process {process}: on {said[process][0]} and on {host}"
    line.settimeout(None)
    said[process], lines[process] = (host, output), line
    return ""


def _call_and_hang_up(*args) -> None:
    with contextlib.suppress(UserError, OSError):
        _call(*args).close()
