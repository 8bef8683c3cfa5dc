"""A query without Spark: planner and reader are asked what Spark asks, in Spark's order.

Offsets go through JSON and splits through pickle, as they do there.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from faults.rows import Row, rows_of
from nats_stream_source.jetstream.patience import patiently
from nats_stream_source.options import KvOptions, StreamOptions
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.planner import Planner
from nats_stream_source.source.query import query_of
from nats_stream_source.source.reader import read_split
from nats_stream_source.source.runtime import Runner, drop_kept_runners

T = TypeVar("T")

Each = Callable[[int], None]
"""Called between record batches, with how many rows there are so far."""

DEADLINE = 600.0
"""Seconds that a reading may take to come somewhere; only a failing test takes that long."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One that was done, with the rows of ``(start, end]``.

    Attributes:
        listed: whether it was a list of last values.
        known: the stream's last sequence when it was done; 0 where nobody asks for it.
    """

    start: int
    end: int
    listed: bool
    known: int


class Reading:
    """A query without Spark, from its options on.

    Args:
        last_now: asked after each micro-batch, for :attr:`MicroBatch.known`.

    Attributes:
        offsets: of all micro-batches that were done; the first is where the query began.
        logged: the end of a micro-batch that was planned and not done.
        splits: of that micro-batch.
        rows: of all micro-batches that were done; those are in ``done``.
    """

    def __init__(
        self,
        options: KvOptions | StreamOptions,
        offsets: list[dict[str, Any]],
        last_now: Callable[[], int] = lambda: 0,
    ) -> None:
        self._options = options
        self._query = query_of(options)
        self._runner = Runner(options.connection)
        self._planner = Planner(self._query, self._runner.link)
        self._last_now = last_now
        self.offsets = offsets
        self.logged: dict[str, Any] | None = None
        self.splits: list[Plan] = []
        self.rows: list[Row] = []
        self.done: list[MicroBatch] = []

    def _ask(self, question: Callable[[Planner], Awaitable[T]]) -> T:
        seconds = self._options.connection.connect_timeout
        return self._runner.run(patiently(lambda: question(self._planner), seconds))

    @property
    def seq(self) -> int:
        """The sequence up to which was read."""
        return int(self.offsets[-1]["stream_seq"]) if self.offsets else 0

    def _start(self) -> Offset:
        # Also where there is a checkpoint: Spark asks after each restart.
        initial = self._ask(lambda planner: planner.initial())
        if not self.offsets:
            self.offsets.append(_through_json(initial))
        return Offset.parse(self.offsets[-1])

    def plan(self) -> bool:
        """Plan the next micro-batch; False when there is nothing."""
        start, reading = self._start(), self._options.reading
        end = self._ask(lambda planner: planner.latest(start, reading.max_rows, reading.max_bytes))
        if end == start:
            return False
        self.again(_through_json(end))
        return True

    def again(self, logged: dict[str, Any]) -> None:
        """Plan a micro-batch whose end is known, as after a restart before it was done."""
        start, end = self._start(), Offset.parse(logged)
        self.splits = self._ask(lambda planner: planner.plans(start, end))
        self.logged = logged

    def read(self, each: Each | None = None) -> list[Row]:
        """Read what was planned."""
        rows: list[Row] = []
        for split in pickle.loads(pickle.dumps(self.splits)):
            for batch in read_split(split, pickle.loads(pickle.dumps(self._query))):
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
        """Micro-batches until all up to ``seq`` was read."""
        deadline = time.monotonic() + DEADLINE
        while self.seq < seq:
            assert time.monotonic() < deadline, f"read up to {self.seq}, not {seq}"
            if self.plan():
                self.read()

    def drain(self) -> None:
        """Micro-batches until there is nothing more."""
        deadline = time.monotonic() + DEADLINE
        nothing = 0
        while nothing < 3:  # a planner that was not asked for a while says so once, without a look
            assert time.monotonic() < deadline, f"still reading at {self.seq}"
            if self.plan():
                self.read()
                nothing = 0
            else:
                nothing += 1

    def stop(self) -> None:
        """What Spark does at a query's end, in the planner's process and in the workers."""
        self._runner.close()
        drop_kept_runners()


def _through_json(offset: Offset) -> dict[str, Any]:
    return dict(json.loads(json.dumps(offset.to_json())))
