"""The values of the metrics in the driver's process.

One recorder exists for the process: merges, listeners and endpoints of all queries
share it. A failure to record is logged once and never reaches the query.

**Queries.** The label ``query`` is the query's name, or its id if it does not have a name. Spark
allows one name in two sessions of a process; the second query's label then has its id too.

**After the end** of a query, which an event or Spark at a scrape reports, its gauges are removed,
except ``query_active``, which is 0. Its counters and histograms stay, so that a scrape after the
end still finds the totals; they are removed when :data:`_KEPT` more queries have ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nats_stream_source.extras import needs_extra
from nats_stream_source.logs import field_logger
from nats_stream_source.metrics.counts import Counts
from nats_stream_source.metrics.table import (
    ACTIVE,
    AVG_BEHIND,
    BYTES_BEHIND,
    MAX_BEHIND,
    METRICS,
    MIN_BEHIND,
    OFFSETS_BEHIND,
    SECONDS_BEHIND,
    TOTAL_BYTES_BEHIND,
    Metric,
)

with needs_extra("metrics"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

_KEPT = 32
"""Queries whose counters are kept after their end."""

_WAITING = 1000

log = field_logger("nats_stream_source.metrics")

Observer = Callable[[Metric, float, dict[str, str]], None]


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a source is behind the end of a stream; None where unknown."""

    rows: int | None = None
    seconds: float | None = None
    nbytes: int | None = None


