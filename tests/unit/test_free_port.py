"""A free port is reserved for one server until the server listens."""

from __future__ import annotations

import socket

import pytest

from nats_stream_source.embedded import free_port


def test_free_port_belongs_to_its_caller() -> None:
    port = free_port()
    # Wants it without SO_REUSEADDR, as the system chooses for who wants any port.
    with socket.socket() as anybody, pytest.raises(OSError, match="in use"):
        anybody.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port


def test_free_port_has_no_listener() -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", free_port()), timeout=10).close()


def test_free_ports_are_different_ones() -> None:
    ports = [free_port() for _ in range(100)]
    assert len(set(ports)) == 100
