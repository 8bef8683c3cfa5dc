"""The command `follow` is killed twice while a client writes: the short form of the fault test."""

from __future__ import annotations

from pathlib import Path

from nats_stream_source.embedded import NatsServer
from tests.support.follower import QUERY, follow_once, following, positions, written_bucket


def test_killed_follower_loses_nothing(nats_server: NatsServer, tmp_path: Path) -> None:
    url, table = nats_server.url, tmp_path / "table"
    writer = written_bucket(url, 20)
    with writer:
        for _ in range(2):
            with following(url, "b", table, "--commit-interval", "0") as follower:
                follower.wait_for_commits(3)
                follower.kill()
        writer.stop()
    assert positions(table)[-1].sequence < writer.written[-1].seq
    follow_once(url, "b", table)
    assert writer.differences(QUERY, table) == []
    assert positions(table)[-1].sequence == writer.written[-1].seq
