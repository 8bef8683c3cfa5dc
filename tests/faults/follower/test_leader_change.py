"""The stream leader steps down and is killed while the command `follow` runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.followed import Query
from tests.support.follower import MixedWriter, follow_once, following, positions
from tests.support.nats import buckets
from tests.support.nats.cluster import Cluster

pytestmark = pytest.mark.faults

QUERIES = {
    "values": Query({"bucket": "b"}),
    "history": Query({"bucket": "b"}, {"stored_as_scd_type": 2}),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.mark.parametrize("kind", QUERIES)
def test_stream_leader_changes(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    query, table, stream = QUERIES[kind], tmp_path / "table", f"KV_{kind}"
    words = ["--history"] if query.has_history else []
    query = Query({"bucket": kind}, query.arguments)
    urls = ",".join(cluster.urls)
    buckets.create_bucket(cluster.url, kind, 64 if query.has_history else 1, num_replicas=3)
    cluster.wait_ready(stream)
    writer = MixedWriter(cluster.url, kind, random.Random(1))
    writer.write(50)
    with following(urls, kind, table, "--commit-interval", "0", *words) as follower:
        follower.wait_for_commits()
        leaders = [cluster.leader_of(stream)]
        for _ in range(4):
            writer.write(100)
            leaders.append(cluster.step_down(stream))
            cluster.wait_ready(stream)
            writer.write(100)
            follower.wait_for_rows(writer, query)
        assert all(one is not other for one, other in itertools.pairwise(leaders))
        # A killed leader, which is not the server that the writer uses.
        leader = cluster.move_leader(stream, cluster.servers["n1"])
        writer.write(100)
        leader.kill()
        cluster.wait_writable(cluster.url, f"$KV.{kind}.>")
        assert cluster.leader_of(stream) is not leader
        writer.write(100)
        follower.wait_for_rows(writer, query)
        leader.start()
        cluster.wait_ready(stream)
        writer.write(50)
        follower.wait_for_rows(writer, query)
        assert follower.end() == 0, follower.errors
    follow_once(urls, kind, table, *words)
    assert writer.differences(query, table) == []
    assert positions(table)[-1].sequence == buckets.bucket_state(cluster.url, kind)["last_seq"]


def test_signal_at_start_without_leader(cluster: Cluster, tmp_path: Path) -> None:
    buckets.create_bucket(cluster.url, "b", num_replicas=3)
    cluster.wait_ready("KV_b")
    cluster.move_leader("KV_b", cluster.servers["n1"])
    others = [cluster.servers["n2"], cluster.servers["n3"]]
    for server in others:
        server.kill()
    try:
        with following(cluster.url, "b", tmp_path / "table") as follower:
            follower.wait(lambda: "servers are away" in follower.errors, "an outage")
            assert follower.end() == 0, follower.errors
    finally:
        for server in others:
            server.start()
    cluster.wait_ready("KV_b")
    buckets.put(cluster.url, "b", "a", b"x")
    follow_once(cluster.url, "b", tmp_path / "table")
    assert len(Query({"bucket": "b"}).stored(tmp_path / "table")) == 1
