"""A server with a damaged store: it drops messages and reports that its replica is complete.

Its replica is as long as the leader's, so the server counts it as current, and does not mend it.
Its consumers would pass over what it lacks; so rows come from the server that leads the stream.
"""

from __future__ import annotations

from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.cluster.replica_state import Placements, create_replicated
from tests.support.nats.cluster import Cluster
from tests.support.nats.store_files import directory_of, flip
from tests.support.proxy.fault_proxy import Proxy
from tests.support.query_driver.batch import BATCHES, batch_options, read_sorted, recorded_kind
from tests.support.recorded_stream import KINDS, RecordedStream
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

COUNT, SIZE = 1500, 10_000
"""Several blocks of the server's store; the first one is damaged, and lost from there on."""

_MOST_READS = 60
_MOST_ATTEMPTS = 5


def damaged(cluster: Cluster, kind: str) -> tuple[RecordedStream, NatsServer]:
    """A recorded stream, and one of its followers that has lost a part of the first block."""
    for _ in range(_MOST_ATTEMPTS):
        recorded = create_replicated(cluster, kind, COUNT, SIZE)
        follower = cluster.followers_of(recorded.stream)[0]
        follower.kill()
        flip(directory_of(follower, recorded.stream) / "msgs" / "1.blk", 0.05)
        follower.start()

        def state(
            recorded: RecordedStream = recorded, follower: NatsServer = follower
        ) -> dict[str, Any]:
            return cluster.state_at(follower, recorded.stream)

        wait_until(lambda s=state: s().get("last_seq") == COUNT, "it has come up to the end")
        cluster.wait_current(recorded.stream)
        assert recorded.state()["messages"] == COUNT
        if state()["messages"] < COUNT and cluster.leader_of(recorded.stream) is not follower:
            return recorded, follower
        # Where it has lost its end as well, it fetches all that comes after what is left.
    raise AssertionError("it was mended each time")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_replica_is_bypassed_at_leader(cluster: Cluster, kind: str) -> None:
    """It is given consumers, and none of them is read; its replica is not mended by that."""
    recorded, follower = damaged(cluster, kind)
    placements = Placements(cluster.name_of(follower))
    with Proxy(cluster.servers["n1"].port, placements, keep=0) as proxy:
        for _ in range(_MOST_READS):
            with recorded.query(proxy.url, minPartitions="4") as query:
                query.until(recorded.last)
            recorded.check(query.rows)
            if placements.there >= 4:
                break
    assert placements.there >= 4
    assert cluster.state_at(follower, recorded.stream)["messages"] < COUNT
    assert recorded.consumers() == []


@pytest.mark.parametrize("what", BATCHES)
def test_batches(cluster: Cluster, what: str) -> None:
    recorded, _ = damaged(cluster, recorded_kind(what))
    options = batch_options(recorded, what)
    for _ in range(8):
        recorded.check(read_sorted(cluster.url, options))


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_replica_where_consumers_cannot_be_deleted(cluster: Cluster, kind: str) -> None:
    """Consumers on other servers expire; without a subscriber they send nothing."""
    recorded = create_replicated(cluster, kind, COUNT, SIZE)
    for _ in range(8):
        with recorded.query(user="restricted", password="restricted") as query:
            query.until(recorded.last)
        recorded.check(query.rows)
    made = len(recorded.consumers())
    assert made > 8  # with the luck of one in 6,500 runs the first server was right each time
    recorded.delete_consumers()
