"""The micro-batches of a streaming query without Spark, with their checkpoint and their rows.

The end of a micro-batch is logged when it is planned, and becomes the query's position when it was
read. A second query with the offsets of the first one is a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from nats_stream_source.options import KvOptions, StreamOptions
from nats_stream_source.spark.formats.splits import Split
from nats_stream_source.spark.input_partition import NatsInputPartition
from tests.support.oracle.rows import Row, rows_of
from tests.support.query_driver.driver import OffsetJson, QueryDriver

Each = Callable[[int], None]
"""Called after each record batch, with the number of rows so far."""

DEADLINE = 600.0
"""Seconds in which a query must make progress; only a failing test takes that long."""

_EMPTY_POLLS = 3
"""Empty polls after which a query is idle. A planner that was not called for a while reports one
empty poll without a request to the server."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A completed micro-batch, with the rows of ``(start, end]``.

    Attributes:
        listed: whether it was read as a list of last values.
        known: the last sequence of the stream when the micro-batch was completed; 0 when the query
            does not request it.
    """

    start: int
    end: int
    listed: bool
    known: int


class MicroBatchQuery:
    """A query that plans and reads micro-batches one by one.

    Args:
        last_now: returns the last sequence of the stream, for :attr:`MicroBatch.known`.

    Attributes:
        offsets: the offsets of all completed micro-batches; the first one is the query's start.
        logged: the end of a micro-batch that is planned and not completed.
        splits: the splits of that micro-batch.
        rows: the rows of all completed micro-batches, which are in ``done``.
    """

    def __init__(
        self,
        options: KvOptions | StreamOptions,
        offsets: list[OffsetJson],
        last_now: Callable[[], int] = lambda: 0,
    ) -> None:
        self._driver = QueryDriver(options)
        self._last_now = last_now
        self.offsets = offsets
        self.logged: OffsetJson | None = None
        self.splits: list[Split] = []
        self.rows: list[Row] = []
        self.done: list[MicroBatch] = []

    @property
    def seq(self) -> int:
        """The sequence up to which the query has read."""
        return int(self.offsets[-1]["stream_seq"]) if self.offsets else 0

    def _start(self) -> OffsetJson:
        # Also with a checkpoint: Spark requests the initial offset after each restart.
        initial = self._driver.initial_offset()
        if not self.offsets:
            self.offsets.append(initial)
        return self.offsets[-1]

    def plan(self) -> bool:
        """Plan the next micro-batch; return False when there are no new messages."""
        start = self._start()
        end = self._driver.latest_offset(start)
        if end == start:
            return False
        self.plan_logged(end)
        return True

    def plan_logged(self, logged: OffsetJson) -> None:
        """Plan the micro-batch with the end ``logged``, as after a restart before it was done."""
        partitions = self._driver.partitions(self._start(), logged)
        self.splits = [split for partition in partitions for split in partition.splits]
        self.logged = logged

    def read(self, each: Each | None = None) -> list[Row]:
        """Read the planned micro-batch and complete it; return its rows."""
        rows: list[Row] = []
        for split in self.splits:
            for batch in self._driver.read(NatsInputPartition((split,))):
                rows += rows_of(batch)
                if each is not None:
                    each(len(rows))
        assert self.logged is not None
        start = self.seq
        self.offsets.append(self.logged)
        self.logged = None
        self.rows += rows
        listed = any(split.last_per_subject for split in self.splits)
        self.done.append(MicroBatch(start, self.seq, listed, self._last_now()))
        return rows

    def until(self, seq: int) -> None:
        """Plan and read micro-batches until the query has read up to ``seq``."""
        deadline = time.monotonic() + DEADLINE
        while self.seq < seq:
            assert time.monotonic() < deadline, f"read up to {self.seq}, not {seq}"
            if self.plan():
                self.read()

    def drain(self) -> None:
        """Plan and read micro-batches until there are no new messages."""
        deadline = time.monotonic() + DEADLINE
        empty = 0
        while empty < _EMPTY_POLLS:
            assert time.monotonic() < deadline, f"still reading at {self.seq}"
            if self.plan():
                self.read()
                empty = 0
            else:
                empty += 1

    def stop(self) -> None:
        """Close the connections, as Spark does at the end of a query."""
        self._driver.close()
