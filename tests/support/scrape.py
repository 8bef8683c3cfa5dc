"""What an endpoint for Prometheus serves, parsed by Prometheus's own client."""

from __future__ import annotations

import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from nats_stream_source.metrics import exporters
from nats_stream_source.metrics.table import PREFIX

Samples = dict[str, list[tuple[dict[str, str], float]]]


def parsed(text: str) -> Samples:
    """Labels and value of each sample, by name without the prefix."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.name.startswith(PREFIX)
            name = sample.name.removeprefix(PREFIX)
            samples.setdefault(name, []).append((sample.labels, sample.value))
    return samples


def scrape(port: int) -> Samples:
    """The samples of the endpoint of this machine."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        return parsed(response.read().decode())


def value(samples: Samples, name: str, **labels: Any) -> float | None:
    """The sum of the samples with these labels; None without one."""
    wanted = {label: str(one) for label, one in labels.items()}
    found = [one for have, one in samples.get(name, []) if wanted.items() <= have.items()]
    return sum(found) if found else None


def close_endpoints() -> None:
    """Close the endpoints of this process."""
    while exporters._servers:
        server, thread = exporters._servers.popitem()[1]
        server.shutdown()
        server.server_close()
        thread.join()
