"""Clusters whose servers are looked at one by one: what each has, who leads, which one lags.

And a query's patience with them, which is Spark's: :func:`read_patiently`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats.errors
from buckets import api
from cluster import SYSTEM_ACCOUNT, Cluster
from faults.trial import Reading, Trial
from nats.js.errors import NoStreamResponseError
from topology import Line, wait_until, with_user

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    NatsSourceError,
    ProtocolError,
)

_FEW = """{user: few, password: few, permissions: {
    publish: {deny: "$JS.API.CONSUMER.DELETE.>"}
}}"""
_APP = "{user: app, password: app}"
_WITH_FEW_RIGHTS = SYSTEM_ACCOUNT.replace(_APP, f"{_APP}, {_FEW}")


class WatchedCluster(Cluster):
    """A cluster that has a system account, and says what each of its servers has itself.

    The user ``few`` may not delete consumers.

    Args:
        more: further lines of servers' configurations, by their names.

    Attributes:
        configs: the files of their configurations, likewise.
    """

    def __init__(self, *args: Any, more: Mapping[str, str] | None = None, **named: Any) -> None:
        super().__init__(*args, **named)
        self._more = dict(more or {})
        self.configs: dict[str, Path] = {}

    def _serve(self, name: str, port: int, args: list[str]) -> None:
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        config = directory / "server.conf"
        config.write_text(_WITH_FEW_RIGHTS + self._more.get(name, ""))
        self.configs[name] = config
        super()._serve(name, port, [*args, "-c", str(config)])

    def name_of(self, server: NatsServer) -> str:
        return next(name for name, one in self.servers.items() if one is server)

    def last_seq_at(self, server: NatsServer, stream: str) -> int:
        """The last sequence of ``stream`` that this server has, whoever leads it."""
        return int(self.state_at(server, stream)["last_seq"])

    def state_at(self, server: NatsServer, stream: str) -> dict[str, Any]:
        """The state of ``stream`` as this server has it; empty where it has none."""
        accounts = self._monitored(server, "jsz?accounts=true&streams=true")["account_details"]
        streams = (one for account in accounts for one in account.get("stream_detail") or [])
        return next((dict(one["state"]) for one in streams if one["name"] == stream), {})

    def answers_direct_gets(self, server: NatsServer, stream: str) -> bool:
        """Whether this server's replica does. One that follows begins some seconds late."""
        subject = f"$JS.API.DIRECT.GET.{stream}"
        found = self._monitored(server, f"subsz?subs=1&acc=APP&test={subject}")
        return any(one["subject"] == subject for one in found.get("subscriptions_list") or [])

    def _monitored(self, server: NatsServer, path: str) -> dict[str, Any]:
        port = self._monitors[self.name_of(server)]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
            return dict(json.load(answer))

    def step_down_meta(self) -> NatsServer:
        """Make the meta leader give way; the new one."""
        before = self.name_of(self.meta_leader())
        after: list[str] = []

        def moved() -> bool:
            leader = self._meta_leader()
            if leader == before:
                # An answer may get lost; and the first server may not have heard of another one.
                with contextlib.suppress(RuntimeError, OSError, nats.errors.Error):
                    api(with_user(self.url, "sys"), "META.LEADER.STEPDOWN", {}, timeout=2)
                return False
            after[:] = [leader]
            return leader in self.servers

        wait_until("another meta leader", moved)
        return self.servers[after[0]]


def create_replicated(
    cluster: Cluster, kind: str, count: int = 0, size: int = 0, **config: Any
) -> Trial:
    """A trial with three replicas, all of which have its ``count`` values.

    All servers know it then, and who leads it.
    """
    for _ in range(_MOST_ELECTIONS):
        trial = Trial(kind, cluster.url)
        place(trial, num_replicas=3, **config)
        cluster.wait_ready(trial.stream)
        try:
            trial.write(count, size)
        except NoStreamResponseError:
            continue  # it lost its leader just then, and a part may be stored
        cluster.wait_current(trial.stream)
        return trial
    raise AssertionError("each time there was an election while it was written")


def place(trial: Trial, **config: Any) -> None:
    """Create the trial's stream; waits while servers that came back count as offline."""

    def created() -> bool:
        try:
            trial.create(**config)
        except (RuntimeError, OSError, nats.errors.Error):
            return False
        return True

    wait_until("a stream is placed", created, deadline=_DEADLINE)


class Placements:
    """A verdict that counts the consumers that a server is given, and passes everything."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.there = 0

    def __call__(self, frame: bytes) -> bool:
        if b"consumer_create_response" in frame:
            answer = json.loads(frame[frame.index(b"{") :])
            self.there += (answer.get("cluster") or {}).get("leader") == self._name
        return True


NEVER = (DataLossError, ProtocolError, ConfigurationError)
"""No trouble of a server's is one of these."""

_MOST_ELECTIONS = 5
_TASK_FAILURES = 4  # as Spark's own spark.task.maxFailures
_DEADLINE = 300.0  # seconds; only a failing test takes that long


def read_patiently(
    reading: Reading, seq: int, failures: int = _TASK_FAILURES, *, planner_fails: bool = False
) -> None:
    """Read up to ``seq``; a task that fails is run again, as Spark does, the planner is not.

    Args:
        failures: how many of one task are too many.
        planner_fails: it may, and is asked again: as a query that is started again.
    """
    deadline = time.monotonic() + _DEADLINE
    while reading.seq < seq:
        assert time.monotonic() < deadline, f"read up to {reading.seq}, not {seq}"
        try:
            planned = reading.plan()
        except NatsSourceError as error:
            if isinstance(error, NEVER) or not planner_fails:
                raise
            continue
        if planned:
            _run_task(reading, failures, deadline)


def _run_task(reading: Reading, failures: int, deadline: float) -> None:
    for failed in itertools.count(1):
        try:
            reading.read()
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
        cluster: one with ``lines``. With four servers, one has no replica: what is asked there
            is answered by any of the three.
        direct: wait until the follower answers Direct Gets.
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
        wait_until("Direct Gets", lambda: cluster.answers_direct_gets(follower, stream))
    line = cluster.line(leader, follower)
    line.hold()
    try:
        yield Behind(cluster, stream, leader, follower, outside, has, line)
    finally:
        line.release()
        cluster.wait_current(stream)


def while_behind(
    cluster: WatchedCluster,
    trial: Callable[[], Trial],
    test: Callable[[Trial, Behind], bool],
    *,
    direct: bool = False,
) -> None:
    """Run ``test`` with a follower that lags, until it says that the follower had its part.

    On a slow machine there may be an election before that; then with another trial.
    """
    for _ in range(_MOST_ELECTIONS):
        one = trial()
        # Another trial, too, where it lost its leader while it was written to.
        lost = contextlib.suppress(NoStreamResponseError)
        with behind(cluster, one.stream, direct=direct) as lag, lost:
            if test(one, lag):
                return
    raise AssertionError("each time there was an election before the follower was met")
