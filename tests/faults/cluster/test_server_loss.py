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

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import NatsSourceError
from tests.faults.cluster.replica_state import FAULTS, NEVER, create_replicated, read_with_retries
from tests.support.nats.buckets import api
from tests.support.nats.cluster import Cluster, leader_at, paused
from tests.support.nats.topology import answers
from tests.support.proxy.fault_proxy import Outcome, Proxy, Verdict, is_delivery
from tests.support.proxy.verdicts import When
from tests.support.recorded_stream import RecordedStream
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

COUNT = 3000
_DEADLINE = 300.0  # seconds; only a failing test takes that long


@pytest.fixture(autouse=True)
def resumed_servers(cluster: Cluster) -> Iterator[None]:
    yield
    for server in cluster.servers.values():
        if server.paused:
            server.resume()


def new_recorded(cluster: Cluster, kind: str, count: int = 0) -> RecordedStream:
    wait_all_answer(cluster)
    return create_replicated(cluster, kind, count, size=1000)


def wait_all_answer(cluster: Cluster) -> None:
    wait_until(
        lambda: all(answers(url, timeout=2) for url in cluster.urls),
        "all servers answer",
        deadline=_DEADLINE,
    )


def consumers_server(c: Cluster, stream: str, name: str) -> NatsServer:
    def leader() -> str:
        info = api(c.url, f"CONSUMER.INFO.{stream}.{name}")
        return str(info["cluster"].get("leader", ""))

    wait_until(lambda: leader() in c.servers, "the consumer has a leader")
    return c.servers[leader()]


WHOSE: dict[str, Callable[[Cluster, str, NatsServer, str], NatsServer]] = {
    "stream leader": lambda cluster, stream, at, name: cluster.leader_of(stream),
    "connected server": lambda cluster, stream, at, name: at,
    "consumer's server": lambda cluster, stream, at, name: consumers_server(cluster, stream, name),
    # To make it step down takes the system account; to be killed, no account at all.
    "meta leader": lambda cluster, stream, at, name: cluster.meta_leader(),
}
"""A server, by the stream, the server that the reader is connected to, and its consumer's name."""

CASES = [
    *(
        (kind, whose, how)
        for kind in ("kv", "stream")
        for whose, how in [
            ("stream leader", "killed"),
            ("connected server", "killed"),
            ("consumer's server", "killed"),
            ("consumer's server", "stopped"),
            ("connected server", "stopped"),
            ("stream leader", "steps down"),
            ("meta leader", "killed"),
        ]
    ),
    ("kv current", "stream leader", "killed"),
    ("kv current", "consumer's server", "killed"),
]


@pytest.mark.parametrize(("kind", "whose", "how"), CASES)
def test_server_lost_while_split_is_read(cluster: Cluster, kind: str, whose: str, how: str) -> None:
    recorded = new_recorded(cluster, kind, COUNT)
    ends: list[Callable[[], object]] = []
    through: list[NatsServer] = []

    def act() -> None:
        assert when.consumer is not None
        server = WHOSE[whose](cluster, recorded.stream, through[0], when.consumer)
        ends.append(FAULTS[how](cluster, recorded.stream, server))

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
        writing = stack.enter_context(recorded.writing(cluster.urls))
        servers = ",".join(proxy.url for proxy in proxies)
        query = stack.enter_context(recorded.query(servers, connectTimeout="20"))
        writing.wait(200)
        read_with_retries(query, COUNT)
        (end,) = ends
        read_with_retries(query, recorded.last)
        end()
        wait_all_answer(cluster)
        writing.wait(200)
        writing.stop()
        read_with_retries(query, recorded.last)
    recorded.check(query.rows)
    if (kind, whose, how) == ("kv", "consumer's server", "killed"):
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
            wait_all_answer(cluster)
            cluster.wait_current(recorded.stream)
            done.append(server.url)

    rolling = threading.Thread(target=roll, daemon=True)
    with contextlib.ExitStack() as stack:
        writing = stack.enter_context(recorded.writing(cluster.urls))
        everywhere = ",".join(cluster.urls)
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


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_majority_lost_temporarily(cluster: Cluster, kind: str) -> None:
    """Two of three servers are stopped: no majority is left. The query continues when one is back.

    A leader that has not noticed this still responds. So the servers are stopped until it has, and
    the query is connected to it.
    """
    recorded = new_recorded(cluster, kind, COUNT)
    leader = cluster.leader_of(recorded.stream)
    with recorded.query(",".join(cluster.urls), requestTimeout="1", connectTimeout="2") as query:
        read_with_retries(query, COUNT)
        recorded.write(500)

        def refused() -> bool:
            noticed = not leader_at(leader.url, recorded.stream)
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
        wait_all_answer(cluster)
        # With times this short an election takes longer than a task's attempts, or a query.
        read_with_retries(query, recorded.last, failures=1000, planner_fails=True)
    recorded.check(query.rows)
