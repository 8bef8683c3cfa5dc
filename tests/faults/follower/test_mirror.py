"""The command `follow` reads a bucket that is a mirror, which is lost and created again."""

from __future__ import annotations

from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.followed import Query
from tests.support.follower import (
    follow_once,
    following,
    positions,
    written_bucket,
)
from tests.support.nats import buckets
from tests.support.nats.topology import make_mirror

pytestmark = pytest.mark.faults

QUERY = Query({"bucket": "m"})


@pytest.mark.parametrize("runs", [True, False], ids=["while it runs", "between two runs"])
def test_mirror_created_again(nats_server: NatsServer, tmp_path: Path, runs: bool) -> None:
    url, table = nats_server.url, tmp_path / "table"
    writer = written_bucket(url, 100)

    def mirror() -> str:
        made = make_mirror(url, "KV_m", "KV_b", max_msgs_per_subject=1, allow_direct=True)
        return str(made["created"])

    created = mirror()
    with following(url, "m", table) as follower:
        follower.wait_for_rows(writer, QUERY)
        writer.write(100)
        follower.wait_for_rows(writer, QUERY)
        nats_server.kill()
        nats_server.start()
        writer.write(100)
        follower.wait_for_rows(writer, QUERY)
        if not runs:
            assert follower.end() == 0, follower.errors
            buckets.delete_bucket(url, "m")
            assert mirror() != created
        else:
            with follower.paused():
                buckets.delete_bucket(url, "m")
                assert mirror() != created
            writer.write(100)
            follower.wait_for_rows(writer, QUERY)
            assert follower.end() == 0, follower.errors
    writer.write(100)
    follow_once(url, "m", table)
    assert writer.differences(QUERY, table) == []
    assert len({one.created for one in positions(table)}) == 2


def test_signal_while_mirror_is_behind(nats_server: NatsServer, tmp_path: Path) -> None:
    url, table = nats_server.url, tmp_path / "table"
    writer = written_bucket(url, 100)
    make_mirror(url, "KV_m", "KV_b", max_msgs_per_subject=1, allow_direct=True)
    follow_once(url, "m", table)
    for bucket in ("m", "b"):
        buckets.delete_bucket(url, bucket)
    buckets.create_bucket(url, "b")
    make_mirror(url, "KV_m", "KV_b", max_msgs_per_subject=1, allow_direct=True)
    with following(url, "m", table) as follower:
        follower.wait(lambda: "mirror is behind" in follower.errors, "a mirror that is behind")
        assert follower.end() == 0, follower.errors
    assert writer.differences(QUERY, table) == []
