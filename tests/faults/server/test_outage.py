"""Servers away for longer than ``connectTimeout`` (``outageTimeout``), and how it is monitored."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source import register
from nats_stream_source.delta import follow
from nats_stream_source.embedded import NatsServer, free_port
from nats_stream_source.errors import ConnectError, NatsSourceError
from nats_stream_source.options import kv_options
from tests.integration.delta.merge_model import Bucket
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.nats.cluster import Cluster, leader_at
from tests.support.prometheus import (
    Prometheus,
    close_endpoints,
    needs_prometheus,
    panel_queries,
    rules,
)
from tests.support.query_driver.driver import MicroBatch, QueryDriver
from tests.support.spark.streaming_query import begin, report_each_second
from tests.support.wait import wait_until

SHORT = {"connectTimeout": "0.5", "requestTimeout": "0.5"}
AWAY = 3.0
"""Seconds; more than all attempts of ``connectTimeout`` take."""

NO_MAJORITY = 15.0
"""Seconds; servers notice after 10 that the majority is lost."""

LEAVE: dict[str, tuple[Callable[[NatsServer], Any], Callable[[NatsServer], Any]]] = {
    "killed": (NatsServer.kill, NatsServer.start),
    "paused": (NatsServer.pause, NatsServer.resume),
}


class Away:
    """Servers that leave, and come back after a while by themselves."""

    def __init__(self, server: NatsServer, how: str) -> None:
        leave, self._back = LEAVE[how]
        leave(server)
        self.since = time.monotonic()
        self._server = server
        self._timer = threading.Timer(AWAY, self._return)
        self._timer.start()

    def _return(self) -> None:
        self._back(self._server)

    def check(self) -> None:
        """Wait for the return; fails if that was not awaited before."""
        assert time.monotonic() - self.since >= AWAY
        self._timer.join()


def fill(url: str, first: int, count: int) -> None:
    put_many(url, "b", ((f"k{i % 50}", b"%d" % i) for i in range(first, first + count)))


def query_of(url: str, outage_timeout: float, **more: str) -> QueryDriver:
    given = {"servers": url, "bucket": "b", "includeHistory": "true", **SHORT, **more}
    return QueryDriver(kv_options(given), outage_timeout=outage_timeout)


def revisions(batch: MicroBatch) -> list[int]:
    return [row.seq for row in batch.rows]


@pytest.mark.parametrize("how", LEAVE)
def test_outage_between_micro_batches(nats_server: NatsServer, how: str) -> None:
    create_bucket(nats_server.url, "b", 64)
    fill(nats_server.url, 0, 500)
    with query_of(nats_server.url, 60) as query:
        assert query.plan()
        assert revisions(query.read()) == list(range(1, 501))
        fill(nats_server.url, 500, 500)
        away = Away(nats_server, how)
        assert query.plan()
        away.check()
        away = Away(nats_server, how)
        assert revisions(query.read()) == list(range(501, 1001))
        away.check()


@pytest.mark.parametrize("how", LEAVE)
def test_outage_while_split_is_read(nats_server: NatsServer, how: str) -> None:
    """Its reader has been connected, so it waits also in the first micro-batch."""
    count = 20_000
    create_bucket(nats_server.url, "b", 64)
    put_many(nats_server.url, "b", ((f"k{i}", b"x" * 1500) for i in range(count)))
    aways: list[Away] = []

    def leave(rows: int) -> None:
        if not aways:
            aways.append(Away(nats_server, how))

    with query_of(nats_server.url, 60) as query:
        assert query.plan()
        assert len(query.tasks) == 1
        found = revisions(query.read(leave))
        aways[0].check()
    assert found == list(range(1, count + 1))


def test_outage_longer_than_timeout(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", 64)
    fill(nats_server.url, 0, 10)
    with query_of(nats_server.url, 2) as query:
        assert query.plan()
        assert query.logged is not None
        nats_server.kill()
        with pytest.raises(ConnectError, match="connection refused"):
            query.latest_offset(query.logged)
        with pytest.raises(NatsSourceError):
            query.read()


def test_wrong_address_fails_at_start() -> None:
    with (
        query_of("nats://127.0.0.1:1", 3600) as query,
        pytest.raises(ConnectError, match="connection refused"),
    ):
        query.start()


def test_query_retries_while_unavailable_and_can_be_stopped(
    spark: SparkSession, nats_server: NatsServer, tmp_path: Path
) -> None:
    url = nats_server.url
    create_bucket(url, "b", 64)
    fill(url, 0, 100)
    rows = spark.readStream.format("nats_kv").options(servers=url, bucket="b", **SHORT)
    found: list[int] = []

    def collect(batch: DataFrame, _: int) -> None:
        found.extend(row.revision for row in batch.collect())

    writer = rows.option("includeHistory", True).load().writeStream.foreachBatch(collect)
    query = begin(writer.option("checkpointLocation", str(tmp_path)).start)
    try:
        wait_until(lambda: len(found) == 100, "the first micro-batch", deadline=600)
        away = Away(nats_server, "killed")
        wait_until(lambda: time.monotonic() - away.since > AWAY, "the outage is over")
        away.check()
        fill(url, 100, 100)
        wait_until(lambda: len(found) == 200, "the second micro-batch", deadline=600)
        assert found == list(range(1, 201))
        assert query.exception() is None
        nats_server.kill()
        time.sleep(1)  # longer than `connectTimeout`: the planner waits for the server now
        assert query.isActive
    finally:
        # While the server is away: `stop` does not wait for `outageTimeout`.
        stopping = threading.Thread(target=query.stop)
        stopping.start()
        stopping.join(60)
    assert not stopping.is_alive()


def test_query_of_several_buckets_waits_for_all(caplog: pytest.LogCaptureFixture) -> None:
    """One of two has three replicas and loses its majority."""
    with Cluster(3) as cluster:
        create_bucket(cluster.url, "a", 64)
        create_bucket(cluster.url, "b", 64, num_replicas=3)
        leader = cluster.leader_of("KV_b")
        followers = cluster.followers_of("KV_b")
        given = {"servers": leader.url, "bucketPattern": "a|b", "includeHistory": "true", **SHORT}
        with QueryDriver(kv_options(given), outage_timeout=120) as query:
            fill(leader.url, 0, 50)
            assert query.plan()
            assert revisions(query.read()) == list(range(1, 51))
            fill(leader.url, 50, 50)
            for follower in followers:
                follower.kill()
            # The leader responds as before until it steps down.
            wait_until(lambda: not leader_at(leader.url, "KV_b"), "the leader to step down")
            returns = threading.Timer(AWAY, lambda: [one.start() for one in followers])
            returns.start()
            wait_until(query.plan, "new entries", 120)
            returns.join()
            assert revisions(query.read()) == list(range(51, 101))
    assert "servers are away, waiting" in caplog.text


@pytest.mark.faults
def test_majority_missing_while_query_runs() -> None:
    """The stream has no leader."""
    with Cluster() as cluster:
        url = cluster.url
        create_bucket(url, "b", 64, num_replicas=3)
        cluster.wait_ready("KV_b")
        fill(url, 0, 500)
        with query_of(url, 120) as query:
            assert query.plan()
            others = [server for server in cluster.servers.values() if server.url != url]
            for server in others:
                server.kill()
            back = threading.Timer(NO_MAJORITY, lambda: [server.start() for server in others])
            back.start()
            assert revisions(query.read()) == list(range(1, 501))
            assert not query.plan()
            back.join()


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
