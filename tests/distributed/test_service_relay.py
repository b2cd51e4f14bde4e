"""The relay to jax's service keeps its client's connection when the service dies."""

import socket

import pytest

from maxbench.distributed.service_relay import ServiceRelay


def test_client_keeps_its_connection_when_the_service_dies():
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = ServiceRelay("127.0.0.1", server.getsockname()[1], 5.0)
        host, port = relay.address.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(b"question")
            service, _ = server.accept()
            assert service.recv(99) == b"question"
            service.sendall(b"answer")
            assert client.recv(99) == b"answer"
            service.close()
            client.sendall(b"another question")
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)


def test_service_sees_that_the_client_has_ended():
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = ServiceRelay("127.0.0.1", server.getsockname()[1], 5.0)
        host, port = relay.address.split(":")
        client = socket.create_connection((host, int(port)), timeout=5)
        service, _ = server.accept()
        client.close()
        service.settimeout(5)
        assert service.recv(1) == b""
        service.close()