class Recorder:
    """The values by metric and labels; safe for several threads.

    Attributes:
        observers: called with each value of a histogram.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        for metric in METRICS.values():
            arguments: dict[str, Any] = {"registry": self._registry}
            if metric.kind == "histogram":
                arguments["buckets"] = metric.buckets
            kind = {"gauge": Gauge, "counter": Counter, "histogram": Histogram}[metric.kind]
            labels = ("query", *metric.labels)
            self._metrics[metric.name] = kind(metric.full_name, metric.help, labels, **arguments)
        self._lock = threading.Lock()
        self._labels: dict[str, str] = {}  # the label of each query, by its id
        self._running: dict[str, str] = {}  # the run of each running query
        self._ended: deque[str] = deque()
        self._waiting: deque[tuple[str, Callable[[str], None]]] = deque(maxlen=_WAITING)
        self._pulls: list[Callable[[], None]] = []
        self._warned = False
        self.observers: list[Observer] = []

    def label(self, query_id: str) -> str | None:
        """The label of a query; None if it is not watched, or not yet."""
        return self._labels.get(query_id)

    def begin(self, query_id: str, run_id: str, name: str | None) -> str:
        """A watched query runs; returns its label."""
        with self._lock:
            if self._running.get(query_id) == run_id:
                return self._labels[query_id]
            if query_id not in self._labels:
                self._labels[query_id] = self._new_label(query_id, name)
            self._running[query_id] = run_id
            if query_id in self._ended:
                self._ended.remove(query_id)
            label = self._labels[query_id]
            waiting = [work for one, work in self._waiting if one == query_id]
            self._waiting = deque(
                (one for one in self._waiting if one[0] != query_id), maxlen=_WAITING
            )
        self.set(ACTIVE, 1, label)
        # From 0 on, Prometheus sees the first event as an increase.
        for metric in METRICS.values():
            if metric.labels == ("process",):
                for process in ("planner", "executor"):
                    self.add(metric, 0, label, process)
        for work in waiting:
            work(label)
        return label

    def when_watched(self, query_id: str, work: Callable[[str], None]) -> None:
        """Call ``work`` with the query's label, now or when the query begins to be watched.

        A listener is added to a query that runs already, whose first merge may come before.
        """
        with self._lock:
            label = self._labels.get(query_id)
            if label is None:
                self._waiting.append((query_id, work))
        if label is not None:
            work(label)

    def end(self, query_id: str, run_id: str) -> None:
        """A run has ended: remove its gauges, and what is left of queries that ended long ago."""
        with self._lock:
            if self._running.get(query_id) != run_id:
                return  # the query was started again
            del self._running[query_id]
            label = self._labels[query_id]
            self._ended.append(query_id)
            old = self._ended.popleft() if len(self._ended) > _KEPT else None
            forgotten = self._labels.pop(old) if old is not None else None
        self._remove_gauges(label)
        if forgotten is not None:
            for one in self._metrics.values():
                one.remove_by_labels({"query": forgotten})

    def set_inactive(self, query_id: str, run_id: str) -> None:
        """A run is not active any more: remove its gauges; :meth:`end` follows, or is lost."""
        with self._lock:
            if self._running.get(query_id) == run_id:
                self._remove_gauges(self._labels[query_id])

    def _remove_gauges(self, label: str) -> None:
        for metric in METRICS.values():
            if metric.kind == "gauge":
                self._metrics[metric.name].remove_by_labels({"query": label})
        self.set(ACTIVE, 0, label)

    def _new_label(self, query_id: str, name: str | None) -> str:
        label = name or query_id
        if label in (self._labels[other] for other in self._running):
            label = f"{label} {query_id[:8]}"
            log.warning(
                "two queries have one name, metrics of the second have its id too",
                query=name,
                label=label,
            )
        return label

    def set(self, metric: Metric, value: float, query: str, *labels: str) -> None:
        """Set a gauge."""
        self._metrics[metric.name].labels(query, *labels).set(value)

    def set_lags(self, query: str, source: str, lags: Mapping[str, Lag]) -> None:
        """Set the lag of a source, by stream and of all its streams."""
        for stream, behind in lags.items():
            for metric, value in (
                (OFFSETS_BEHIND, behind.rows),
                (SECONDS_BEHIND, behind.seconds),
                (BYTES_BEHIND, behind.nbytes),
            ):
                if value is not None:
                    self.set(metric, value, query, source, stream)
                else:
                    with contextlib.suppress(KeyError):
                        self._metrics[metric.name].remove(query, source, stream)
        rows = [one.rows for one in lags.values() if one.rows is not None]
        if rows:
            self.set(MIN_BEHIND, min(rows), query, source)
            self.set(MAX_BEHIND, max(rows), query, source)
            self.set(AVG_BEHIND, sum(rows) / len(rows), query, source)
            total = sum(one.nbytes or 0 for one in lags.values())
            self.set(TOTAL_BYTES_BEHIND, total, query, source)

    def add(self, metric: Metric, amount: float, query: str, *labels: str) -> None:
        """Add to a counter."""
        self._metrics[metric.name].labels(query, *labels).inc(amount)

    def observe(self, metric: Metric, value: float, query: str, *labels: str) -> None:
        """Add a value to a histogram."""
        self._metrics[metric.name].labels(query, *labels).observe(value)
        named = dict(zip(("query", *metric.labels), (query, *labels), strict=True))
        for observer in self.observers:
            observer(metric, value, named)

    def add_counts(self, counts: Counts, query: str, process: str) -> None:
        """Add the counts of another process.

        Args:
            process: ``planner`` or ``executor``.
        """
        for (name, *labels), amount in counts.items():
            # A worker of another version may count what this one lacks.
            if (metric := METRICS.get(name)) is not None:
                last = (process,) if "process" in metric.labels else ()
                self.add(metric, amount, query, *labels, *last)

    def pull(self, source: Callable[[], None]) -> None:
        """Call ``source`` before the values are read; once, however often it is added."""
        if source not in self._pulls:
            self._pulls.append(source)

    def values(self, metric: Metric) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of each series of a gauge or counter."""
        self._refresh()
        for family in self._metrics[metric.name].collect():
            for sample in family.samples:
                if sample.name == metric.full_name:
                    yield sample.labels, sample.value

    def collect(self) -> Iterator[Family]:
        """The values, as Prometheus's client passes them to an exporter."""
        self._refresh()
        for family in self._registry.collect():
            # The times at which counters were created would double the series.
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            if family.samples:
                yield family

    def text(self) -> str:
        """The values in Prometheus's text format."""
        return generate_latest(self).decode()

    def _refresh(self) -> None:
        for source in self._pulls:
            with self.guarded():
                source()

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Log the first failure of the block instead of raising it."""
        try:
            yield
        except Exception as error:  # a metric is not worth the end of a query
            if not self._warned:
                self._warned = True
                log.warning("metrics could not be recorded", error=repr(error), exc_info=True)
