"""A server whose store was damaged: it drops what it cannot read, and says that it has all.

Its replica is as long as the leader's, so the server counts it as current, and does not mend it.
Its consumers would pass over what it lacks; so rows come from the server that leads the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from faults.batches import BATCHES, kind_of, options_of, read
from faults.proxy import Proxy
from faults.store import directory_of, flip
from faults.trial import KINDS, Trial
from topology import wait_until

from clusters.watched import Placements, WatchedCluster, create_replicated
from nats_stream_source.embedded import NatsServer

pytestmark = pytest.mark.faults

COUNT, SIZE = 1500, 10_000
"""Several blocks of the server's store; the first one is damaged, and lost from there on."""

_MOST_READS = 60
_MOST_ATTEMPTS = 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[WatchedCluster]:
    with WatchedCluster() as cluster:
        yield cluster


def damaged(cluster: WatchedCluster, kind: str) -> tuple[Trial, NatsServer]:
    """A trial, and one of its followers that has lost a part of the first block."""
    for _ in range(_MOST_ATTEMPTS):
        trial = create_replicated(cluster, kind, COUNT, SIZE)
        follower = cluster.followers_of(trial.stream)[0]
        follower.kill()
        flip(directory_of(follower, trial.stream) / "msgs" / "1.blk", 0.05)
        follower.start()

        def state(trial: Trial = trial, follower: NatsServer = follower) -> dict[str, Any]:
            return cluster.state_at(follower, trial.stream)

        wait_until("it has come up to the end", lambda s=state: s().get("last_seq") == COUNT)
        cluster.wait_current(trial.stream)
        assert trial.state()["messages"] == COUNT
        if state()["messages"] < COUNT and cluster.leader_of(trial.stream) is not follower:
            return trial, follower
        # Where it has lost its end as well, it fetches all that comes after what is left.
    raise AssertionError("it was mended each time")


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_lacks_is_read_at_the_leader(cluster: WatchedCluster, kind: str) -> None:
    """It is given consumers, and none of them is read; its replica is not mended by that."""
    trial, follower = damaged(cluster, kind)
    placements = Placements(cluster.name_of(follower))
    with Proxy(cluster.servers["n1"].port, placements, keep=0) as proxy:
        for _ in range(_MOST_READS):
            with trial.reading(proxy.url, minPartitions="4") as reading:
                reading.until(trial.last)
            trial.check(reading.rows)
            if placements.there >= 4:
                break
    assert placements.there >= 4
    assert cluster.state_at(follower, trial.stream)["messages"] < COUNT
    assert trial.consumers() == []


@pytest.mark.parametrize("what", BATCHES)
def test_batches(cluster: WatchedCluster, what: str) -> None:
    trial, _ = damaged(cluster, kind_of(what))
    options = options_of(trial, what)
    for _ in range(8):
        trial.check(read(cluster.url, options))


@pytest.mark.parametrize("kind", KINDS)
def test_where_consumers_may_not_be_deleted(cluster: WatchedCluster, kind: str) -> None:
    """What was placed elsewhere goes away by itself, later; nobody listens, so it sends nothing."""
    trial = create_replicated(cluster, kind, COUNT, SIZE)
    for _ in range(8):
        with trial.reading(user="few", password="few") as reading:
            reading.until(trial.last)
        trial.check(reading.rows)
    made = len(trial.consumers())
    assert made > 8  # with the luck of one in 6,500 runs the first server was right each time
    trial.delete_consumers()
