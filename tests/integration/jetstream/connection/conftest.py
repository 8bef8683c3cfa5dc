"""Certificates, keys and servers of the tests of authentication and TLS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from tests.integration.jetstream.connection.authentication import Running, Way, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def running(world: World, tmp_path: Path) -> Iterator[Callable[[Way], Running]]:
    started: list[NatsServer] = []

    def start(way: Way) -> Running:
        config = tmp_path / f"{len(started)}.conf"
        server, url = way.start(world, config)
        started.append(server)
        return Running(server, url, config, way.client(world))

    yield start
    for server in started:
        server.stop()
