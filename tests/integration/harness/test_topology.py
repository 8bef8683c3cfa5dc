"""The topologies that other tests stand on are what they say."""

from __future__ import annotations

import pytest

from tests.support.nats.buckets import api, create_bucket, put, put_many, stream_state
from tests.support.nats.cluster import Cluster
from tests.support.nats.topology import (
    ADR19_API_PREFIX,
    adr19_server,
    hub_and_leaf,
    make_mirror,
    wait_for_seq,
)
from tests.support.wait import wait_until

pytestmark = pytest.mark.servers


def test_stepping_down_moves_the_leader(cluster: Cluster) -> None:
    create_bucket(cluster.url, "moves", num_replicas=3)
    before = cluster.leader_of("KV_moves")
    assert before not in cluster.followers_of("KV_moves")
    assert len(cluster.followers_of("KV_moves")) == 2

    after = cluster.step_down("KV_moves")

    assert after is not before
    assert before in cluster.followers_of("KV_moves")


def test_a_paused_follower_leaves_the_stream_working(cluster: Cluster) -> None:
    create_bucket(cluster.url, "paused", num_replicas=3)
    leader, follower = cluster.leader_of("KV_paused"), cluster.followers_of("KV_paused")[0]
    follower.pause()
    try:
        put_many(leader.url, "paused", [(f"k{i}", b"v") for i in range(100)])
        assert stream_state(leader.url, "paused")["last_seq"] == 100
        assert cluster.leader_of("KV_paused") is leader
    finally:
        follower.resume()
    cluster.wait_current("KV_paused")


def test_a_hub_and_its_leaf_are_two_jetstreams_within_reach() -> None:
    with hub_and_leaf() as both:
        create_bucket(both.hub.url, "at_hub")
        create_bucket(both.leaf.url, "at_leaf")

        assert api(both.leaf.url, "STREAM.NAMES")["streams"] == ["KV_at_leaf"]
        seen = api(both.leaf.url, "STREAM.NAMES", prefix="$JS.hub.API")
        assert seen["streams"] == ["KV_at_hub"]


def test_a_mirror_lags_while_the_line_is_held() -> None:
    with hub_and_leaf() as both:
        create_bucket(both.hub.url, "far")
        put(both.hub.url, "far", "a", b"1")
        make_mirror(both.leaf.url, "NEAR", "KV_far", source_domain="hub")

        both.line.hold()
        put(both.hub.url, "far", "a", b"2")
        assert api(both.leaf.url, "STREAM.INFO.NEAR")["state"]["last_seq"] == 1

        both.line.release()
        wait_for_seq(both.leaf.url, "NEAR", 2)


def test_account_i_sees_the_streams_of_account_a() -> None:
    with adr19_server() as accounts:
        create_bucket(accounts.exporter, "map")
        seen = api(accounts.importer, "STREAM.NAMES", prefix=ADR19_API_PREFIX)
        assert seen["streams"] == ["KV_map"]


def test_waiting_ends_with_what_was_waited_for() -> None:
    with pytest.raises(AssertionError, match="still not: the impossible"):
        wait_until(lambda: False, "the impossible", deadline=0.1)
