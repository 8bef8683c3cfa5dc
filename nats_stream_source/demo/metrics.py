"""Where the demo serves the metrics of its queries, and what they count."""

from __future__ import annotations

import socket
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from nats_stream_source.embedded import free_port
from nats_stream_source.metrics.table import INPUT_ROWS, PREFIX

HOST = "127.0.0.1"
USUAL_PORT = 9464  # of examples/monitoring/prometheus.yml


def metrics_port() -> int:
    """The usual port, or a free one if it is in use."""
    try:
        socket.create_server((HOST, USUAL_PORT)).close()
    except OSError:
        return free_port()
    return USUAL_PORT


def counted_rows(port: int, query: str) -> int:
    """The rows that a query has read, by its metrics."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    return sum(
        int(sample.value)
        for family in families
        if family.name == PREFIX + INPUT_ROWS.name
        for sample in family.samples
        if sample.labels["query"] == query
    )
