"""The leaders of the stream and of the meta group step down under writes and reads.

A writer writes all the time, and a query plans and reads. The first leader steps down within a
split, at a frame that the proxy sees; further leaders whenever the query has read rows since. Batch
reads have a leader that steps down after planning or during the read.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.api import JetStream
from tests.faults.cluster.replica_state import create_replicated
from tests.support.nats.cluster import Cluster
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import When
from tests.support.query_driver.batch import BATCHES, batch_options, read_sorted, recorded_kind
from tests.support.recorded_stream import KINDS, RecordedStream
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

COUNT = 1500
_CHANGES = 4
"""After the first one."""

Change = Callable[[Cluster, RecordedStream], tuple[NatsServer, NatsServer]]
"""Makes a leader step down: who led before, who leads now."""


def of_the_stream(cluster: Cluster, recorded: RecordedStream) -> tuple[NatsServer, NatsServer]:
    return cluster.leader_of(recorded.stream), cluster.step_down(recorded.stream)


def of_the_meta_group(cluster: Cluster, recorded: RecordedStream) -> tuple[NatsServer, NatsServer]:
    return cluster.meta_leader(), cluster.step_down_meta()


CHANGES: dict[str, Change] = {"stream": of_the_stream, "meta group": of_the_meta_group}


@pytest.mark.parametrize("whose", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_leader_steps_down_while_query_runs(cluster: Cluster, kind: str, whose: str) -> None:
    recorded = create_replicated(cluster, kind, COUNT, size=1000)
    changes: list[tuple[NatsServer, NatsServer]] = []

    def change() -> None:
        changes.append(CHANGES[whose](cluster, recorded))

    when = When(COUNT // 2, change)
    with (
        Proxy(cluster.servers["n1"].port, when, keep=0) as proxy,
        recorded.writing(cluster.urls) as writing,
        recorded.query(proxy.url, connectTimeout="20", minPartitions="2") as query,
    ):
        query.until(COUNT)
        assert len(changes) == 1

        def more() -> None:
            for _ in range(_CHANGES):
                change()
                read = query.seq
                wait_until(lambda read=read: query.seq > read, "the query has come on")

        changing = threading.Thread(target=more, daemon=True)
        changing.start()
        while changing.is_alive():
            writing.wait(1)
            query.until(recorded.last)
        changing.join()
        writing.wait(100)
        writing.stop()
        query.until(recorded.last)
    assert len(changes) == 1 + _CHANGES
    assert all(before is not after for before, after in changes)
    recorded.check(query.rows)
    wait_until(lambda: recorded.consumers() == [], "no consumer is left", deadline=90)


@pytest.mark.parametrize("whose", CHANGES)
@pytest.mark.parametrize("what", BATCHES)
def test_leader_steps_down_while_batch_runs(cluster: Cluster, what: str, whose: str) -> None:
    """Another leader when it is planned, and another one in the middle of its first task."""
    recorded = create_replicated(cluster, recorded_kind(what), COUNT, size=1000)
    changes: list[tuple[NatsServer, NatsServer]] = []

    def change() -> None:
        changes.append(CHANGES[whose](cluster, recorded))

    # The first task has a fourth of the rows where there are four.
    when = When(COUNT // 8, change)
    with Proxy(cluster.servers["n1"].port, when, keep=0) as proxy:
        rows = read_sorted(proxy.url, batch_options(recorded, what), change)
    assert len(changes) == 2
    assert all(before is not after for before, after in changes)
    recorded.check(rows)
    assert len(rows) == COUNT


@pytest.mark.parametrize("limit", [None, "10"], ids=["found nothing", "no time for the end"])
def test_messages_unknown_to_old_leader(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    """A former leader may respond to a request that was sent during the change (forced here).

    If it counted, its "no such message" would hide a row until the next write, or log an end that
    looks rolled back to the next micro-batch.
    """
    recorded = create_replicated(cluster, "kv", 20)
    options = {"maxRowsPerTrigger": limit} if limit else {"keys": "*"}
    asked: list[str] = []
    info, message = JetStream.stream_info, JetStream.message

    async def counted(self: JetStream, *args: Any, **named: Any) -> Any:
        if asked:
            asked.append("info")
        return await info(self, *args, **named)

    async def behind(self: JetStream, *args: Any, **named: Any) -> Any:
        if "info" not in asked:
            if not asked:
                asked.append("message")
                await asyncio.to_thread(cluster.step_down, recorded.stream)
            return None
        return await message(self, *args, **named)

    with recorded.query(connectTimeout="20", **options) as query:
        if not limit:
            query.until(20)
            recorded.write(1)
        monkeypatch.setattr(JetStream, "stream_info", counted)
        monkeypatch.setattr(JetStream, "message", behind)
        wait_until(query.plan, "the rows are planned")
        assert asked[:2] == ["message", "info"]
        monkeypatch.undo()
        query.read()
        query.until(recorded.last)
    recorded.check(query.rows)
    assert all(offset["time"] for offset in query.offsets[1:])
