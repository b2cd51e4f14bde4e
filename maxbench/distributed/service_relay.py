"""Relay between jax's client in this process and jax's coordination service in process 0.

jax aborts a process with a C++ stack trace, and without a name, as soon as its connection to the
service breaks. The relay keeps that connection open when process 0 dies, so that the peer watch has
the last word.
"""

import contextlib
import selectors
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
        with client, contextlib.ExitStack() as stack:
            service = stack.enter_context(self._connect())
            selector = stack.enter_context(selectors.DefaultSelector())
            other = {client: service, service: client}
            for connection in other:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(connection, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    source, data = key.fileobj, b""
                    assert isinstance(source, socket.socket)
                    with contextlib.suppress(OSError):
                        data = source.recv(1 << 18)
                    if not data and source is client:
                        return
                    if not data:
                        selector.unregister(service)
                    with contextlib.suppress(OSError):
                        other[source].sendall(data)

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
