"""The server for demos and tests: a start that fails."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
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
