"""The stream reader for Spark 4.2 and newer, which give each micro-batch a start and a limit."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from nats_stream_source.metrics.table import Counts, take
from nats_stream_source.rows.base import FormatAdapter
from nats_stream_source.rows.offsets import REPORT, Offset, PlannerReport
from nats_stream_source.spark.readers import StreamReader
from nats_stream_source.spark.task_counts import TaskCounts


class AdmissionReader(StreamReader, SupportsTriggerAvailableNow):
    """Reads under Spark's admission control.

    Spark detects the support by the arguments of ``latestOffset``.
    """

    def __init__(self, adapter: FormatAdapter, task_counts: TaskCounts | None = None) -> None:
        super().__init__(adapter, task_counts)
        self._counts: Counts = Counter()  # of the planner's process

    def getDefaultReadLimit(self) -> ReadLimit:
        """``maxRowsPerTrigger``, ``maxBytesPerTrigger`` or ``minRowsPerTrigger``, or no limit.

        Spark passes it back to :meth:`latestOffset`, unless the trigger overrides it. It carries
        whether the limits apply; the planner reads all values from the options, since a limit of
        Spark has only one.
        """
        options = self._adapter.options.common
        if options.max_rows_per_trigger is not None:
            return ReadMaxRows(options.max_rows_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_rows_per_trigger is not None:
            return ReadMinRows(options.min_rows_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the micro-batch that starts at ``start``."""
        offset = Offset.parse(start)
        # Trigger.Once requests all available messages, regardless of the options.
        limited = isinstance(limit, (ReadMaxRows, ReadMaxBytes, ReadMinRows))
        return self._plan(lambda planner: planner.latest_offset(offset, limited=limited)).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The stream's end, for the lag in the query's progress, and the planner's counts."""
        if self._planner is None or (latest := self._planner.stream_end) is None:
            return None
        self._counts.update(take())
        report = PlannerReport(self._counts, self._planner.bytes_behind).to_json()
        return latest.to_json() | ({REPORT: report} if report else {})

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of this run."""
        self._plan(lambda planner: planner.prepare_available_now())
