"""A cluster without a majority while a query runs: the stream has no leader (``outageTimeout``)."""

from __future__ import annotations

import threading

import pytest

from nats_stream_source.options import kv_options
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.nats.cluster import Cluster
from tests.support.query_driver.driver import QueryDriver

pytestmark = pytest.mark.faults

AWAY = 15.0
"""Seconds; servers notice after 10 that the majority is lost."""


def test_majority_missing_while_query_runs(cluster: Cluster) -> None:
    url = cluster.url
    create_bucket(url, "b", 64, num_replicas=3)
    cluster.wait_ready("KV_b")
    put_many(url, "b", ((f"k{i}", b"x") for i in range(500)))
    others = [server for server in cluster.servers.values() if server.url != url]
    given = {"servers": url, "bucket": "b", "includeHistory": "true"}
    options = kv_options({**given, "connectTimeout": "0.5", "requestTimeout": "0.5"})
    driver = QueryDriver(options, outage_timeout=120)
    try:
        start = driver.initial_offset()
        end = driver.latest_offset(start)
        (partition,) = driver.partitions(start, end)
        for server in others:
            server.kill()
        back = threading.Timer(AWAY, lambda: [server.start() for server in others])
        back.start()
        found = [
            revision
            for batch in driver.read_task(partition)
            for revision in batch.column("revision").to_pylist()
        ]
        assert found == list(range(1, 501))
        assert driver.latest_offset(end) == end
        back.join()
    finally:
        driver.close()
