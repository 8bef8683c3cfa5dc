"""Faults of the server and the network within a micro-batch: the rows are complete.

The query reads through a proxy, which injects the fault when a certain row passes. The reader
without Spark is tested in ``tests/integration/jetstream/ordered``; here the rows of the sink count.
"""

from __future__ import annotations

import pytest

from tests.support.nats import buckets
from tests.support.proxy.fault_proxy import Proxy, Verdict, is_delivery, is_status, stream_seq
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
    left = set(lost)

    def verdict(frame: bytes) -> bool:
        if is_delivery(frame) and (revision := stream_seq(frame)) in left:
            left.discard(revision)
            return False
        return True

    proxy = read_through(scene, verdict)
    assert {stream_seq(frame) for frame in proxy.dropped} == lost


def test_missed_heartbeats(scene: Scene) -> None:
    """The first consumer falls silent permanently; its successor is heard."""
    silent: set[bytes] = set()

    def verdict(frame: bytes) -> bool:
        sid = frame.split(b" ", 3)[2]
        if is_delivery(frame) and stream_seq(frame) == 900 and not silent:
            silent.add(sid)
        # The planner's connection may use the same sid for its answers; those pass.
        return sid not in silent or not (is_delivery(frame) or is_status(frame, b""))

    proxy = read_through(scene, verdict)
    assert any(is_status(frame, b"Idle Heartbeat") for frame in proxy.dropped)


def test_deleted_consumer(scene: Scene) -> None:
    """The consumer is deleted when row 900 passes; its deliveries beyond that row are held back."""
    gone: list[str] = []

    def verdict(frame: bytes) -> bool:
        if not is_delivery(frame) or stream_seq(frame) < 900:
            return True
        if not gone:
            for name in buckets.consumers(scene.url, scene.bucket):
                buckets.api(scene.url, f"CONSUMER.DELETE.KV_{scene.bucket}.{name}")
                gone.append(name)
        return not any(name.encode() in frame for name in gone)

    read_through(scene, verdict)
    assert len(gone) == 1


@pytest.mark.parametrize("how", ["restarted", "killed"])
def test_server_ends_and_starts(own_scene: Scene, how: str) -> None:
    happened: list[int] = []

    def verdict(frame: bytes) -> bool:
        if is_delivery(frame) and stream_seq(frame) == 900 and not happened:
            happened.append(900)
            if how == "killed":
                own_scene.server.kill()
                own_scene.server.start()
            else:
                own_scene.server.restart()
        return True

    read_through(own_scene, verdict)
    assert happened
