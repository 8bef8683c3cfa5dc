"""Replicated recorded streams on a cluster, with a follower that lags or a leader that is lost.

:func:`read_with_retries` retries the tasks of a query as often as Spark does.

A :class:`StalledReader` is a proxy that stops all frames after a certain delivery. The reader,
whose batches are small here, returns the rows before that, and no more rows are requested: as with
a busy sink, none of its clocks runs. Then a fault ends the leader, and the frames pass again. No
frame is lost and no connection is cut, so only the loss of the leader can make the reader create
another consumer. The server has sent no more than a first window of flow control by then, which is
less than the rest of the range. :data:`FAULTS` end a leader; each waits until ``STREAM.INFO`` names
another one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from nats.js.errors import NoStreamResponseError

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    NatsSourceError,
    ProtocolError,
)
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.rows import base
from tests.support.nats.cluster import Cluster, Lagging, lagging
from tests.support.nats.topology import NO_ANSWER
from tests.support.proxy.fault_proxy import Outcome, Proxy, is_delivery, stream_seq
from tests.support.recorded_stream import DEADLINE, QueryDriver, RecordedStream, use_long_deadlines
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
        except NO_ANSWER:
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
    query: QueryDriver, seq: int, failures: int = _TASK_FAILURES, *, planner_fails: bool = False
) -> None:
    """Read up to ``seq``; retry failed tasks as Spark does, but not a failed planner.

    Args:
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


# -- a reader that stops within its range, and a leader that is lost meanwhile ---------------------


COUNT, SIZE = 3000, 4000
"""Of what is written. A fourth, for a task of four, is more than the first window (2 MB)."""

_STEP = 50  # rows of a batch
_HALT = COUNT // 16  # before the server asks for an answer to flow control, after 1 MB


def read_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """And wait long for PONGs, so that only a connection that is lost is taken for lost."""
    use_long_deadlines(monkeypatch, heartbeat=0.5)
    monkeypatch.setattr(base, "RangeRequest", partial(RangeRequest, batch_rows=_STEP))


class StalledReader(Proxy):
    """A proxy to ``port`` that halts, until ``act`` was called in the reader's pause.

    Attributes:
        rows: how many the reader had then.
        passed: the last sequence that was delivered to it by then.
    """

    def __init__(self, port: int, act: Callable[[], None]) -> None:
        super().__init__(port, self._halt, keep=0)
        self._act = act
        self._halted = threading.Event()
        self.rows = self.passed = 0

    def _halt(self, frame: bytes) -> Outcome:
        # A batch as of a revision is first read without values.
        if self._halted.is_set() or not is_delivery(frame) or len(frame) < SIZE:
            return True
        if (seq := stream_seq(frame)) >= _HALT:
            self.passed = seq
            self._open.clear()
            self._halted.set()
        return True

    def each(self, rows: int) -> None:
        """For :meth:`QueryDriver.read`: once there are rows, the pause."""
        if self.rows:
            return
        self.rows = rows
        assert self._halted.wait(DEADLINE)
        self._act()
        self.thaw()


Fault = Callable[[Cluster, str, NatsServer], Callable[[], object]]
"""Makes the leader of a stream go; gives back what ends that."""


def _nothing() -> None:
    pass


def _step_down(cluster: Cluster, stream: str, leader: NatsServer) -> Callable[[], object]:
    cluster.step_down(stream)
    return _nothing


def _kill(cluster: Cluster, stream: str, leader: NatsServer) -> Callable[[], object]:
    leader.kill()
    return leader.start


def _stop(cluster: Cluster, stream: str, leader: NatsServer) -> Callable[[], object]:
    leader.pause()
    return leader.resume


def _stop_for_a_while(cluster: Cluster, stream: str, leader: NatsServer) -> Callable[[], object]:
    """It continues as a follower, before the reader does."""
    leader.pause()
    try:
        _wait_for_another(cluster, stream, leader)
    finally:
        leader.resume()
    return _nothing


FAULTS: dict[str, Fault] = {
    "steps down": _step_down,
    "killed": _kill,
    "stopped": _stop,
    "stopped for a while": _stop_for_a_while,
}


def _wait_for_another(cluster: Cluster, stream: str, leader: NatsServer) -> None:
    wait_until(lambda: cluster.leader_of(stream) is not leader, "another leader", deadline=DEADLINE)


class LeaderLoss:
    """Ends the leader of a stream when it is called, and starts it again when it is closed.

    Attributes:
        before, after: who led it, as ``STREAM.INFO`` has it; ``after`` is None until it has gone.
        outside: a server that is not the first leader, for readers to be connected to.
    """

    def __init__(self, cluster: Cluster, stream: str, fault: str) -> None:
        self._cluster = cluster
        self._stream = stream
        self._fault = FAULTS[fault]
        self._end: Callable[[], object] = _nothing
        self.before = cluster.leader_of(stream)
        self.outside = cluster.followers_of(stream)[0]
        self.after: NatsServer | None = None

    def __call__(self) -> None:
        assert self._cluster.leader_of(self._stream) is self.before
        self._end = self._fault(self._cluster, self._stream, self.before)
        _wait_for_another(self._cluster, self._stream, self.before)
        self.after = self._cluster.leader_of(self._stream)

    def close(self) -> None:
        """All servers run again."""
        end, self._end = self._end, _nothing
        end()
