"""A streaming query of several buckets or streams, without Spark.

::

    with SeveralQuery(url, bucketPattern="site-.*") as query:
        assert query.read() == {"site-1": [1, 2], "site-2": [1]}   # revisions by bucket
        ...
        with query.restarted(buckets="site-1") as restarted: ...
"""

from __future__ import annotations

import itertools
from typing import Any

from nats_stream_source.options import KvOptions, Mode, StreamOptions, kv_options, stream_options
from nats_stream_source.spark.formats.splits import Split
from tests.support.query_driver.driver import OffsetJson, QueryDriver

Row = dict[str, Any]
Sequences = dict[str, list[int]]
"""The sequences of the rows by the name of their bucket or stream, in the order of the rows."""


class SeveralQuery:
    """One query, from its start position or from an offset.

    The planner's clock advances by a second with each call, so that it never spaces its polls.

    Args:
        offset: the checkpoint's last offset.
        cores: the number of cores, by which the planner groups splits.

    Attributes:
        offset: the query's position; None before the first micro-batch is planned.
        tasks: the splits of the last micro-batch, by task.
        rows: the rows of all micro-batches.
    """

    def __init__(
        self, url: str, *, offset: OffsetJson | None = None, cores: int = 2, **options: Any
    ) -> None:
        self._url = url
        self._cores = cores
        given = {"servers": url, **options}
        strings = {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in given.items()
        }
        self._options = options
        ticks = itertools.count()
        self._driver = QueryDriver(
            _parsed(strings), clock=lambda: float(next(ticks)), cores=cores, timer=lambda: 0.0
        )
        self.offset = offset
        self.tasks: list[tuple[Split, ...]] = []
        self.rows: list[Row] = []

    def __enter__(self) -> SeveralQuery:
        return self

    def __exit__(self, *raised: object) -> None:
        self._driver.close()

    def restarted(self, **options: Any) -> SeveralQuery:
        """The query after a restart: with its offset, and other options where given."""
        return SeveralQuery(
            self._url, offset=self.offset, cores=self._cores, **(options or self._options)
        )

    def prepare_available_now(self) -> None:
        """Fix the end of the run, as ``Trigger.AvailableNow`` does."""
        self._driver.prepare_available_now()

    def start(self) -> OffsetJson:
        """The offset from which the query reads."""
        if self.offset is None:
            self.offset = self._driver.initial_offset()
        return self.offset

    def micro_batch(self) -> Sequences | None:
        """Plan and read a micro-batch; None where there is nothing new."""
        start = self.start()
        end = self._driver.latest_offset(start)
        if end == start:
            return None
        self.offset = end
        return self.read_range(start, end)

    def read_range(self, start: OffsetJson, end: OffsetJson) -> Sequences:
        """Read the range between two offsets, as Spark repeats a failed micro-batch."""
        partitions = self._driver.partitions(start, end)
        self.tasks = [partition.splits for partition in partitions]  # type: ignore[misc]
        rows = [
            row
            for partition in partitions
            for batch in self._driver.read(partition)
            for row in batch.to_pylist()
        ]
        self.rows += rows
        return sequences(rows)

    def micro_batches(self) -> list[Sequences]:
        """The micro-batches until there are no new messages; no empty ones."""
        batches = []
        for _ in range(1000):
            batch = self.micro_batch()
            if batch is None:
                return batches
            if batch:
                batches.append(batch)
        raise AssertionError("the query did not end after 1000 micro-batches")

    def read(self) -> Sequences:
        """All rows until there are no new messages."""
        before = len(self.rows)
        self.micro_batches()
        return sequences(self.rows[before:])

    def positions(self) -> dict[str, int]:
        """The query's position by stream."""
        return {name: at["stream_seq"] for name, at in self.start()["streams"].items()}


def sequences(rows: list[Row]) -> Sequences:
    """The sequences of rows by the name of their bucket or stream."""
    found: Sequences = {}
    for row in rows:
        name = row["bucket"] if "bucket" in row else row["stream"]
        found.setdefault(name, []).append(row["revision"] if "revision" in row else row["sequence"])
    return found


def _parsed(strings: dict[str, str]) -> KvOptions | StreamOptions:
    if {"bucket", "buckets", "bucketPattern"} & strings.keys():
        return kv_options(strings, Mode.STREAMING)
    return stream_options(strings, Mode.STREAMING)
