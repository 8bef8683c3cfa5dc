"""Replicated recorded streams on a watched cluster, and a follower that lags.

:func:`read_with_retries` retries the tasks of a query as often as Spark does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import nats.errors
from nats.js.errors import NoStreamResponseError

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    NatsSourceError,
    ProtocolError,
)
from tests.support.nats.cluster import Cluster
from tests.support.nats.topology import (
    Line,
)
from tests.support.nats.watched_cluster import WatchedCluster
from tests.support.recorded_stream import QueryDriver, RecordedStream
from tests.support.wait import wait_until


def create_replicated(
    cluster: Cluster, kind: str, count: int = 0, size: int = 0, **config: Any
) -> RecordedStream:
    """Create a recorded stream with three replicas and write ``count`` values to it.

    Returns when all replicas are current and all servers report the stream and its leader.
    """
    for _ in range(_MOST_ELECTIONS):
        recorded = RecordedStream(kind, cluster.url)
        place(recorded, num_replicas=3, **config)
        cluster.wait_ready(recorded.stream)
        try:
            recorded.write(count, size)
        except NoStreamResponseError:
            continue  # the stream lost its leader, and some of the values may be stored
        cluster.wait_current(recorded.stream)
        return recorded
    raise AssertionError("each time there was an election while it was written")


def place(recorded: RecordedStream, **config: Any) -> None:
    """Create the stream; retry while restarted servers are reported as offline."""

    def created() -> bool:
        try:
            recorded.create(**config)
        except (RuntimeError, OSError, nats.errors.Error):
            return False
        return True

    wait_until(created, "a stream is placed", deadline=_DEADLINE)


class Placements:
    """A verdict that counts the consumers placed on a server, and passes all frames."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.there = 0

    def __call__(self, frame: bytes) -> bool:
        if b"consumer_create_response" in frame:
            answer = json.loads(frame[frame.index(b"{") :])
            self.there += (answer.get("cluster") or {}).get("leader") == self._name
        return True


NEVER = (DataLossError, ProtocolError, ConfigurationError)
"""Errors that the fault of a server must not cause."""

_MOST_ELECTIONS = 5
_TASK_FAILURES = 4  # as Spark's own spark.task.maxFailures
_DEADLINE = 300.0  # seconds; only a failing test takes that long


def read_with_retries(
    query: QueryDriver,
    seq: int,
    failures: int = _TASK_FAILURES,
    *,
    planner_fails: bool = False,
) -> None:
    """Read up to ``seq``; retry failed tasks as Spark does, but not a failed planner.

    Args:
        failures: the number of failures of one task after which the read fails.
        planner_fails: retry a failed planner too, as a restart of the query does.
    """
    deadline = time.monotonic() + _DEADLINE
    while query.seq < seq:
        assert time.monotonic() < deadline, f"read up to {query.seq}, not {seq}"
        try:
            planned = query.plan()
        except NatsSourceError as error:
            if isinstance(error, NEVER) or not planner_fails:
                raise
            continue
        if planned:
            _run_task(query, failures, deadline)


def _run_task(query: QueryDriver, failures: int, deadline: float) -> None:
    for failed in itertools.count(1):
        try:
            query.read()
            return
        except NatsSourceError as error:
            if isinstance(error, NEVER) or failed == failures or time.monotonic() > deadline:
                raise


@dataclass(frozen=True, slots=True)
class Behind:
    """A stream, one of whose replicas does not get what is written from now on.

    Attributes:
        follower: the one that lags.
        outside: a server that reaches both, and has no replica where the cluster has such a one.
        has: the last sequence that the follower has.
    """

    cluster: WatchedCluster
    stream: str
    leader: NatsServer
    follower: NatsServer
    outside: NatsServer
    has: int
    line: Line

    @property
    def lags(self) -> bool:
        """Whether the follower still has what it had."""
        return self.cluster.last_seq_at(self.follower, self.stream) == self.has

    def catch_up(self) -> None:
        """Let the follower have what is there."""
        self.line.release()


@contextlib.contextmanager
def behind(cluster: WatchedCluster, stream: str, *, direct: bool = False) -> Iterator[Behind]:
    """Make a follower of ``stream`` lag, as ``topology.lagging`` does it with a bucket's.

    The route between it and the leader is held; through the others it is reached, and serves what
    it has. For some seconds only: then it calls for an election, and gets what it lacks from a new
    leader.

    Args:
        cluster: one with ``lines``. With four servers, one has no replica: any of the
            three responds to its requests.
        direct: wait until the follower responds to Direct Gets.
    """
    # Neither of the two: else there is an election for want of it, or the follower does not hear of
    # new consumers.
    meta = cluster.meta_leader()
    leader = cluster.move_leader(stream, meta)
    cluster.wait_current(stream)
    followers = [one for one in cluster.followers_of(stream) if one is not meta]
    follower = followers[0]
    others = [one for one in cluster.servers.values() if one not in (leader, follower)]
    outside = min(others, key=lambda one: one in cluster.followers_of(stream))
    has = cluster.last_seq_at(follower, stream)
    if direct:
        wait_until(lambda: cluster.answers_direct_gets(follower, stream), "Direct Gets")
    line = cluster.line(leader, follower)
    line.hold()
    try:
        yield Behind(cluster, stream, leader, follower, outside, has, line)
    finally:
        line.release()
        cluster.wait_current(stream)


def while_behind(
    cluster: WatchedCluster,
    recorded: Callable[[], RecordedStream],
    test: Callable[[RecordedStream, Behind], bool],
    *,
    direct: bool = False,
) -> None:
    """Run ``test`` with a follower that lags, until it returns that the follower took part.

    On a slow machine there may be an election before that; then with another recorded stream.
    """
    for _ in range(_MOST_ELECTIONS):
        one = recorded()
        # Another recorded stream, too, where it lost its leader while it was written to.
        lost = contextlib.suppress(NoStreamResponseError)
        with behind(cluster, one.stream, direct=direct) as lag, lost:
            if test(one, lag):
                return
    raise AssertionError("each time there was an election before the follower was met")
