"""The values of the metrics in the driver's process.

One recorder exists for the process: merges, listeners and endpoints of all queries
share it. A failure to record is logged once and never reaches the query.

**Queries.** The label ``query`` is the query's name, or its id if it does not have a name. Spark
allows one name in two sessions of a process; the second query's label then has its id too.

**After the end** of a query, which an event or Spark at a scrape reports, its gauges are removed,
except ``query_active``, which is 0. Its counters and histograms stay, so that a scrape after the
end still finds the totals; they are removed when :data:`_KEPT` more queries have ended.

**Exporters** are of the process too: an endpoint that Prometheus scrapes, and instruments of
OpenTelemetry. Queries that name the same port share its endpoint, which serves until the process
ends. An endpoint that cannot listen is a warning.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from nats_stream_source.errors import ConfigurationError, needs_extra
from nats_stream_source.logs import field_logger
from nats_stream_source.metrics import start_recorder
from nats_stream_source.metrics.table import (
    ACTIVE,
    AVG_BEHIND,
    BYTES_BEHIND,
    MAX_BEHIND,
    METRICS,
    MIN_BEHIND,
    OFFSETS_BEHIND,
    PREFIX,
    SECONDS_BEHIND,
    TOTAL_BYTES_BEHIND,
    Counts,
    Metric,
)

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions
    from prometheus_client.metrics_core import Metric as Family

with needs_extra("metrics"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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
        self._inactive: set[str] = set()  # labels; the last events of a run can follow its end
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
            self._inactive.discard(label)
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
            self._inactive.discard(forgotten)
            for one in self._metrics.values():
                one.remove_by_labels({"query": forgotten})

    def set_inactive(self, query_id: str, run_id: str) -> None:
        """A run is not active any more: remove its gauges; :meth:`end` follows, or is lost."""
        with self._lock:
            if self._running.get(query_id) == run_id:
                self._remove_gauges(self._labels[query_id])

    def _remove_gauges(self, label: str) -> None:
        self._inactive.add(label)
        for metric in METRICS.values():
            if metric.kind == "gauge":
                self._metrics[metric.name].remove_by_labels({"query": label})
        self._metrics[ACTIVE.name].labels(label).set(0)

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
        """Set a gauge; nothing happens for a run that has ended."""
        with self._lock:
            if query not in self._inactive:
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
        """Add the counts of another process, the ``planner`` or an ``executor``."""
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


_ALL_INTERFACES = "0.0.0.0"
_ADDRESS = re.compile(r"(?:(\[[^]]+\]|[^]:[]+):)?(\d{1,5})", re.ASCII)
_UNITS = {"seconds": "s", "bytes": "By", "": "1"}

_lock = threading.Lock()
_servers: dict[tuple[str, int], tuple[WSGIServer, threading.Thread]] = {}
_instrumented = False


def start_exporters(
    prometheus: int | str | None, opentelemetry: bool
) -> tuple[Recorder, str | None]:
    """Start the exporters that do not run yet.

    Args:
        prometheus: the port of the endpoint, or ``"host:port"``; None for no endpoint.
        opentelemetry: whether values also go to OpenTelemetry's global meter provider.

    Returns:
        The recorder of this process; host and port of the endpoint, None if it could not listen.

    Raises:
        ConfigurationError: ``prometheus`` is neither a port nor ``"host:port"``.
        MissingPackageError: a package of the extra ``metrics`` is not installed.
    """
    match = None
    if prometheus is not None:
        match = _ADDRESS.fullmatch(str(prometheus))
        if match is None or isinstance(prometheus, bool) or int(match[2]) > 65535:
            raise ConfigurationError(
                f"invalid argument: prometheus is {prometheus!r}, expected a port from 0 to 65535, "
                f"or 'host:port'"
            )
    recorder = start_recorder()
    if opentelemetry:
        _instrument(recorder)
    if match is None:
        return recorder, None
    return recorder, _listen(recorder, (match[1] or _ALL_INTERFACES).strip("[]"), int(match[2]))


def _listen(recorder: Recorder, host: str, port: int) -> str | None:
    from prometheus_client import start_http_server

    with _lock:
        if (host, port) not in _servers:
            try:
                server, thread = start_http_server(port, host, recorder)
            except OSError as error:
                log.warning(
                    "the endpoint for Prometheus could not listen, the query runs without it",
                    address=f"{host}:{port}",
                    error=error,
                    action="free the port or use another one",
                )
                return None
            _servers[host, port] = server, thread
            log.info("metrics are served", address=f"{host}:{server.server_port}", path="/metrics")
        server, _ = _servers[host, port]
    return f"{server.server_name}:{server.server_port}"


def _instrument(recorder: Recorder) -> None:
    """Create instruments that read the recorder; histograms are passed on value by value."""
    global _instrumented
    with needs_extra("metrics"):
        from opentelemetry.metrics import Observation, get_meter

    with _lock:
        if _instrumented:
            return
        _instrumented = True

    def read(metric: Metric, options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, labels) for labels, value in recorder.values(metric)]

    meter = get_meter("nats_stream_source")
    histograms: dict[str, Any] = {}
    for metric in METRICS.values():
        name = PREFIX.rstrip("_") + "." + metric.name
        unit = _UNITS.get(metric.unit, f"{{{metric.unit}}}")
        if metric.kind == "histogram":
            histograms[metric.name] = meter.create_histogram(
                name, unit, metric.help, explicit_bucket_boundaries_advisory=list(metric.buckets)
            )
            continue
        gauge = metric.kind == "gauge"
        create = meter.create_observable_gauge if gauge else meter.create_observable_counter
        create(name, [partial(read, metric)], unit, metric.help)

    def observe(metric: Metric, value: float, labels: dict[str, str]) -> None:
        histograms[metric.name].record(value, labels)

    recorder.observers.append(observe)
