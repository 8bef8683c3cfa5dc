"""``connect``: where a program without Spark begins.

    async with connect("nats://127.0.0.1:4222") as jetstream:
        fleet = await KeyValue.open(jetstream, "fleet")
        revision = await fleet.put("N14228", b"...")
        entry = await fleet.get("N14228", min_last_revision=revision)

One connection serves any number of buckets, watches and subscriptions at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from nats_stream_source.jetstream import subjects
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.settings import ConnectionSettings


@contextlib.asynccontextmanager
async def connect(
    servers: str | Sequence[str],
    *,
    domain: str | None = None,
    api_prefix: str | None = None,
    **settings: Any,
) -> AsyncIterator[JetStream]:
    """Connect, and close the connection at the end of the ``async with``.

    Args:
        servers: one address, ``nats://host:4222``, or several of one cluster.
        domain: JetStream's domain; excludes ``api_prefix``.
        api_prefix: of an account's import (ADR-19).
        settings: the other fields of :class:`ConnectionSettings`: ``user``, ``password``,
            ``credentials``, ``tls_ca_file``, ``inbox_prefix``, ``request_timeout``, …

    Raises:
        ConfigurationError: settings that cannot be, or contradict each other.
        AuthorizationError: the server refused the credentials.
        ConnectError: no server answered within ``connect_timeout``.
    """
    connection = await Connection.open(
        ConnectionSettings(
            servers=(servers,) if isinstance(servers, str) else tuple(servers),
            api_prefix=subjects.api_prefix(api_prefix, domain),
            **settings,
        )
    )
    try:
        yield JetStream(connection)
    finally:
        await connection.close()
