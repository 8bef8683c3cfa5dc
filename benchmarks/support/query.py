"""A query that a benchmark plans and reads without Spark, and a count of its requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from nats.aio.client import Client

from nats_stream_source.options import KvOptions, Mode, kv_options
from nats_stream_source.rows.formats import KvFormat
from nats_stream_source.spark.planning.query_planner import QueryPlanner
from nats_stream_source.spark.readers import AdmissionReader, NatsInputPartition
from nats_stream_source.spark.runner import Runner, close_cached_runners


class Query:
    """A stream reader, called as Spark calls it; a context manager.

    Args:
        jumps: whether the planner's clock advances a second with each call, so that it never waits.

    Attributes:
        offset: the end of the last micro-batch.
        shift: seconds by which the planner's clock is ahead.
    """

    def __init__(self, options: KvOptions, *, jumps: bool = False) -> None:
        adapter, ticks = KvFormat(options), itertools.count()
        self._reader = AdmissionReader(adapter)
        self.shift = 0.0

        def clock() -> float:
            return float(next(ticks)) if jumps else time.monotonic() + self.shift

        runner = Runner(options.connection)
        self._reader._runner = runner
        self._reader._planner = QueryPlanner(adapter, runner.connection, clock=clock)
        self.offset = self._reader.initialOffset()

    def __enter__(self) -> Query:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.stop()
        close_cached_runners()

    def poll(self) -> list[NatsInputPartition]:
        """Plan a micro-batch; return its tasks, none where there is nothing new."""
        end = self._reader.latestOffset(self.offset, self._reader.getDefaultReadLimit())
        if end == self.offset:
            return []
        tasks: Any = self._reader.partitions(self.offset, end)
        self.offset = end
        return list(tasks)

    def read(self, tasks: Sequence[NatsInputPartition]) -> int:
        """Read the tasks one after the other; return the number of rows."""
        return sum(batch.num_rows for task in tasks for batch in self._reader.read(task))


def options_of(url: str, **options: str) -> KvOptions:
    """The options of a query; an empty one is not set."""
    given = {name: value for name, value in options.items() if value}
    return kv_options({"servers": url, **given}, Mode.STREAMING)


class Requests:
    """Counts the requests of all planners of this process, without puts to the bucket."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Requests:
        self._publish = Client.publish

        async def publish(client: Client, subject: str, *args: Any, **named: Any) -> None:
            self.count += not subject.startswith("$KV.")
            await self._publish(client, subject, *args, **named)

        Client.publish = publish  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Client.publish = self._publish
