"""Planners of a bucket, without Spark."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.options import kv_options
from nats_stream_source.rows.base import FormatAdapter, Split
from nats_stream_source.rows.formats import KvFormat
from nats_stream_source.rows.offsets import ONE_STREAM, Offset, Position
from nats_stream_source.spark.planning.query_planner import QueryPlanner


class OneStreamPlanner:
    """The planner of a query of one stream: positions in that stream instead of offsets."""

    def __init__(
        self, adapter: FormatAdapter, connection: ReusableConnection, **arguments: Any
    ) -> None:
        self._adapter = adapter
        self._connection = connection
        self.planner = QueryPlanner(adapter, connection, **arguments)
        self.prepare_available_now = self.planner.prepare_available_now

    async def _offset(self, position: Position) -> Offset:
        stream = await self._adapter.stream_name(await self._connection.jetstream())
        return Offset({stream: position}, self._adapter.user_filters, ONE_STREAM)

    async def initial_offset(self) -> Position:
        return position_of(await self.planner.initial_offset())

    async def latest_offset(self, start: Position, *, limited: bool = True) -> Position:
        start_offset = await self._offset(start)
        return position_of(await self.planner.latest_offset(start_offset, limited=limited))

    def report_latest_offset(self) -> Position | None:
        latest = self.planner.stream_end
        return None if latest is None else position_of(latest)

    async def splits(self, start: Position, end: Position) -> list[Split]:
        """The splits, each of which is a task of its own."""
        tasks = await self.planner.tasks(await self._offset(start), await self._offset(end))
        return [split for (split,) in tasks]


def position_of(offset: Offset) -> Position:
    (position,) = offset.streams.values()
    return position


@asynccontextmanager
async def planning(
    url: str,
    bucket: str,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    **options: str,
) -> AsyncIterator[OneStreamPlanner]:
    parsed = kv_options({"servers": url, "bucket": bucket, **options})
    link = ReusableConnection(parsed.connection)
    # A clock that jumps a second with every look never rests.
    ticks = iter(range(10**9))
    try:
        arguments = {"clock": clock or (lambda: float(next(ticks))), "sleep": sleep, "cores": 2}
        yield OneStreamPlanner(KvFormat(parsed), link, **arguments)
    finally:
        await link.drop()


async def ends(planner: OneStreamPlanner) -> list[int]:
    """The ends of all micro-batches from the query's beginning on, until nothing is left."""
    start = await planner.initial_offset()
    found: list[int] = []
    for _ in range(1000):
        end = await planner.latest_offset(start)
        if end == start:
            return found
        found.append(end.stream_seq)
        start = end
    raise AssertionError("no end")


class Asked:
    """The subjects of the JetStream requests that were made since it was put in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.subjects: list[str] = []
        original = JetStream.call

        async def counted(jetstream: JetStream, subject: str, request: Any = None) -> Any:
            self.subjects.append(subject)
            return await original(jetstream, subject, request)

        monkeypatch.setattr(JetStream, "call", counted)


async def read_all(url: str, **options: str) -> Position:
    async with planning(url, "b", **options) as planner:
        return await planner.latest_offset(await planner.initial_offset())


async def go_on(url: str, start: Position, **options: str) -> Any:
    async with planning(url, "b", **options) as planner:
        end = await planner.latest_offset(start)
        return end, await planner.splits(start, end)
