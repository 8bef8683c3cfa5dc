"""A replica that lags, below planner and reader: each kind of query, and batch reads.

One of three replicas is cut off from the leader and still serves the messages that it has. The
client is at a fourth server, which lacks the stream: consumers are placed on any of the three, and
any of them responds to a Direct Get. The proxy before the client records the responses.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.faults.cluster.replica_state import Lagging, Placements, create_replicated, while_behind
from tests.support.nats.cluster import Cluster
from tests.support.proxy.fault_proxy import Outcome, Proxy
from tests.support.proxy.verdicts import Published
from tests.support.query_driver.batch import BATCHES, batch_options, read_sorted, recorded_kind
from tests.support.recorded_stream import KINDS, RecordedStream

pytestmark = pytest.mark.cluster(size=4, lines=True)

OLD, MORE = 200, 400
"""What the replica has that lags, and what it lacks."""

_FEW = 3
_MOST_READS = 60  # none of them at one of three replicas: once in many billion runs


def new_recorded(cluster: Cluster, kind: str) -> RecordedStream:
    return create_replicated(cluster, kind, OLD)


def write_more(recorded: RecordedStream, lag: Lagging, count: int = MORE) -> None:
    recorded.write(count, url=lag.leader.url)
    assert lag.has < recorded.last


@pytest.mark.parametrize("kind", KINDS)
def test_split_consumer_on_lagging_replica(cluster: Cluster, kind: str) -> None:
    """It is given up for one that the leader has, and all rows come while the follower lags."""

    def test(recorded: RecordedStream, lag: Lagging) -> bool:
        write_more(recorded, lag)
        placements = Placements(cluster.name_of(lag.follower))
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

    while_behind(cluster, partial(new_recorded, cluster, kind), test)


@pytest.mark.parametrize("kind", KINDS)
def test_planner_connected_to_lagging_replica(cluster: Cluster, kind: str) -> None:
    """It does not speak for the stream: the planner waits for the leader."""

    def test(recorded: RecordedStream, lag: Lagging) -> bool:
        write_more(recorded, lag)
        looks = Published("$JS.API.STREAM.INFO.")
        asked: list[bool] = []

        def upward(frame: bytes) -> Outcome:
            if looks.hits(frame):
                asked.append(lag.lags)
                if len(asked) == 3:
                    lag.line.release()
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

    while_behind(cluster, partial(new_recorded, cluster, kind), test)


@pytest.mark.parametrize("kind", KINDS)
def test_small_range_avoids_lagging_replica(cluster: Cluster, kind: str) -> None:
    """The leader has it; no consumer is created, and the reader does not wait."""

    def test(recorded: RecordedStream, lag: Lagging) -> bool:
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

    while_behind(cluster, partial(new_recorded, cluster, kind), test)


# -- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_limit_while_replica_lags_is_not_exceeded(cluster: Cluster, kind: str) -> None:
    """No Direct Get counts, because any of the three replicas would respond."""
    limit = 150

    def test(recorded: RecordedStream, lag: Lagging) -> bool:
        write_more(recorded, lag)
        filters = {"filterSubjects": f"{recorded.name}.*"} if kind == "stream" else {"keys": "*"}
        options = {"maxRowsPerTrigger": str(limit), **filters}
        with recorded.query(lag.outside.url, **options) as first:
            assert first.plan()
            first.read()
        assert 0 < first.seq <= limit
        for _ in range(_FEW):
            with (
                Proxy(lag.outside.port) as proxy,
                recorded.query(proxy.url, first.offsets, **options) as query,
            ):
                assert query.plan()
                assert query.logged is not None
                assert 0 < query.logged["stream_seq"] - first.seq <= limit
                counted = proxy.asked("$JS.API.DIRECT.GET.")
            if not lag.lags:
                return False
            assert not counted
        with recorded.query(lag.outside.url, first.offsets, **options) as rest:
            lag.line.release()
            rest.until(recorded.last)
        recorded.check(first.rows + rest.rows)
        return True

    while_behind(cluster, partial(new_recorded, cluster, kind), test, direct=True)


# -- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", BATCHES)
def test_batch_read_with_lagging_replica(cluster: Cluster, what: str) -> None:
    """Its tasks take other consumers, too."""

    def test(recorded: RecordedStream, lag: Lagging) -> bool:
        write_more(recorded, lag)
        placements = Placements(cluster.name_of(lag.follower))
        with Proxy(lag.outside.port, placements, keep=0) as proxy:
            for _ in range(_MOST_READS):
                recorded.check(read_sorted(proxy.url, batch_options(recorded, what)))
                if placements.there or not lag.lags:
                    break
        return placements.there > 0 and lag.lags

    while_behind(cluster, partial(new_recorded, cluster, recorded_kind(what)), test)
