"""A query without Spark: its planner and its readers, called as Spark calls them.

::

    with Query(stream_options({"servers": url, "stream": "ORDERS"})) as query:
        assert query.rows() == [...]      # all that there is
        ...
        assert query.rows() == [...]      # what came since
        offset = query.offset             # for another query: a restart
"""

from __future__ import annotations

import itertools
from typing import Any

from nats_stream_source.options import KvOptions, Mode, StreamOptions, stream_options
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.planner import Planner
from nats_stream_source.source.query import query_of
from nats_stream_source.source.reader import read_split
from nats_stream_source.source.runtime import Runner, drop_kept_runners

Row = dict[str, Any]


class Query:
    """One query, from its beginning or from an offset.

    Attributes:
        offset: where it stands.
        plans: the splits of the last micro-batch.
    """

    def __init__(
        self, options: KvOptions | StreamOptions, offset: Offset | None = None, cores: int = 2
    ) -> None:
        self._options = options
        self._runner = Runner(options.connection)
        # A clock that jumps a second with every look never rests; ranks take no time.
        ticks = itertools.count()
        self.planner = Planner(
            query_of(options),
            self._runner.link,
            lambda: float(next(ticks)),
            cores=cores,
            timer=lambda: 0.0,
        )
        self._offset = offset
        self.plans: list[Plan] = []

    def __enter__(self) -> Query:
        return self

    def __exit__(self, *raised: object) -> None:
        self._runner.close()
        drop_kept_runners()

    @property
    def offset(self) -> Offset:
        """Where it stands."""
        if self._offset is None:
            self._offset = self._runner.run(self.planner.initial())
        return self._offset

    def end(self, limit: int | None = None) -> Offset:
        """The end of the next micro-batch, as ``latestOffset`` says it."""
        reading = self._options.reading
        rows = reading.max_rows if limit is None else limit
        return self._runner.run(self.planner.latest(self.offset, rows, reading.max_bytes))

    def read(self, end: Offset) -> list[Row]:
        """The rows up to ``end``, as ``partitions`` and ``read`` give them."""
        self.plans = self._runner.run(self.planner.plans(self.offset, end))
        query = query_of(self._options)
        found = [
            row
            for plan in self.plans
            for batch in read_split(plan, query)
            for row in batch.to_pylist()
        ]
        self._offset = end
        return found

    def batches(self, limit: int | None = None) -> list[list[Row]]:
        """The micro-batches until nothing is left, but for empty ones."""
        found = []
        for _ in range(1000):
            end = self.end(limit)
            if end == self.offset:
                return found
            if rows := self.read(end):
                found.append(rows)
        raise AssertionError("no end")

    def rows(self) -> list[Row]:
        """All rows until nothing is left."""
        return [row for batch in self.batches() for row in batch]


def stream_query(
    url: str, stream: str | None, offset: Offset | None = None, **options: Any
) -> Query:
    """A query of ``nats_stream``."""
    given = {"servers": url, "stream": stream, **options}
    texts = {name: str(value) for name, value in given.items() if value is not None}
    return Query(stream_options(texts, Mode.STREAMING), offset)


def sequences(rows: list[Row]) -> list[int]:
    return [row["sequence"] for row in rows]
