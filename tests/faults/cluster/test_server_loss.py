"""Three servers, streams with three replicas, and a fault of one of the servers.

A writer writes all the time. Within a split, at a frame that the proxy sees, one server is killed,
stopped, restarted, made to step down or put into lame duck mode. Every acknowledged write is read,
by whichever server: the query continues, or its micro-batch is repeated, as Spark does with a
failed task.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import nats.errors
import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import NatsSourceError
from tests.faults.cluster.replica_state import NEVER, create_replicated, read_with_retries
from tests.support.nats.buckets import api
from tests.support.nats.cluster import Cluster, paused
from tests.support.proxy.fault_proxy import Outcome, Proxy, Verdict, is_delivery
from tests.support.proxy.verdicts import When
from tests.support.recorded_stream import RecordedStream
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

COUNT = 3000
_DEADLINE = 300.0  # seconds; only a failing test takes that long


@pytest.fixture(autouse=True)
def resumed_servers(cluster: Cluster) -> Iterator[None]:
    """Resume the servers that a failed test left paused."""
    yield
    for server in cluster.servers.values():
        if server.paused:
            server.resume()


def new_recorded(cluster: Cluster, kind: str, count: int = 0) -> RecordedStream:
    wait_until(lambda: _answers(cluster), "all servers answer", deadline=_DEADLINE)
    return create_replicated(cluster, kind, count, size=1000)


def _answers(cluster: Cluster) -> bool:
    try:
        for server in cluster.servers.values():
            api(server.url, "INFO", timeout=2)
    except (RuntimeError, OSError, nats.errors.Error):
        return False
    return True


def urls(cluster: Cluster) -> list[str]:
    return [server.url for server in cluster.servers.values()]


Act = Callable[[Cluster, RecordedStream, NatsServer, str], Callable[[], None]]
"""Injects a fault, and returns a function that ends it.

Its arguments: the cluster, the recorded stream, the server that the reader is connected to, the
consumer's name."""


def again(server: NatsServer) -> Callable[[], None]:
    def start() -> None:
        server.start()

    return start


def kill_stream_leader(
    c: Cluster, t: RecordedStream, at: NatsServer, name: str
) -> Callable[[], None]:
    leader = c.leader_of(t.stream)
    leader.kill()
    return again(leader)


def kill_connected(c: Cluster, t: RecordedStream, at: NatsServer, name: str) -> Callable[[], None]:
    at.kill()
    return again(at)


def consumers_server(c: Cluster, t: RecordedStream, name: str) -> NatsServer:
    def leader() -> str:
        info = api(c.url, f"CONSUMER.INFO.{t.stream}.{name}")
        return str(info["cluster"].get("leader", ""))

    wait_until(lambda: leader() in c.servers, "the consumer has a leader")
    return c.servers[leader()]


def kill_consumers_server(
    c: Cluster, t: RecordedStream, at: NatsServer, name: str
) -> Callable[[], None]:
    server = consumers_server(c, t, name)
    server.kill()
    return again(server)


def stop_consumers_server(
    c: Cluster, t: RecordedStream, at: NatsServer, name: str
) -> Callable[[], None]:
    server = consumers_server(c, t, name)
    server.pause()
    return server.resume


def stop_connected(c: Cluster, t: RecordedStream, at: NatsServer, name: str) -> Callable[[], None]:
    at.pause()
    return at.resume


def nothing() -> None:
    """The fault ends by itself."""


def step_down(c: Cluster, t: RecordedStream, at: NatsServer, name: str) -> Callable[[], None]:
    before = c.leader_of(t.stream)
    assert c.step_down(t.stream) is not before
    return nothing


def meta_step_down(c: Cluster, t: RecordedStream, at: NatsServer, name: str) -> Callable[[], None]:
    # To make it step down takes the system account; to be killed, no account at all.
    before = c.meta_leader()
    before.kill()
    return again(before)


FAULTS: dict[str, Act] = {
    "stream leader killed": kill_stream_leader,
    "connected server killed": kill_connected,
    "consumer's server killed": kill_consumers_server,
    "consumer's server stopped": stop_consumers_server,
    "connected server stopped": stop_connected,
    "stream leader steps down": step_down,
    "meta leader killed": meta_step_down,
}


CASES = [
    *((kind, fault) for kind in ("kv", "stream") for fault in FAULTS),
    ("kv current", "stream leader killed"),
    ("kv current", "consumer's server killed"),
]


