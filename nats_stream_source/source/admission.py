"""The stream reader for Spark 4.2 and newer, which gives each micro-batch a start and a limit."""

from __future__ import annotations

from typing import Any

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.streaming import StreamReader


class AdmissionReader(StreamReader, SupportsTriggerAvailableNow):
    """Reads under Spark's admission control.

    That it has it, Spark knows by the arguments of ``latestOffset``.
    """

    def getDefaultReadLimit(self) -> ReadLimit:
        """``maxRowsPerTrigger``, or ``maxBytesPerTrigger``, or no limit."""
        options = self._options.reading
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
        nbytes = self._options.reading.max_bytes if limited else None
        return self._ask(lambda planner: planner.latest(begin, rows, nbytes)).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The stream's end, for the lag in the query's progress."""
        newest = self._planner.newest() if self._planner is not None else None
        return None if newest is None else newest.to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix what this run reads."""
        self._ask(lambda planner: planner.prepare_available_now())
