"""The planner of a query of one stream, by positions in that stream instead of offsets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.rows.base import FormatAdapter, Split
from nats_stream_source.rows.offsets import ONE_STREAM, Offset, Position
from nats_stream_source.spark.planning.query_planner import QueryPlanner


class OneStreamPlanner:
    """A planner; each method converts between positions and offsets."""

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
        latest = self.planner.report_latest_offset()
        return None if latest is None else position_of(latest)

    async def splits(self, start: Position, end: Position) -> list[Split]:
        """The splits, each of which is a task of its own."""
        tasks = await self.planner.tasks(await self._offset(start), await self._offset(end))
        return [split for (split,) in tasks]


def position_of(offset: Offset) -> Position:
    (position,) = offset.streams.values()
    return position


def moved(offset: Offset, **changes: Any) -> Offset:
    """An offset of one stream with other fields of its position."""
    ((stream, position),) = offset.streams.items()
    return replace(offset, streams={stream: replace(position, **changes)})
