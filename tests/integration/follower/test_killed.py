"""The command `follow` is killed twice while a client writes: the short form of the fault test."""

from __future__ import annotations

import random
from pathlib import Path

from nats_stream_source.embedded import NatsServer
from tests.support.followed import Query
from tests.support.follower import MixedWriter, follow_once, following, positions
from tests.support.nats import buckets


def test_killed_follower_loses_nothing(nats_server: NatsServer, tmp_path: Path) -> None:
    url, table, query = nats_server.url, tmp_path / "table", Query({"bucket": "b"})
    buckets.create_bucket(url, "b")
    writer = MixedWriter(url, "b", random.Random(1))
    writer.write(20)
    with writer:
        for _ in range(2):
            with following(url, "b", table, "--commit-interval", "0") as follower:
                follower.wait_for_commits(3)
                follower.kill()
        writer.stop()
    assert positions(table)[-1].sequence < writer.written[-1].seq
    follow_once(url, "b", table)
    assert writer.differences(query, table) == []
    assert positions(table)[-1].sequence == writer.written[-1].seq
