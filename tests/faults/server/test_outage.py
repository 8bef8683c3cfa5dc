"""Servers that are away for longer than ``connectTimeout`` under a query (``outageTimeout``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats.errors
import pytest
from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConnectError, NatsSourceError
from nats_stream_source.options import kv_options
from tests.support.nats.buckets import api, create_bucket, put_many
from tests.support.nats.cluster import Cluster
from tests.support.query_driver.driver import QueryDriver
from tests.support.spark.streaming_query import begin
from tests.support.wait import wait_until

SHORT = {"connectTimeout": "0.5", "requestTimeout": "0.5"}
AWAY = 3.0
"""Seconds; more than all attempts of ``connectTimeout`` take."""

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


def options(url: str, **more: str) -> Any:
    given = {"servers": url, "bucket": "b", "includeHistory": "true", **SHORT, **more}
    return kv_options(given)


def read(driver: QueryDriver, start: Any, end: Any) -> list[int]:
    return [
        revision
        for partition in driver.partitions(start, end)
        for batch in driver.read_task(partition)
        for revision in batch.column("revision").to_pylist()
    ]


@pytest.mark.parametrize("how", LEAVE)
def test_outage_between_micro_batches(nats_server: NatsServer, how: str) -> None:
    create_bucket(nats_server.url, "b", 64)
    fill(nats_server.url, 0, 500)
    driver = QueryDriver(options(nats_server.url), outage_timeout=60)
    try:
        start = driver.initial_offset()
        end = driver.latest_offset(start)
        assert read(driver, start, end) == list(range(1, 501))
        fill(nats_server.url, 500, 500)
        away = Away(nats_server, how)
        last = driver.latest_offset(end)
        away.check()
        away = Away(nats_server, how)
        assert read(driver, end, last) == list(range(501, 1001))
        away.check()
    finally:
        driver.close()


@pytest.mark.parametrize("how", LEAVE)
def test_outage_while_split_is_read(nats_server: NatsServer, how: str) -> None:
    """Its reader has been connected, so it waits also in the first micro-batch."""
    count = 20_000
    create_bucket(nats_server.url, "b", 64)
    put_many(nats_server.url, "b", ((f"k{i}", b"x" * 1500) for i in range(count)))
    driver = QueryDriver(options(nats_server.url), outage_timeout=60)
    try:
        start = driver.initial_offset()
        (partition,) = driver.partitions(start, driver.latest_offset(start))
        batches = driver.read_task(partition)
        found = next(batches).column("revision").to_pylist()
        away = Away(nats_server, how)
        for batch in batches:
            found += batch.column("revision").to_pylist()
        away.check()
        assert found == list(range(1, count + 1))
    finally:
        driver.close()


def test_outage_longer_than_timeout(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", 64)
    fill(nats_server.url, 0, 10)
    driver = QueryDriver(options(nats_server.url), outage_timeout=2)
    try:
        start = driver.initial_offset()
        end = driver.latest_offset(start)
        (partition,) = driver.partitions(start, end)
        nats_server.kill()
        with pytest.raises(ConnectError, match="connection refused"):
            driver.latest_offset(end)
        with pytest.raises(NatsSourceError):
            list(driver.read_task(partition))
    finally:
        driver.close()


def test_wrong_address_fails_at_start() -> None:
    driver = QueryDriver(options("nats://127.0.0.1:1"), outage_timeout=3600)
    try:
        with pytest.raises(ConnectError, match="connection refused"):
            driver.initial_offset()
    finally:
        driver.close()


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


def test_query_of_several_buckets_waits_for_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of two has three replicas and loses its majority."""
    with Cluster(3) as cluster:
        create_bucket(cluster.url, "a", 64)
        create_bucket(cluster.url, "b", 64, num_replicas=3)
        leader = cluster.leader_of("KV_b")
        followers = cluster.followers_of("KV_b")
        given = {"servers": leader.url, "bucketPattern": "a|b", "includeHistory": "true", **SHORT}
        driver = QueryDriver(kv_options(given), outage_timeout=120)
        try:
            fill(leader.url, 0, 50)
            start = driver.initial_offset()
            end = driver.latest_offset(start)
            assert read(driver, start, end) == list(range(1, 51))
            fill(leader.url, 50, 50)
            for follower in followers:
                follower.kill()
            # The leader responds as before until it steps down.
            wait_until(lambda: not has_leader(leader.url, "KV_b"), "the leader to step down")
            returns = threading.Timer(AWAY, lambda: [one.start() for one in followers])
            returns.start()
            began = time.monotonic()
            last = driver.latest_offset(end)
            while last == end:
                assert time.monotonic() - began < 120
                last = driver.latest_offset(end)
            returns.join()
            assert read(driver, end, last) == list(range(51, 101))
        finally:
            driver.close()
    assert "servers are away, waiting" in caplog.text


def has_leader(url: str, stream: str) -> bool:
    """Whether a server names the leader; without a majority, its response lacks the name."""
    try:
        return "leader" in api(url, f"STREAM.INFO.{stream}", timeout=1)["cluster"]
    except (nats.errors.TimeoutError, RuntimeError):
        return False
