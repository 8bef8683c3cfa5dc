"""A replica that lags, below planner and reader: each kind of query, and batch reads.

One of three replicas is cut off from the leader and goes on serving what it has. The client is at a
fourth server, which has none: consumers are placed on any of the three, and any of them answers a
Direct Get. What is met there is seen on the way to the client.
"""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.faults.cluster.replica_state import Behind, Placements, create_replicated, while_behind
from tests.support.nats.watched_cluster import WatchedCluster
from tests.support.proxy.fault_proxy import Outcome, Proxy, subject_of
from tests.support.proxy.verdicts import Published, header_number
from tests.support.query_driver.batch import BATCHES, batch_options, read_sorted, recorded_kind
from tests.support.recorded_stream import KINDS, RecordedStream

pytestmark = pytest.mark.cluster(size=4, lines=True)

OLD, MORE = 200, 400
"""What the replica has that lags, and what it lacks."""

_FEW = 3
_MOST_READS = 60  # none of them at one of three replicas: once in many billion runs


def new_recorded(cluster: WatchedCluster, kind: str) -> RecordedStream:
    return create_replicated(cluster, kind, OLD)


def write_more(recorded: RecordedStream, lag: Behind, count: int = MORE) -> None:
    recorded.write(count, url=lag.leader.url)
    assert lag.has < recorded.last


@pytest.mark.parametrize("kind", KINDS)
def test_split_consumer_on_lagging_replica(watched_cluster: WatchedCluster, kind: str) -> None:
    """It is given up for one that the leader has, and all rows come while the follower lags."""

    def test(recorded: RecordedStream, lag: Behind) -> bool:
        write_more(recorded, lag)
        placements = Placements(watched_cluster.name_of(lag.follower))
        proxied = Proxy(lag.outside.port, placements, keep=0)
        with proxied as proxy, recorded.query(proxy.url, minPartitions="4") as query:
            assert query.plan()
            logged = query.logged
            assert logged is not None
            assert logged["stream_seq"] == recorded.last
            assert len(query.splits) == (1 if kind == "kv current" else 4)
            for _ in range(_MOST_READS):
                recorded.check(query.read().rows)
                if placements.there or not lag.lags:
                    break
                del query.offsets[1:]
                query.plan_logged(logged)
            return placements.there > 0 and lag.lags

    while_behind(watched_cluster, partial(new_recorded, watched_cluster, kind), test)


@pytest.mark.parametrize("kind", KINDS)
def test_planner_connected_to_lagging_replica(watched_cluster: WatchedCluster, kind: str) -> None:
    """It does not speak for the stream: the planner waits for the leader."""

    def test(recorded: RecordedStream, lag: Behind) -> bool:
        write_more(recorded, lag)
        looks = Published("$JS.API.STREAM.INFO.")
        asked: list[bool] = []

        def upward(frame: bytes) -> Outcome:
            if looks.hits(frame):
                asked.append(lag.lags)
                if len(asked) == 3:
                    lag.catch_up()
            return True

        proxied = Proxy(lag.follower.port, upward=upward, keep=0)
        options = {"requestTimeout": "0.3", "connectTimeout": "30"}
        with proxied as proxy, recorded.query(proxy.url, **options) as query:
            assert query.plan()
            assert query.logged is not None
            assert query.logged["stream_seq"] == recorded.last
            query.read()
        recorded.check(query.rows)
        return asked[:3] == [True] * 3

    while_behind(watched_cluster, partial(new_recorded, watched_cluster, kind), test)


@pytest.mark.parametrize("kind", KINDS)
def test_small_range_avoids_lagging_replica(watched_cluster: WatchedCluster, kind: str) -> None:
    """The leader has it; no consumer is placed anywhere, and nobody waits."""

    def test(recorded: RecordedStream, lag: Behind) -> bool:
        with Proxy(lag.outside.port, keep=200) as proxy, recorded.query(proxy.url) as query:
            query.until(OLD)
            created = len(proxy.created)
            for _ in range(5):
                write_more(recorded, lag, 20)
                assert query.plan()
                assert len(query.read().rows) == 20
            assert len(proxy.created) == created
        recorded.check(query.rows)
        return lag.lags

    while_behind(watched_cluster, partial(new_recorded, watched_cluster, kind), test)


# -- limits ---------------------------------------------------------------------------------------


class Ranks:
    """Verdicts that see how many messages there are from a sequence on, by Direct Get.

    Attributes:
        too_few: answers that are less than there is.
    """

    def __init__(self, recorded: RecordedStream) -> None:
        self._workload = recorded
        self._asked: dict[str, int] = {}
        self.too_few = 0

    def up(self, frame: bytes) -> Outcome:
        line, _, payload = frame.partition(b"\r\n")
        words = line.split(b" ")
        if len(words) > 3 and words[1].startswith(b"$JS.API.DIRECT.GET."):
            self._asked[words[2].decode()] = json.loads(payload)["seq"]
        return True

    def down(self, frame: bytes) -> Outcome:
        if b"NATS/1.0 204" in frame and (seq := self._asked.get(subject_of(frame))) is not None:
            # No value was written over: each sequence is a message, the first of them was sent.
            rest = self._workload.last - seq
            self.too_few += header_number(frame, "Nats-Num-Pending") < rest
        return True


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_limit_counted_by_lagging_replica(watched_cluster: WatchedCluster, kind: str) -> None:
    """Whoever counts, no micro-batch has more rows than the limit."""
    limit = 150

    def test(recorded: RecordedStream, lag: Behind) -> bool:
        write_more(recorded, lag)
        filters = {"filterSubjects": f"{recorded.name}.*"} if kind == "stream" else {"keys": "*"}
        options = {"maxRowsPerTrigger": str(limit), **filters}
        ranks = Ranks(recorded)
        with Proxy(lag.outside.port, ranks.down, ranks.up, keep=0) as proxy:
            with recorded.query(proxy.url, **options) as first:
                assert first.plan()
                first.read()
            assert 0 < first.seq <= limit
            met = 0
            for _ in range(_MOST_READS):
                ranks.too_few = 0
                # Each as after a restart, with nothing counted before.
                with recorded.query(proxy.url, first.offsets, **options) as query:
                    assert query.plan()
                    assert query.logged is not None
                    assert 0 < query.logged["stream_seq"] - first.seq <= limit
                met += ranks.too_few > 0
                if met == _FEW or not lag.lags:
                    break
        with recorded.query(lag.outside.url, first.offsets, **options) as rest:
            lag.catch_up()
            rest.until(recorded.last)
        recorded.check(first.rows + rest.rows)
        return met == _FEW

    while_behind(watched_cluster, partial(new_recorded, watched_cluster, kind), test, direct=True)


# -- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", BATCHES)
def test_batch_read_with_lagging_replica(watched_cluster: WatchedCluster, what: str) -> None:
    """Its tasks take other consumers, too."""

    def test(recorded: RecordedStream, lag: Behind) -> bool:
        write_more(recorded, lag)
        placements = Placements(watched_cluster.name_of(lag.follower))
        with Proxy(lag.outside.port, placements, keep=0) as proxy:
            for _ in range(_MOST_READS):
                recorded.check(read_sorted(proxy.url, batch_options(recorded, what)))
                if placements.there or not lag.lags:
                    break
        return placements.there > 0 and lag.lags

    while_behind(watched_cluster, partial(new_recorded, watched_cluster, recorded_kind(what)), test)
