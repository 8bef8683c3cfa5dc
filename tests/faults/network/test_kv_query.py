"""Faults of the server and the network within a micro-batch: the rows are complete.

The query reads through a proxy, which injects the fault when a certain row passes. The reader
without Spark is tested in ``tests/integration/jetstream/ordered``; here the rows of the sink count.
"""

from __future__ import annotations

import pytest

from tests.support.nats import buckets
from tests.support.proxy.fault_proxy import Proxy, Verdict, is_status, stream_seq
from tests.support.proxy.verdicts import ConsumerDeletedAt, Sequences, Silence, When
from tests.support.recorded_stream import AGAIN
from tests.support.spark.scenario import Create, PutMany, Run, Scene, play

ROWS = 2000
KEYS = 100


def read_through(scene: Scene, verdict: Verdict) -> Proxy:
    """Run a query to its end through a proxy; all revisions must come, once and in order."""
    with Proxy(scene.server.port, verdict) as proxy:
        options = {"servers": proxy.url, "includeHistory": "true"}
        play(scene, Create(history=64), PutMany(ROWS, KEYS), Run(options))
    assert [row.revision for row in scene.rows] == list(range(1, ROWS + 1))
    assert [bytes(row.value) for row in scene.rows] == [b"%d" % i for i in range(ROWS)]
    assert buckets.consumers(scene.url, scene.bucket) == []
    return proxy


@pytest.mark.parametrize("lost", [{1}, {700, 701, 1500}, {ROWS}], ids=["first", "several", "last"])
def test_lost_messages(scene: Scene, lost: set[int]) -> None:
    proxy = read_through(scene, Sequences(lost))
    assert {stream_seq(frame) for frame in proxy.dropped} == lost


def test_missed_heartbeats(scene: Scene) -> None:
    """The first consumer falls silent permanently; its successor is heard."""
    proxy = read_through(scene, Silence(900))
    assert any(is_status(frame, b"Idle Heartbeat") for frame in proxy.dropped)


def test_deleted_consumer(scene: Scene) -> None:
    """The consumer is deleted when row 900 passes; its deliveries from that row on are lost."""

    def delete() -> list[str]:
        gone = buckets.consumers(scene.url, scene.bucket)
        for name in gone:
            buckets.api(scene.url, f"CONSUMER.DELETE.KV_{scene.bucket}.{name}")
        return gone

    fault = ConsumerDeletedAt(delete, 900)
    read_through(scene, fault)
    assert fault.gone == [fault.consumer]


@pytest.mark.parametrize("how", AGAIN)
def test_server_ends_and_starts(own_scene: Scene, how: str) -> None:
    fault = When(900, lambda: AGAIN[how](own_scene.server), lose=False)
    read_through(own_scene, fault)
    assert fault.consumer
