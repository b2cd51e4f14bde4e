"""JSON messages over TCP between the processes of a run, one per line."""

import json
import socket

# A silent host is probed after 10 s, then every 5 s, and is lost after 35 s. These options are
# Linux's; elsewhere the system's times hold, for processes of one machine.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 35000}


def enable_keepalive(connection: socket.socket) -> None:
    """Has the kernel close the connection within 35 s after the other host falls silent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def send(connection: socket.socket, message: dict) -> None:
    """Sends one message.

    Raises:
      OSError: the connection is closed.
    """
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket) -> dict:
    """Reads the next message, and no byte after it: a later reader gets the rest.

    Raises:
      OSError: the connection failed.
      ValueError: the other side closed it, or sent no JSON.
    """
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := connection.recv(1)):
            raise ValueError("connection closed")
        line += byte
    return json.loads(line)


class Buffer:
    """The messages of a connection, read without waiting for one that is incomplete.

    The process at the other end may freeze in the middle of a message.
    """

    def __init__(self):
        self.incomplete = b""

    def receive(self, connection: socket.socket) -> list[dict]:
        """Reads what has arrived, after a selector found the connection readable.

        Raises:
          OSError: the connection failed.
          ValueError: the other side closed it, or sent no JSON object.
        """
        if not (data := connection.recv(1 << 16)):
            raise ValueError("connection closed")
        *lines, self.incomplete = (self.incomplete + data).split(b"\n")
        read = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in read):
            raise ValueError("no JSON object")
        return read
