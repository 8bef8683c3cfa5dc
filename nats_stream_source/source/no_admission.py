"""The stream reader for Spark 4.0 and 4.1, which ask for a micro-batch's end without its start.

The end depends on the start: it carries on ``origin``, ``initial_through`` and ``epoch``, and
whether data was lost is seen by comparing the start with the stream. So the reader keeps the start
itself. Spark (measured on 4.0.5 and 4.1.4) lets it know in time:

=================================  ==============================================================
a new query                        ``latestOffset()``, ``initialOffset()``, ``partitions(I, E)``
one that goes on                   ``partitions(S, S)``, ``latestOffset()``, ``partitions(S, E)``
one whose last micro-batch failed  ``partitions(E, E)``, ``partitions(S, E)``, ``latestOffset()``
the first micro-batch failed       ``partitions(E, E)``, ``initialOffset()``, ``partitions(I, E)``
=================================  ==============================================================

S is the end that was logged last; ``partitions(S, S)`` is how Spark tells a reader where a query
stands. Who is asked for an end before that has a new query, and begins at the initial offset.

There is one exception. With ``spark.sql.streaming.triggerAvailableNowWrapper.enabled`` (off by
default, since it can lose data, says Spark), ``Trigger.AvailableNow`` takes its end before it tells
where the query stands. Such an end is of no use, and ``partitions(S, S)``, which still comes before
anything is logged, refuses it.

``Trigger.AvailableNow`` is one micro-batch here, as ``Trigger.Once`` is; after a failure it is the
one that failed, and the next run reads the rest.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import InputPartition

from nats_stream_source.errors import OffsetError
from nats_stream_source.options import KvOptions, StreamOptions
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.streaming import StreamReader


class NoAdmissionReader(StreamReader):
    """Reads without limits, and keeps in mind how far the query has come."""

    def __init__(self, options: KvOptions | StreamOptions) -> None:
        super().__init__(options)
        self._reached: Offset | None = None
        self._guessed: dict[str, Any] | None = None

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # 4.2 adds arguments
        """The end of the next micro-batch, which begins where the last one ended."""
        start = self._reached or self._ask(lambda planner: planner.initial())
        end = self._ask(lambda planner: planner.latest(start, None)).to_json()
        if self._reached is None:
            self._guessed = end
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The splits of a micro-batch.

        Raises:
            OffsetError: Spark took the micro-batch's end before it told where the query stands.
        """
        if self._reached is None and start == end and self._guessed not in (None, end):
            raise OffsetError(
                "Spark took the end of this run before it told where the query stands: set "
                "spark.sql.streaming.triggerAvailableNowWrapper.enabled=false (the default), or "
                "use Spark 4.2 or newer"
            )
        splits = super().partitions(start, end)
        # Not before: an end that was answered may be asked for again, and is the same then.
        self._reached = Offset.parse(end)
        return splits

    def commit(self, end: dict[str, Any]) -> None:
        """Keep in mind where the query stands, also if a micro-batch needed none of the rows."""
        self._reached = Offset.parse(end)