@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_server_lost_while_split_is_read(cluster: Cluster, kind: str, fault: str) -> None:
    recorded = new_recorded(cluster, kind, COUNT)
    ends: list[Callable[[], None]] = []
    through: list[NatsServer] = []

    def act() -> None:
        assert when.consumer is not None
        ends.append(FAULTS[fault](cluster, recorded, through[0], when.consumer))

    when = When(COUNT // 2, act)

    def seen_at(server: NatsServer) -> Verdict:
        def verdict(frame: bytes) -> Outcome:
            if is_delivery(frame) and not ends:
                through[:] = [server]
            return when(frame)

        return verdict

    with contextlib.ExitStack() as stack:
        # To whichever server the reader connects first: through a proxy.
        proxies = [
            stack.enter_context(Proxy(server.port, seen_at(server), keep=300))
            for server in cluster.servers.values()
        ]
        writing = stack.enter_context(recorded.writing(urls(cluster)))
        servers = ",".join(proxy.url for proxy in proxies)
        query = stack.enter_context(recorded.query(servers, connectTimeout="20"))
        writing.wait(200)
        read_with_retries(query, COUNT)
        (end,) = ends
        read_with_retries(query, recorded.last)
        end()
        wait_until(lambda: _answers(cluster), "all servers answer", deadline=_DEADLINE)
        writing.wait(200)
        writing.stop()
        read_with_retries(query, recorded.last)
    recorded.check(query.rows)
    if kind == "kv" and fault == "consumer's server killed":
        # It could not be deleted; the server does it after the inactive threshold.
        wait_until(lambda: recorded.consumers() == [], "no consumer is left", deadline=_DEADLINE)


@pytest.mark.parametrize("how", ["in good order", "lame duck"])
@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_rolling_restart(cluster: Cluster, kind: str, how: str) -> None:
    """One server after the other, while a query reads what is written."""
    recorded = new_recorded(cluster, kind)
    servers = list(cluster.servers.values())
    done: list[str] = []

    def roll() -> None:
        for server in servers:
            if how == "lame duck":
                os.kill(server.pid, signal.SIGUSR2)
                wait_until(
                    lambda s=server: "ame duck" in s.log, "it is told to go", deadline=_DEADLINE
                )
            server.restart()
            wait_until(lambda: _answers(cluster), "it answers", deadline=_DEADLINE)
            cluster.wait_current(recorded.stream)
            done.append(server.url)

    rolling = threading.Thread(target=roll, daemon=True)
    with contextlib.ExitStack() as stack:
        writing = stack.enter_context(recorded.writing(urls(cluster)))
        everywhere = ",".join(urls(cluster))
        query = stack.enter_context(recorded.query(everywhere, connectTimeout="20"))
        writing.wait(200)
        rolling.start()
        deadline = time.monotonic() + 3 * _DEADLINE
        while rolling.is_alive():
            assert time.monotonic() < deadline
            read_with_retries(query, recorded.last)
        writing.wait(100)
        writing.stop()
        read_with_retries(query, recorded.last)
    rolling.join()
    assert len(done) == 3
    recorded.check(query.rows)


def leads(server: NatsServer, stream: str) -> bool:
    """Whether this server responds for the stream, and reports a leader."""
    try:
        answer = api(server.url, f"STREAM.INFO.{stream}", timeout=1)
    except (RuntimeError, OSError, nats.errors.Error):
        return False
    return bool(answer["cluster"].get("leader"))


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_majority_lost_temporarily(cluster: Cluster, kind: str) -> None:
    """Two of three servers are stopped: no majority is left. The query continues when one is back.

    A leader that has not noticed this still responds. So the servers are stopped until it has, and
    the query is connected to it.
    """
    recorded = new_recorded(cluster, kind, COUNT)
    leader = cluster.leader_of(recorded.stream)
    with recorded.query(",".join(urls(cluster)), requestTimeout="1", connectTimeout="2") as query:
        read_with_retries(query, COUNT)
        recorded.write(500)

        def refused() -> bool:
            noticed = not leads(leader, recorded.stream)
            try:
                if query.plan():
                    query.read()
            except NEVER:
                raise
            except NatsSourceError:
                return noticed
            return False

        with paused(cluster.followers_of(recorded.stream)):
            wait_until(refused, "the missing majority is met", deadline=_DEADLINE)
        wait_until(lambda: _answers(cluster), "all servers answer", deadline=_DEADLINE)
        # With times this short an election takes longer than a task's attempts, or a query.
        read_with_retries(query, recorded.last, failures=1000, planner_fails=True)
    recorded.check(query.rows)
