"""``format("nats_kv")``: the thin layer between Spark's interfaces and planner and reader.

Spark makes the stream reader twice: in the planner's process, where it is asked for offsets and
partitions, and for the tasks, to which it is pickled and where only ``read`` is called. So nothing
is opened before it is needed, and the planner's state is not pickled. Spark also starts a process
just to find the source, and one to ask for its columns: planner and reader are imported where they
are used, or each of those would wait for them too.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from nats_stream_source.errors import NatsSourceError, OptionError
from nats_stream_source.options import KvOptions, kv_options
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.schema import KV_DDL

if TYPE_CHECKING:
    import pyarrow as pa

    from nats_stream_source.source.planner import Planner
    from nats_stream_source.source.runtime import Runner

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass
class Split(InputPartition):
    """What one Spark task reads."""

    plan: Plan

    def __repr__(self) -> str:
        return f"Split({self.plan.stream} ({self.plan.start}, {self.plan.end}])"


class NatsKvDataSource(DataSource):
    """The changes of a NATS key-value bucket, as rows.

    The options are those of ``nats_stream_source.options``; they are checked when the source is
    loaded, before anything connects.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        # Not checked here: Spark makes one for a sink too, whose options are others as well.
        super().__init__(dict(options))

    @classmethod
    def name(cls) -> str:
        """The name for ``format()``."""
        return "nats_kv"

    def schema(self) -> str:
        """The columns, as DDL."""
        kv_options(self.options)
        return KV_DDL

    def streamReader(self, schema: StructType) -> NatsKvStreamReader:
        """The streaming side."""
        return NatsKvStreamReader(kv_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Batch reads are not part of this version."""
        self._only_streams("spark.read")

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Writing is not part of this version."""
        self._only_streams("df.write")

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Writing is not part of this version."""
        self._only_streams("df.writeStream")

    def _only_streams(self, asked: str) -> NoReturn:
        raise OptionError(
            f"format 'nats_kv' is read with spark.readStream; {asked} is not supported. For the "
            f"bucket as it is now, use a stream with trigger(availableNow=True)"
        )


class NatsKvStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets and splits on the driver, rows on the executors."""

    def __init__(self, options: KvOptions) -> None:
        self._options = options
        self._runner: Runner | None = None
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_runner": None, "_planner": None}

    def _ask(self, question: Callable[[Planner], Awaitable[T]]) -> T:
        """Put a question to the planner, again while the server is away for a moment."""
        from nats_stream_source.jetstream.patience import patiently
        from nats_stream_source.source.planner import Planner
        from nats_stream_source.source.runtime import Runner

        settings = self._options.connection
        if self._runner is None or self._planner is None:
            self._runner = Runner(settings)
            self._planner = Planner(self._options, self._runner.link)
        planner = self._planner
        try:
            return self._runner.run(patiently(lambda: question(planner), settings.connect_timeout))
        except NatsSourceError as error:
            # Spark shows the user the whole traceback, and a named error's text stands alone.
            log.debug("the planner failed", exc_info=True)
            raise error.with_traceback(None) from None

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        return self._ask(lambda planner: planner.initial()).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """``maxRowsPerTrigger``, or ``maxBytesPerTrigger``, or no limit."""
        options = self._options
        if options.max_rows is not None:
            # Spark knows no limit of both kinds: the bytes are added when it comes back.
            return ReadMaxRows(options.max_rows)
        return ReadAllAvailable() if options.max_bytes is None else ReadMaxBytes(options.max_bytes)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the micro-batch that begins at ``start``."""
        begin = Offset.parse(start)
        # With Trigger.Once Spark asks for all there is, whatever the options say.
        limited = isinstance(limit, (ReadMaxRows, ReadMaxBytes))
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        nbytes = self._options.max_bytes if limited else None
        return self._ask(lambda planner: planner.latest(begin, rows, nbytes)).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The stream's end, for the lag in the query's progress."""
        newest = self._planner.newest() if self._planner is not None else None
        return None if newest is None else newest.to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix what this run reads."""
        self._ask(lambda planner: planner.prepare_available_now())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The splits of a micro-batch."""
        first, last = Offset.parse(start), Offset.parse(end)
        return [Split(plan) for plan in self._ask(lambda planner: planner.plans(first, last))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one split."""
        from nats_stream_source.source.reader import read_split

        assert isinstance(partition, Split)
        return read_split(partition.plan, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is remembered on the server, so there is nothing to do."""

    def stop(self) -> None:
        """Close the planner's connection."""
        if self._runner is not None:
            self._runner.close()
            self._runner = self._planner = None
