"""Where the values go: an endpoint that Prometheus scrapes, and instruments of OpenTelemetry.

Both are of the process: queries that name the same port share its endpoint, which serves until the
process ends. An endpoint that cannot listen is a warning.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.extras import needs_extra
from nats_stream_source.logs import field_logger
from nats_stream_source.metrics import start_recorder
from nats_stream_source.metrics.recorder import Recorder
from nats_stream_source.metrics.table import METRICS, PREFIX, Metric

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions

log = field_logger("nats_stream_source.metrics")

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
