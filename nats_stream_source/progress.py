"""What a query does, micro-batch by micro-batch: rows, rate, lag, what was compacted away.

Spark reports each micro-batch with the offsets of each source: where it began, where it ended, and
``latestOffset``, the stream's end when the batch was planned. :func:`records` turns such a report
into one :class:`BatchProgress` for each source of this package; :func:`watch_progress` does so for
every query of a session and hands the records on.

Lag is rows, not sequences: ``consumer_seq`` counts what an ordered consumer of the query would have
been delivered, so the difference of two is what is still to come. It is as of the planning of the
batch: what was written while it ran is in the next one's. An idle query reports nothing; the last
record holds.

``rows`` is Spark's count of what came out of the source. A sink that reads a batch twice, as
``foreachBatch`` without ``persist`` may, makes Spark count twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nats_stream_source.errors import OffsetError
from nats_stream_source.logs import field_logger
from nats_stream_source.source.offsets import Offset, behind, range_between

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryListener

log = field_logger(__name__)


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """One source's part of one micro-batch.

    Attributes:
        query: the query's name, or its id where it has none.
        batch: the micro-batch's number.
        source: the source's number within the query, from 0.
        stream: the stream's name; of a bucket, ``KV_<bucket>``.
        start, end: the range ``(start, end]`` of stream sequences.
        rows: what Spark got of it.
        seconds: how long the whole micro-batch took.
        lag: rows between the end of the batch and the end of the stream when it was planned; None
            where that was not known, as in a batch that is run again after a restart.
        lag_seconds: the time between the messages at these two ends; None also where either is
            gone.
        compacted: sequences of the range that gave no row: superseded or deleted before they were
            read, or left out with ``ignoreDeletes``. None where the query has a filter, since most
            may be of other subjects.
        initial: whether the range has initial values.
        epoch: how often the stream was replaced or set back, with ``failOnDataLoss=false``.
    """

    query: str
    batch: int
    source: int
    stream: str
    start: int
    end: int
    rows: int
    seconds: float
    lag: int | None
    lag_seconds: float | None
    compacted: int | None
    initial: bool
    epoch: int

    @property
    def rows_per_second(self) -> float:
        """Rows per second of the micro-batch."""
        return self.rows / self.seconds if self.seconds else 0.0

    def fields(self) -> dict[str, object]:
        """As a log line has them; what is not known is left out."""
        return {
            "query": self.query,
            "batch": self.batch,
            "source": self.source,
            "stream": self.stream,
            "start": self.start,
            "end": self.end,
            "rows": self.rows,
            "seconds": f"{self.seconds:.3f}",
            "rows_per_second": round(self.rows_per_second),
            "lag": self.lag,
            "lag_seconds": None if self.lag_seconds is None else f"{self.lag_seconds:.3f}",
            "compacted": self.compacted,
            "initial": "true" if self.initial else "false",
            "epoch": self.epoch,
        }


def records(progress: Mapping[str, Any]) -> list[BatchProgress]:
    """One record for each source of this package in a report of Spark's.

    Args:
        progress: an element of ``query.recentProgress``, or ``event.progress`` as an object of
            JSON. Sources of other packages are passed over, and so are offsets that a newer version
            of this one wrote.
    """
    return list(_records(progress))


def _records(progress: Mapping[str, Any]) -> Iterator[BatchProgress]:
    for number, source in enumerate(progress["sources"]):
        end = _offset(source["endOffset"])
        if end is None:
            continue
        start = _offset(source["startOffset"])
        # The first batch has no start: what it began after is in its end.
        first, last = (end.origin, end.stream_seq) if start is None else range_between(start, end)
        newest = _offset(source["latestOffset"])
        lag = lag_seconds = None
        if newest is not None and newest.epoch == end.epoch:
            lag, lag_seconds = behind(end, newest)
        rows = source["numInputRows"]
        yield BatchProgress(
            query=progress["name"] or str(progress["id"]),
            batch=progress["batchId"],
            source=number,
            stream=end.stream,
            start=first,
            end=last,
            rows=rows,
            seconds=progress["durationMs"].get("triggerExecution", 0) / 1000,
            lag=lag,
            lag_seconds=lag_seconds,
            compacted=None if end.filter else max(0, last - first - rows),
            initial=first < min(end.initial_through, last),
            epoch=end.epoch,
        )


def _offset(value: Any) -> Offset | None:
    """An offset of a report; None when it is another source's, or there is none."""
    try:
        loaded = json.loads(value) if isinstance(value, str) else value
        return Offset.parse(loaded) if isinstance(loaded, Mapping) else None
    except (ValueError, OffsetError):
        return None


def watch_progress(
    spark: SparkSession, callback: Callable[[BatchProgress], None] | None = None
) -> StreamingQueryListener:
    """Log a line for every micro-batch of every query, and hand its records to ``callback``.

    The lines are of level ``info``, by the logger ``nats_stream_source.progress``. Works with a
    session in this process and over Spark Connect; there too the callback runs here, in a thread of
    Spark's. What it raises is reported by Spark, and the query goes on.

    Returns:
        The listener, which has been added: ``spark.streams.removeListener`` ends it.
    """
    from pyspark.sql.streaming.listener import StreamingQueryListener

    class Progress(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:
            pass

        def onQueryProgress(self, event: Any) -> None:
            for record in _records(json.loads(event.progress.json)):
                log.info("micro-batch", **record.fields())  # type: ignore[arg-type]
                if callback is not None:
                    callback(record)

        def onQueryIdle(self, event: Any) -> None:
            pass

        def onQueryTerminated(self, event: Any) -> None:
            pass

    listener = Progress()
    spark.streams.addListener(listener)
    return listener
