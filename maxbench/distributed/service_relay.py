"""Relay between jax's client in this process and jax's coordination service in process 0.

jax's client aborts its process as soon as its connection to the service breaks, with a C++ stack
trace and 0.2 s after the death of process 0. A recoverable task does so too, and a callback of the
client ends in std::bad_cast (tests/distributed/test_stock_jax.py). The relay keeps the connection
open, so that the peer watch can name process 0 and write the result.
"""

import contextlib
import socket
import threading
import time

RETRY_S = 0.2  # until process 0 has started jax's service


class ServiceRelay:
    """A thread that forwards connections to a local port to the service.

    Attributes:
      address: host:port for jax's client.
    """

    def __init__(self, host: str, port: int, timeout_s: float):
        self.target, self.timeout_s = (host, port), timeout_s
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, name="jax-relay", daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self.server.accept()
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        """Copies bytes both ways until the client closes; ignores that the service does."""
        with client, self._connect() as service:
            for connection in (client, service):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_copy, args=(service, client), daemon=True).start()
            _copy(client, service)
            with contextlib.suppress(OSError):  # ends the other thread
                service.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> socket.socket:
        """Connects to the service, which process 0 starts after the rendezvous."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return socket.create_connection(self.target, timeout=None)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copies bytes until the source closes; drops those that the target does not take."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 18):
            with contextlib.suppress(OSError):
                target.sendall(data)
