"""Streaming reads: the thin layer between Spark's interfaces and planner and reader.

Spark makes the stream reader twice: in the planner's process, where it is asked for offsets and
partitions, and for the tasks, to which it is pickled and where only ``read`` is called. So nothing
is opened before it is needed, and the planner's state is not pickled. Spark also starts a process
just to find the source, and one to ask for its columns: planner and reader are imported where they
are used, or each of those would wait for them too.

How Spark asks for the end of a micro-batch differs: with its start and a limit since 4.2
(``source.admission``), with neither before (``source.no_admission``). The rest is here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from nats_stream_source.options import KvOptions, StreamOptions
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.query import query_of
from nats_stream_source.source.spark_api import ADMISSION_CONTROL, check_limits

if TYPE_CHECKING:
    import pyarrow as pa

    from nats_stream_source.source.planner import Planner
    from nats_stream_source.source.runtime import Runner

T = TypeVar("T")


@dataclass
class Split(InputPartition):
    """What one Spark task reads."""

    plan: Plan

    def __repr__(self) -> str:
        return f"Split({self.plan.stream} ({self.plan.start}, {self.plan.end}])"


def stream_reader(options: KvOptions | StreamOptions) -> StreamReader:
    """The reader for the Spark that is installed.

    Raises:
        OptionError: a limit that this Spark cannot keep.
    """
    check_limits(options.reading)
    # Each imports what only its Spark has, or is meant for.
    if ADMISSION_CONTROL:
        from nats_stream_source.source.admission import AdmissionReader

        return AdmissionReader(options)
    from nats_stream_source.source.no_admission import NoAdmissionReader

    return NoAdmissionReader(options)


class StreamReader(DataSourceStreamReader):
    """Offsets and splits on the driver, rows on the executors; all but ``latestOffset``."""

    def __init__(self, options: KvOptions | StreamOptions) -> None:
        self._options = options
        self._runner: Runner | None = None
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_runner": None, "_planner": None}

    def _ask(self, question: Callable[[Planner], Awaitable[T]]) -> T:
        """Put a question to the planner, again while the server is away for a moment."""
        from nats_stream_source.source.planner import Planner
        from nats_stream_source.source.runtime import Runner

        if self._runner is None or self._planner is None:
            self._runner = Runner(self._options.connection)
            self._planner = Planner(query_of(self._options), self._runner.link)
        planner = self._planner
        return self._runner.plan(lambda: question(planner))

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        return self._ask(lambda planner: planner.initial()).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The splits of a micro-batch."""
        first, last = Offset.parse(start), Offset.parse(end)
        return [Split(plan) for plan in self._ask(lambda planner: planner.plans(first, last))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split."""
        from nats_stream_source.source.reader import read_split

        assert isinstance(partition, Split)
        return read_split(partition.plan, query_of(self._options))

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is remembered on the server, so there is nothing to do."""

    def stop(self) -> None:
        """Close the planner's connection."""
        if self._runner is not None:
            self._runner.close()
            self._runner = self._planner = None
