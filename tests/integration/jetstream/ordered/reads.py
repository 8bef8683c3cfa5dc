"""Open ordered readers and read ranges with them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from tests.support.nats.buckets import bucket_info

Between = Callable[[OrderedReader], Coroutine[Any, Any, None]]


@asynccontextmanager
async def linked(url: str, **settings: Any) -> AsyncIterator[ReusableConnection]:
    link = ReusableConnection(ConnectionSettings(servers=(url,), **settings))
    try:
        yield link
    finally:
        await link.drop()


async def read(reader: OrderedReader, between: Between | None = None) -> list[int]:
    """The stream sequences of a range; ``between`` runs once, after the first batch."""
    rows: list[int] = []
    async for frames in reader.batches():
        rows += frames.stream_seq.tolist()
        if between is not None:
            await between(reader)
            between = None
    return rows


def request_for(url: str, bucket: str, end: int, start: int = 0, **more: Any) -> RangeRequest:
    known = KnownStream(bucket_info(url, bucket)["created"])
    more = {"heartbeat": 0.1, **more}
    return RangeRequest(f"KV_{bucket}", known, start, end, **more)


async def read_range(
    url: str,
    request: RangeRequest,
    between: Between | None = None,
    **settings: Any,
) -> tuple[list[int], OrderedReader]:
    async with linked(url, **settings) as link:
        reader = OrderedReader(link, request)
        return await read(reader, between), reader


ALL = list(range(1, 3001))

UNHEARD = 30.0
"""Seconds: a heartbeat for tests of other things, so that a server that is held up is not lost."""
