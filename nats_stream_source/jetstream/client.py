"""``connect``: the entry point of a program without Spark.

    async with connect("nats://127.0.0.1:4222") as jetstream:
        fleet = await KeyValue.open(jetstream, "fleet")
        revision = await fleet.put("N14228", b"...")
        entry = await fleet.get("N14228", min_last_revision=revision)

One connection serves any number of concurrent buckets, watches and subscriptions.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from nats_stream_source.connection.connection import Connection
from nats_stream_source.connection.server_url import split_list
from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.jetstream import subjects
from nats_stream_source.jetstream.api import JetStream


@contextlib.asynccontextmanager
async def connect(
    servers: str | Sequence[str],
    *,
    domain: str | None = None,
    api_prefix: str | None = None,
    **settings: Any,
) -> AsyncIterator[JetStream]:
    """Connect to NATS; the connection closes at the end of the ``async with``.

    Args:
        servers: one URL, ``nats://host:4222``, or several of one cluster: a sequence, or separated
            by commas.
        domain: JetStream domain; excludes ``api_prefix``.
        api_prefix: prefix of the JetStream API, as of an account's import (ADR-19).
        settings: the other fields of :class:`ConnectionSettings`: ``user``, ``password``,
            ``credentials``, ``tls_ca_file``, ``inbox_prefix``, ``request_timeout``, …

    Raises:
        ConfigurationError: a setting is invalid, or settings contradict each other.
        AuthorizationError: the server refused the credentials.
        ConnectError: no server accepted the connection within ``connect_timeout``.
    """
    of_connection = ConnectionSettings(
        servers=split_list(servers) if isinstance(servers, str) else tuple(servers),
        api_prefix=subjects.api_prefix(api_prefix, domain),
        **settings,
    )
    async with await Connection.open(of_connection) as connection:
        yield JetStream(connection)
