"""Replicated recorded streams on a cluster, and a follower that lags.

:func:`read_with_retries` retries the tasks of a query as often as Spark does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.js.errors import NoStreamResponseError

from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    NatsSourceError,
    ProtocolError,
)
from tests.support.nats.cluster import Cluster, Lagging, lagging
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


def while_behind(
    cluster: Cluster,
    recorded: Callable[[], RecordedStream],
    test: Callable[[RecordedStream, Lagging], bool],
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
        with lagging(cluster, one.stream, direct=direct) as lag, lost:
            if test(one, lag):
                return
    raise AssertionError("each time there was an election before the follower was met")
