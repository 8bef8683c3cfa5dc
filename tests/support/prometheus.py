"""A Prometheus on a free port, and what an endpoint serves, parsed by Prometheus's client."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from nats_stream_source.embedded import free_port
from nats_stream_source.metrics import recorder
from nats_stream_source.metrics.table import PREFIX
from tests.support.paths import ROOT
from tests.support.wait import wait_until

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
    while recorder._servers:
        server, thread = recorder._servers.popitem()[1]
        server.shutdown()
        server.server_close()
        thread.join()


MONITORING = ROOT / "examples" / "monitoring"
DASHBOARD = MONITORING / "nats-stream-source.json"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed (Debian's package 'prometheus')",
)


def panel_queries() -> dict[str, str]:
    """The queries of the dashboard, by panel and legend."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in panels
        for target in panel.get("targets", [])
    }


def rules() -> list[dict[str, str]]:
    """The recording and alerting rules."""
    (group,) = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return list(group["rules"])


class Prometheus:
    """A server with its files in a directory, as a context manager.

    Args:
        target: the port that is scraped, each second.
        seconds: what the rules' limits of 60 seconds are here.
    """

    def __init__(self, directory: Path, target: int, seconds: int) -> None:
        self._directory = directory
        directory.mkdir()
        rules = (MONITORING / "rules.yml").read_text()
        rules, count = re.subn(r"> 60\b", f"> {seconds}", rules)
        assert count == 3
        (directory / "rules.yml").write_text(rules)
        config = (MONITORING / "prometheus.yml").read_text()
        config = config.replace("localhost:9464", f"127.0.0.1:{target}").replace(": 5s", ": 1s")
        (directory / "prometheus.yml").write_text(config)
        self.url = f"http://127.0.0.1:{free_port()}"

    def __enter__(self) -> Prometheus:
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._directory / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._directory / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
            )
        wait_until(self._is_ready, "Prometheus to be ready", 60, alive=self._verify_alive)
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def get(self, path: str, **parameters: str) -> Any:
        """The data of a response of the API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as response:
            return json.load(response)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now."""
        result: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return result

    def firing(self, query: str) -> set[str]:
        """The names of the alerts that fire for a query, by its label.

        The process of the tests also exports the queries of tests before.
        """
        alerts = self.get("alerts")["alerts"]
        return {
            one["labels"]["alertname"]
            for one in alerts
            if one["state"] == "firing" and one["labels"].get("query") == query
        }

    def rules(self) -> list[dict[str, Any]]:
        """The rules with their last evaluation."""
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def _is_ready(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/-/ready", timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def _verify_alive(self) -> None:
        assert self._process.poll() is None, (self._directory / "log").read_text()
