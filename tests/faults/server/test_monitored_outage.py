"""The panels and the alerts of ``examples/monitoring`` in an outage, with a real Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source import register
from nats_stream_source.delta import follow
from nats_stream_source.embedded import NatsServer, free_port
from tests.integration.delta.kv_bucket import Bucket
from tests.support.prometheus import Prometheus, needs_prometheus, panel_queries, rules
from tests.support.scrape import close_endpoints
from tests.support.spark.streaming_query import begin, report_each_second
from tests.support.wait import wait_until

_SILENT = 8  # seconds without a report; an idle query reports each second in these tests


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
def test_prometheus_has_data_for_each_panel_and_alert_fires_in_outage(
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
        stack.callback(close_endpoints)
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
