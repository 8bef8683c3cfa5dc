"""Certificates and credentials that are renewed while a connection uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from nats_stream_source.connection.connection import Connection
from nats_stream_source.errors import ConfigurationError, NatsSourceError
from tests.integration.jetstream.connection.authentication import (
    JWT,
    MARKS,
    MUTUAL,
    Running,
    Way,
    World,
    ask,
    reconnected,
)
from tests.support.nats.certificates import Pair
from tests.support.wait import wait_until_async

pytestmark = MARKS


async def test_renewed_file_is_used_at_next_reconnect(
    world: World, running: Callable[[Way], Running]
) -> None:
    """Also where the file was missing or half written in between: nats-py must not give up."""
    at = running(JWT)
    path = world.write("renewed.creds", world.operator.credentials())
    write = Path(path).write_text
    seen: list[Exception] = []

    async with await Connection.open(at.connection_settings(credentials=path)) as connection:
        classify = connection._failures.classify

        def classifying(error: Exception) -> NatsSourceError | None:
            if (permanent := classify(error)) is not None:
                seen.append(permanent)
            return permanent

        connection._failures.classify = classifying
        write("")
        await asyncio.to_thread(at.server.kill)
        await asyncio.to_thread(at.server.start)
        await wait_until_async(lambda: seen, "the error is reported")
        write(world.operator.credentials())
        await reconnected(connection)
        assert await ask(connection) == "let in"
    assert isinstance(seen[0], ConfigurationError)


async def test_renewed_client_certificate_is_used_at_next_reconnect(
    world: World, running: Callable[[Way], Running]
) -> None:
    at = running(MUTUAL)
    other = running(
        Way(lambda world: MUTUAL.config(world).replace(world.ca.path, world.other_ca.path))
    )
    mine = [Path(world.write(name, "")) for name in ("renewed-cert.pem", "renewed-key.pem")]

    def put(pair: Pair) -> None:
        for path, new in zip(mine, (pair.cert, pair.key), strict=True):
            path.write_text(Path(new).read_text())

    put(world.client)
    cert, key = map(str, mine)
    settings = at.connection_settings(tls_cert_file=cert, tls_key_file=key)
    async with await Connection.open(settings) as connection:
        put(world.stranger)
        # The same server, which trusts another authority from now on.
        at.config.write_text(other.config.read_text())
        await asyncio.to_thread(at.server.kill)
        await asyncio.to_thread(at.server.start)
        await reconnected(connection)
        assert await ask(connection) == "let in"
