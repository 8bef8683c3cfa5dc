"""Certificates, keys and servers of the tests of authentication and TLS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer, free_port
from tests.integration.jetstream.connection.authentication import Running, Server, Way, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def running(world: World, tmp_path: Path) -> Iterator[Callable[[Way], Running]]:
    started: list[NatsServer] = []

    def start(way: Way) -> Running:
        text, port = way.config(world), None
        if way.websocket is not None:
            port = free_port()
            how = world.tls() if way.websocket == "tls" else way.websocket
            text += f"\nwebsocket {{ listen: '127.0.0.1:{port}', {how} }}\n"
        config = tmp_path / f"{len(started)}.conf"
        config.write_text(text)
        server = Server(config=config)
        started.append(server)
        server.start()
        url = f"{way.scheme}://127.0.0.1:{port or server.port}"
        return Running(server, url, config, text, way.client(world))

    yield start
    for server in started:
        server.stop()
