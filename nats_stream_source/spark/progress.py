"""Progress of a query by micro-batch: rows, rate, lag, and removed sequences.

Spark reports each micro-batch with the offsets of each source: start, end, and ``latestOffset``,
the stream's end when the micro-batch was planned. :func:`records` converts such a report into one
:class:`BatchProgress` per source of this package, and where a source reads several streams, one per
stream that the micro-batch read or that has a lag; :func:`watch_progress` does so for every query
of a session, and passes the records to a callback.

Lag is in rows, not sequences: ``consumer_seq`` counts the messages that an ordered consumer of the
query would have received, so the difference of two is the number of messages to read. It is as of
the planning of the micro-batch: the next one includes the messages that were written while it ran.
An idle query does not report; its last record remains valid.

``rows`` is Spark's count of the rows that the source returned. Spark does not count them by stream:
they are unknown where the micro-batch read several. If a sink reads a batch twice, as
``foreachBatch`` without ``persist`` may, Spark counts them twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from nats_stream_source.errors import needs_extra
from nats_stream_source.logs import field_logger
from nats_stream_source.rows.offsets import Position, lag, positions, range_between

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryListener
    from pyspark.sql.streaming.query import StreamingQuery

    from nats_stream_source.spark.progress_metrics import IsActive, ProgressMetrics

# Users configure this logger by the module's public name.
log = field_logger("nats_stream_source.progress")


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """The progress of one source in one micro-batch.

    Attributes:
        query: the query's name, or its id if it does not have a name.
        batch: the micro-batch's number.
        source: the source's number within the query, from 0.
        stream: the stream's name; for a bucket, ``KV_<bucket>``.
        start, end: the range ``(start, end]`` of stream sequences.
        rows: the number of rows that Spark received; None if the source has read several streams.
        seconds: the duration of the whole micro-batch.
        lag: rows between the end of the micro-batch and the end of the stream when it was planned;
            None if unknown, as in a micro-batch that is repeated after a restart.
        lag_seconds: the time between the messages at these two ends; None also if either message is
            missing.
        compacted: sequences of the range without a row: superseded or deleted before they were
            read, or left out with ``ignoreDeletes``. None if the query has a filter, since most may
            be of other subjects, and if the rows are unknown.
        initial: whether the range has initial values.
        epoch: how often the stream was re-created or rolled back, with ``failOnDataLoss=false``.
    """

    query: str
    batch: int
    source: int
    stream: str
    start: int
    end: int
    rows: int | None
    seconds: float
    lag: int | None
    lag_seconds: float | None
    compacted: int | None
    initial: bool
    epoch: int

    @property
    def rows_per_second(self) -> float | None:
        """Rows per second of the micro-batch; None if the rows are unknown."""
        if self.rows is None:
            return None
        return self.rows / self.seconds if self.seconds else 0.0

    def fields(self) -> dict[str, object]:
        """The fields of the log line; the line omits unknown values."""
        rate = self.rows_per_second
        fields: dict[str, object] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            fields[name] = f"{value:.3f}" if isinstance(value, float) else value
            if name == "seconds":
                fields["rows_per_second"] = None if rate is None else round(rate)
        return fields | {"initial": "true" if self.initial else "false"}


def records(progress: Mapping[str, Any]) -> list[BatchProgress]:
    """One record for each source of this package in a progress report of Spark.

    A source of several streams has one for each stream that the micro-batch read or that has a lag.

    Args:
        progress: an element of ``query.recentProgress``, or ``event.progress`` as a JSON object.
            Sources of other packages are skipped, and so are offsets that a newer version of this
            one wrote.
    """
    found: list[BatchProgress] = []
    for number, source in enumerate(progress["sources"]):
        starts, _ = positions(source["startOffset"])
        ends, filters = positions(source["endOffset"])
        newest, _ = positions(source["latestOffset"])
        ranges = {name: _range(starts.get(name), end) for name, end in ends.items()}
        read = [name for name, (first, last) in ranges.items() if last > first]
        for name, end in ends.items():
            behind, lag_seconds = lag(end, newest.get(name))
            if len(ends) > 1 and name not in read and not behind:
                continue
            first, last = ranges[name]
            rows = source["numInputRows"] if name in read or len(ends) == 1 else 0
            if name in read and len(read) > 1:
                rows = None
            found.append(
                BatchProgress(
                    query=progress["name"] or str(progress["id"]),
                    batch=progress["batchId"],
                    source=number,
                    stream=name,
                    start=first,
                    end=last,
                    rows=rows,
                    seconds=progress["durationMs"].get("triggerExecution", 0) / 1000,
                    lag=behind,
                    lag_seconds=lag_seconds,
                    compacted=None if filters or rows is None else max(0, last - first - rows),
                    initial=first < min(end.initial_through, last),
                    epoch=end.epoch,
                )
            )
    return found


def _range(start: Position | None, end: Position) -> tuple[int, int]:
    # Spark does not report a start for the first micro-batch; its end has the origin.
    return (end.origin, end.stream_seq) if start is None else range_between(start, end)


def watch_progress(
    spark: SparkSession | StreamingQuery,
    callback: Callable[[BatchProgress], None] | None = None,
    *,
    prometheus: int | str | None = None,
    opentelemetry: bool = False,
) -> StreamingQueryListener:
    """Log a line for every micro-batch, pass its records to ``callback``, and export metrics.

    The lines are of level ``info``, by the logger ``nats_stream_source.progress``. Works with a
    session in this process and over Spark Connect, where the callback also runs in this process, in
    a thread of Spark. Spark reports an exception of the callback, and the query continues.

    Metrics: see :mod:`nats_stream_source.metrics.table`. Queries that name the same port share its
    endpoint, which serves until the process ends. Metrics of micro-batches that have already ended
    are those that Spark still has (100 for each query). An endpoint that cannot listen, and a value
    that cannot be recorded, are warnings.

    Args:
        spark: a session, for all its queries, or one query.
        prometheus: port, or ``"host:port"``, of an HTTP endpoint that Prometheus scrapes
            (``/metrics``); 0 for a free port, which the log has.
        opentelemetry: also report to the global meter provider of OpenTelemetry.

    Returns:
        The listener, already added; ``spark.streams.removeListener`` removes it.

    Raises:
        ConfigurationError: ``prometheus`` is not an address.
        MissingPackageError: Spark is not installed; or metrics are asked for, and a package of the
            extra ``metrics`` is not installed.
    """
    return add_listener(spark, callback, start_metrics(prometheus, opentelemetry))


def add_listener(
    spark: SparkSession | StreamingQuery,
    callback: Callable[[BatchProgress], None] | None,
    metrics: ProgressMetrics | None,
    *,
    lines: bool = True,
) -> StreamingQueryListener:
    """As :func:`watch_progress`, with what :func:`start_metrics` has returned.

    Args:
        lines: whether to log a line for every micro-batch.
    """
    with needs_extra("spark"):
        from pyspark.sql.streaming.listener import StreamingQueryListener

    session, query = _session_and_query(spark)
    wanted = None if query is None else str(query.id)

    def is_active(query_id: str, run_id: str) -> bool:
        active = session.streams.get(query_id)
        return active is not None and str(active.runId) == run_id and active.isActive

    def feed(event: Any, record: Callable[[ProgressMetrics], None]) -> None:
        if metrics is not None and wanted in (None, str(event.id)):
            with metrics.fed():
                record(metrics)

    class Progress(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:
            run = str(event.id), str(event.runId)
            feed(event, lambda metrics: metrics.started(*run, event.name, is_active))

        def onQueryProgress(self, event: Any) -> None:
            report = json.loads(event.progress.json)
            feed(event.progress, lambda metrics: metrics.progress(report))
            for record in records(report) if wanted in (None, report["id"]) else ():
                if lines:
                    log.info("micro-batch", **record.fields())  # type: ignore[arg-type]
                if callback is not None:
                    callback(record)

        def onQueryIdle(self, event: Any) -> None:
            feed(event, lambda metrics: metrics.idle(str(event.id), str(event.runId)))

        def onQueryTerminated(self, event: Any) -> None:
            run, failed = (str(event.id), str(event.runId)), event.exception is not None
            feed(event, lambda metrics: metrics.terminated(*run, failed=failed))

    listener = Progress()
    if metrics is None:
        session.streams.addListener(listener)
        return listener
    with metrics.fed():
        # Events wait meanwhile, so that those of the past come first.
        session.streams.addListener(listener)
        for one in session.streams.active if query is None else [query]:
            _replay(one, metrics, is_active)
    return listener


def start_metrics(prometheus: int | str | None, opentelemetry: bool) -> ProgressMetrics | None:
    """What listeners pass events to; None if no metrics are asked for."""
    if prometheus is None and not opentelemetry:
        return None
    # Imported here: the package of the extra is only required for metrics.
    from nats_stream_source.metrics.recorder import start_exporters
    from nats_stream_source.spark.progress_metrics import progress_metrics
    from nats_stream_source.spark.task_counts import pass_on_task_counts

    recorder, _ = start_exporters(prometheus, opentelemetry)
    recorder.pull(pass_on_task_counts)
    return progress_metrics(recorder)


def _session_and_query(
    watched: SparkSession | StreamingQuery,
) -> tuple[SparkSession, StreamingQuery | None]:
    """The session to add a listener to, and the one query to watch, if it is only one."""
    from pyspark.sql import SparkSession

    # The classes of Spark Connect are others, with the same attributes.
    if hasattr(watched, "streams"):
        return cast(SparkSession, watched), None
    if (session := getattr(watched, "_session", None)) is not None:
        return session, watched
    context = SparkSession.active().sparkContext
    return SparkSession(context, watched._jsq.sparkSession()), watched


def _replay(query: StreamingQuery, metrics: ProgressMetrics, is_active: IsActive) -> None:
    """Record what a query has reported before its listener was added."""
    query_id, run_id = str(query.id), str(query.runId)
    metrics.started(query_id, run_id, query.name, is_active)
    for progress in query.recentProgress:
        metrics.progress(progress)
    if not query.isActive:
        metrics.terminated(query_id, run_id, failed=query.exception() is not None)
