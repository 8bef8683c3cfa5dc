"""A streaming query without Spark: calls a stream reader as Spark calls it.

:class:`QueryDriver` is the one way to plan and read a streaming query without Spark. It calls the
stream reader for Spark 4.2 with the arguments and in the order of Spark. As in Spark, offsets pass
through JSON, and the reader and its partitions through pickle on their way to a task.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from nats_stream_source.options import KvOptions, StreamOptions
from nats_stream_source.spark.input_partition import NatsInputPartition
from nats_stream_source.spark.reading.event_loop import Runner, close_cached_runners
from nats_stream_source.spark.stream_reader import new_planner
from nats_stream_source.spark.stream_reader_v42 import AdmissionReader

OffsetJson = dict[str, Any]
"""An offset as Spark stores it in a checkpoint."""


class QueryDriver:
    """The stream reader of one query, in the planner's process and in the tasks.

    Args:
        clock: the planner's clock in seconds, by which it spaces the polls of an idle query.
        cores: the number of cores, by which the planner cuts a range into splits.
        timer: the clock in seconds by which the planner measures its own requests.
        outage_timeout: seconds; 0 since most tests of servers that are away expect the error.
    """

    def __init__(
        self,
        options: KvOptions | StreamOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        cores: int | None = None,
        timer: Callable[[], float] = time.perf_counter,
        outage_timeout: float = 0.0,
    ) -> None:
        common = replace(options.common, outage_timeout=outage_timeout)
        options = replace(options, common=common)
        self._reader = AdmissionReader(options)
        runner = Runner(options.connection)
        self._reader._runner = runner
        self._reader._planner = new_planner(
            options, runner.connection, clock=clock, cores=cores, timer=timer
        )

    def prepare_available_now(self) -> None:
        """Fix the end of the run, as ``Trigger.AvailableNow`` does."""
        self._reader.prepareForTriggerAvailableNow()

    def initial_offset(self) -> OffsetJson:
        """Return the start position of a query without a checkpoint."""
        return _through_json(self._reader.initialOffset())

    def latest_offset(self, start: OffsetJson) -> OffsetJson:
        """Return the end of the micro-batch after ``start``; ``start`` without new messages."""
        return _through_json(self._reader.latestOffset(start, self._reader.getDefaultReadLimit()))

    def partitions(self, start: OffsetJson, end: OffsetJson) -> list[NatsInputPartition]:
        """Return the partitions of the micro-batch, one per task, as the tasks receive them."""
        partitions: list[NatsInputPartition] = pickle.loads(
            pickle.dumps(self._reader.partitions(start, end))
        )
        return partitions

    def read(self, partition: NatsInputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a partition, from one attempt of its task."""
        reader, partition = pickle.loads(pickle.dumps((self._reader, partition)))
        batches: Iterator[pa.RecordBatch] = reader.read(partition)
        return batches

    def close(self) -> None:
        """Close the connections of the planner and of the tasks, as at the end of a query."""
        self._reader.stop()
        close_cached_runners()


def _through_json(offset: OffsetJson) -> OffsetJson:
    return dict(json.loads(json.dumps(offset)))
