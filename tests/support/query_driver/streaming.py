"""A streaming query without Spark whose planner does not wait between polls.

::

    with stream_query(url, "ORDERS") as query:
        assert query.rows() == [...]      # all messages of the stream
        ...
        assert query.rows() == [...]      # the messages since then
        offset = query.offset             # the start of another query, as after a restart
"""

from __future__ import annotations

import itertools
from typing import Any

from nats_stream_source.options import KvOptions, Mode, StreamOptions, stream_options
from nats_stream_source.spark.formats.offsets import Offset
from nats_stream_source.spark.formats.splits import Split
from tests.support.query_driver.driver import QueryDriver

Row = dict[str, Any]


class StreamQuery:
    """One query, from its start position or from an offset.

    The planner's clock advances by a second with each call, so the planner never spaces its polls,
    and its timer stands still, so that requests do not count as slow.

    Attributes:
        splits: the splits of the last micro-batch.
    """

    def __init__(
        self, options: KvOptions | StreamOptions, offset: Offset | None = None, cores: int = 2
    ) -> None:
        ticks = itertools.count()
        self._driver = QueryDriver(
            options, clock=lambda: float(next(ticks)), cores=cores, timer=lambda: 0.0
        )
        self._offset = offset
        self.splits: list[Split] = []

    def __enter__(self) -> StreamQuery:
        return self

    def __exit__(self, *raised: object) -> None:
        self._driver.close()

    @property
    def offset(self) -> Offset:
        """The query's position."""
        if self._offset is None:
            self._offset = Offset.parse(self._driver.initial_offset())
        return self._offset

    def latest_offset(self) -> Offset:
        """Return the end of the next micro-batch."""
        return Offset.parse(self._driver.latest_offset(self.offset.to_json()))

    def read(self, end: Offset) -> list[Row]:
        """Plan and read the micro-batch up to ``end``; return its rows."""
        partitions = self._driver.partitions(self.offset.to_json(), end.to_json())
        self.splits = [split for partition in partitions for split in partition.splits]
        rows = [
            row
            for partition in partitions
            for batch in self._driver.read(partition)
            for row in batch.to_pylist()
        ]
        self._offset = end
        return rows

    def batches(self) -> list[list[Row]]:
        """Return the rows of each micro-batch until there are no new messages; no empty ones."""
        batches = []
        for _ in range(1000):
            end = self.latest_offset()
            if end == self.offset:
                return batches
            if rows := self.read(end):
                batches.append(rows)
        raise AssertionError("the query did not end after 1000 micro-batches")

    def rows(self) -> list[Row]:
        """Return all rows until there are no new messages."""
        return [row for batch in self.batches() for row in batch]


def stream_query(
    url: str, stream: str | None, offset: Offset | None = None, **options: Any
) -> StreamQuery:
    """Return a query of ``nats_stream``."""
    given = {"servers": url, "stream": stream, **options}
    strings = {name: str(value) for name, value in given.items() if value is not None}
    return StreamQuery(stream_options(strings, Mode.STREAMING), offset)


def sequences(rows: list[Row]) -> list[int]:
    return [row["sequence"] for row in rows]
