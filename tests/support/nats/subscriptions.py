"""Streams, connections and waits for the tests of subscriptions."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nats.js.errors import NoStreamResponseError

from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from tests.support.event_loop import deadline
from tests.support.nats.buckets import api, publish
from tests.support.nats.streams import create_stream
from tests.support.wait import wait_until

DEADLINE = 60.0

_serial = itertools.count(1)


def make_stream(url: str, count: int = 0, size: int = 10, **config: Any) -> str:
    """A stream of its own with the subjects ``<name>.>``, and ``count`` messages ``<name>.k<i>``.

    The messages go to ten subjects in turn and hold their number.
    """
    name = f"T{next(_serial)}"
    create_stream(url, name, **config)
    first = 0
    if config.get("num_replicas", 1) > 1 and count:
        # In a cluster, the connected server learns of the stream's subjects after the response.
        wait_until(lambda: _accepted(url, name, size), f"the server has the subjects of {name}")
        first = 1
    fill(url, name, count, size, first=first)
    return name


def _accepted(url: str, stream: str, size: int) -> bool:
    try:
        fill(url, stream, 1, size)
    except NoStreamResponseError:  # 503: the message was not stored
        return False
    return True


def fill(url: str, stream: str, count: int, size: int = 10, *, first: int = 0) -> None:
    """Publish the messages from ``first`` to ``count``, of at least ``size`` bytes each."""
    publish(
        url,
        (
            (f"{stream}.k{i % 10}", (b"%d " % i).ljust(size, b"x"), None)
            for i in range(first, count)
        ),
    )


def consumer_info(url: str, stream: str, consumer: str) -> dict[str, Any]:
    return api(url, f"CONSUMER.INFO.{stream}.{consumer}")


def make_consumer(url: str, stream: str, name: str, **config: Any) -> dict[str, Any]:
    config = {"durable_name": name, "name": name, "ack_policy": "explicit", **config}
    request = {"stream_name": stream, "config": config}
    return api(url, f"CONSUMER.CREATE.{stream}.{name}", request)


async def sequences(subscription: Any, count: int) -> list[int]:
    """The stream sequences of the next messages, each acknowledged."""
    found = []
    for _ in range(count):
        message = await subscription.next(15)
        found.append(message.metadata.stream_seq)
        await message.ack()
    return found


@asynccontextmanager
async def connected(url: str, **settings: Any) -> AsyncIterator[JetStream]:
    """JetStream over a connection of its own; the block fails when it takes too long."""
    async with connect(url, **settings) as jetstream, deadline(2 * DEADLINE):
        yield jetstream
