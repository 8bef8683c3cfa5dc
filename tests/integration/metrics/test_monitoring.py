"""The dashboard, the rules and the alerts of ``examples/monitoring``, with a real Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source import register
from nats_stream_source.delta import follow
from nats_stream_source.embedded import NatsServer, free_port
from nats_stream_source.metrics import exporters
from nats_stream_source.metrics.table import METRICS, PREFIX
from tests.integration.delta.kv_bucket import Bucket
from tests.support.paths import ROOT
from tests.support.prometheus import MONITORING, Prometheus, needs_prometheus
from tests.support.spark.streaming_query import begin, report_each_second
from tests.support.wait import wait_until

DASHBOARD = MONITORING / "nats-stream-source.json"
_SILENT = 8  # seconds without a report; an idle query reports each second in these tests


def panel_queries() -> dict[str, str]:
    """The queries of the dashboard, by panel and legend."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in panels
        for target in panel.get("targets", [])
    }


def rules() -> list[dict[str, str]]:
    (group,) = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return list(group["rules"])


def test_dashboard_is_written_by_its_script() -> None:
    script = MONITORING / "dashboard.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == DASHBOARD.read_text()


def test_dashboard_and_rules_name_metrics_of_the_table() -> None:
    names = {one.full_name: one.kind for one in METRICS.values()}
    suffixes = {"counter": {""}, "gauge": {""}, "histogram": {"_bucket", "_sum", "_count"}}
    known = {name + suffix for name, kind in names.items() for suffix in suffixes[kind]}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    expressions = [*panel_queries().values(), *(rule["expr"] for rule in rules())]
    for expression in expressions:
        used = set(re.findall(rf"(?<![:\w]){PREFIX}\w+", expression))
        assert used <= known, expression
        assert set(re.findall(r"\w+:\w+(?::\w+)?", expression)) <= recorded


@needs_prometheus
def test_rules_of_promtool() -> None:
    command = ["promtool", "test", "rules", "rules_test.yml"]
    done = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = set(re.findall(r"alertname: (\w+)", (MONITORING / "rules_test.yml").read_text()))
    assert tested == {rule["alert"] for rule in rules() if "alert" in rule}


@contextmanager
def written(bucket: Bucket) -> Iterator[None]:
    """Write to a bucket for the time of the block."""
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.wait(0.2):
            bucket.write((f"k{number % 20}", "PUT"))
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@needs_prometheus
def test_prometheus_has_data_for_each_panel_and_an_alert_fires_in_an_outage(
    spark: SparkSession, nats_server: NatsServer, tmp_path: Path
) -> None:
    register(spark, check=False)
    bucket, table, port = Bucket(nats_server.url, "fleet").create(), tmp_path / "fleet", free_port()
    source = spark.readStream.format("nats_kv").options(servers=bucket.url, bucket=bucket.name)

    def start() -> StreamingQuery:
        return follow(
            source.load(),
            str(table),
            checkpoint=f"{table}-checkpoint",
            prometheus=f"127.0.0.1:{port}",
        )

    with ExitStack() as stack:
        stack.callback(exporters.close_endpoints)
        stack.enter_context(report_each_second(spark))
        query = begin(start)
        stack.callback(query.stop)
        prometheus = stack.enter_context(Prometheus(tmp_path / "prometheus", port, _SILENT))

        def firing() -> set[str]:
            return prometheus.firing(str(query.id))

        with written(bucket):
            wait_for_data(prometheus)
        assert "NatsQuerySilent" not in firing()
        nats_server.terminate()
        wait_until(lambda: "NatsQuerySilent" in firing(), "the alert", 120)
        nats_server.start()
        wait_until(lambda: "NatsQuerySilent" not in firing(), "its end", 120)
        assert query.isActive, query.exception()


def wait_for_data(prometheus: Prometheus) -> None:
    """Wait until each query of a panel and each recording rule returns data."""
    wanted = {
        title: expression.replace("$query", ".*").replace("$__rate_interval", "30s")
        for title, expression in panel_queries().items()
    }
    wanted |= {rule["record"]: rule["record"] for rule in rules() if "record" in rule}
    wanted |= {"the target": 'up{job="nats-stream-source"} == 1'}

    def missing() -> list[str]:
        return [title for title, expression in wanted.items() if not prometheus.query(expression)]

    try:
        wait_until(lambda: not missing(), "data for each panel", 180)
    except AssertionError as error:
        pytest.fail(f"{error}: {missing()}")
    assert {rule["health"] for rule in prometheus.rules()} == {"ok"}


def test_configuration_names_the_port_of_the_documentation() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:9464"]}]
    assert "prometheus=9464" in (ROOT / "docs" / "operations.md").read_text()
