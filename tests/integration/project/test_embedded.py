"""The server for demos and tests: a start that fails, and free ports."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer, free_port
from nats_stream_source.errors import ConnectError


def test_start_on_port_of_another_server(nats_server: NatsServer) -> None:
    """Otherwise a demo would write to the other server."""
    second = NatsServer(port=nats_server.port)
    with pytest.raises(ConnectError, match=f"another server listens on port {nats_server.port}"):
        second.start()
    assert not second.store.exists()


def test_start_fails_without_leaving_temporary_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = tmp_path / "server.conf"
    config.write_text("port: none")
    with pytest.raises(ConnectError, match="could not start nats-server"):
        NatsServer(config=config).start()
    assert list(tmp_path.iterdir()) == [config]


# -- free ports: reserved for one server until it listens ------------------------------------------


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
