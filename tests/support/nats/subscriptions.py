"""Streams, connections and waits for the tests of subscriptions."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.jetstream.api import JetStream
from tests.support.event_loop import deadline
from tests.support.nats.buckets import api, publish

DEADLINE = 60.0

_serial = itertools.count(1)


def make_stream(url: str, count: int = 0, size: int = 10, **config: Any) -> str:
    """A stream of its own with the subjects ``<name>.>``, and ``count`` messages ``<name>.k<i>``.

    The messages go to ten subjects in turn and hold their number.
    """
    name = f"T{next(_serial)}"
    api(url, f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"], **config})
    fill(url, name, count, size)
    return name


def fill(url: str, stream: str, count: int, size: int = 10) -> None:
    """Publish ``count`` messages of at least ``size`` bytes."""
    publish(
        url, ((f"{stream}.k{i % 10}", (b"%d " % i).ljust(size, b"x"), None) for i in range(count))
    )


def consumers_of(url: str, stream: str) -> list[str]:
    """The names of the stream's consumers."""
    return list(api(url, f"CONSUMER.NAMES.{stream}").get("consumers") or [])


def consumer_info(url: str, stream: str, consumer: str) -> dict[str, Any]:
    """``CONSUMER.INFO``."""
    return api(url, f"CONSUMER.INFO.{stream}.{consumer}")


def make_consumer(url: str, stream: str, name: str, **config: Any) -> dict[str, Any]:
    """A durable consumer."""
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", **config}
    request = {"stream_name": stream, "config": config}
    return api(url, f"CONSUMER.CREATE.{stream}.{name}", request)


@asynccontextmanager
async def connected(url: str, **settings: Any) -> AsyncIterator[JetStream]:
    """JetStream over a connection of its own; the block fails when it takes too long."""
    connection = await Connection.open(ConnectionSettings(servers=(url,), **settings))
    try:
        async with deadline(2 * DEADLINE):
            yield JetStream(connection)
    finally:
        await connection.close()
