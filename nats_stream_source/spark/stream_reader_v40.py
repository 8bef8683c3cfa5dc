"""The stream reader for Spark 4.0 and 4.1, which request a micro-batch's end without its start.

The end depends on the start: it carries ``origin``, ``initial_through`` and ``epoch``, and data
loss is detected by comparing the start with the stream. So the reader keeps the start itself. Spark
(measured on 4.0.5 and 4.1.4) provides it in time:

===================================  ==============================================================
a new query                          ``latestOffset()``, ``initialOffset()``, ``partitions(I, E)``
a query that resumes                 ``partitions(S, S)``, ``latestOffset()``, ``partitions(S, E)``
the last micro-batch failed          ``partitions(E, E)``, ``partitions(S, E)``, ``latestOffset()``
the first micro-batch failed         ``partitions(E, E)``, ``initialOffset()``, ``partitions(I, E)``
===================================  ==============================================================

S is the end that was logged last; Spark calls ``partitions(S, S)`` to give a reader the query's
position. A reader whose end is requested before that has a new query, and starts at the initial
offset.

An exception: with ``spark.sql.streaming.triggerAvailableNowWrapper.enabled`` (off by
default, since by Spark's documentation it can lose data), ``Trigger.AvailableNow`` requests its end
before it provides the query's position. Such an end is invalid, and ``partitions(S, S)``, which
still comes before an offset is logged, rejects it.

``Trigger.AvailableNow`` is one micro-batch here, like ``Trigger.Once``; after a failure it is the
failed micro-batch, and the next run reads the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

from nats_stream_source.errors import OffsetError
from nats_stream_source.rows.offsets import Offset
from nats_stream_source.spark.readers import StreamReader

if TYPE_CHECKING:
    from nats_stream_source.rows.base import FormatAdapter
    from nats_stream_source.spark.task_counts import TaskCounts


class NoAdmissionReader(StreamReader):
    """Reads without limits, and keeps the query's position."""

    def __init__(self, adapter: FormatAdapter, task_counts: TaskCounts | None = None) -> None:
        super().__init__(adapter, task_counts)
        self._position: Offset | None = None
        self._end_without_position: dict[str, Any] | None = None

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # 4.2 adds arguments
        """The end of the next micro-batch, which starts where the last one ended."""
        start = self._position or self._plan(lambda planner: planner.initial_offset())
        end = self._plan(lambda planner: planner.latest_offset(start, limited=False)).to_json()
        if self._position is None:
            self._end_without_position = end
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The splits of a micro-batch.

        Raises:
            OffsetError: Spark requested the micro-batch's end before it provided the position.
        """
        if (
            self._position is None
            and start == end
            and self._end_without_position not in (None, end)
        ):
            raise OffsetError(
                "could not plan this run: Spark requested its end before it provided the query's "
                "position, expected the reverse; set "
                "spark.sql.streaming.triggerAvailableNowWrapper.enabled=false (the default), or "
                "use Spark 4.2 or newer"
            )
        splits = super().partitions(start, end)
        # Only now: Spark may request the same end again, which must not change.
        self._position = Offset.parse(end)
        return splits

    def commit(self, end: dict[str, Any]) -> None:
        """Keep the query's position, also after a micro-batch of which Spark read no row."""
        self._position = Offset.parse(end)
