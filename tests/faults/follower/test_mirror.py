"""The command `follow` reads a bucket that is a mirror, which is lost and created again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.follower.test_server import paused
from tests.support.followed import Query
from tests.support.follower import (
    FollowProcess,
    MixedWriter,
    follow_once,
    following,
    positions,
    version,
)
from tests.support.nats import buckets
from tests.support.nats.topology import make_mirror

pytestmark = pytest.mark.faults

QUERY = Query({"bucket": "b"})


def wait_for_rows(follower: FollowProcess, writer: MixedWriter) -> None:
    follower.wait(
        lambda: differences(writer, follower.table) == [],
        "equal rows",
        seen=lambda: (differences(writer, follower.table), follower.errors),
    )


def differences(writer: MixedWriter, table: Path) -> list[tuple[Any, ...]]:
    stored = {row[1:] for row in QUERY.stored(table)} if version(table) >= 0 else set()
    expected = {row[1:] for row in QUERY.expected({"b": writer.written})}
    return sorted(stored ^ expected)


@pytest.mark.parametrize("runs", [True, False], ids=["while it runs", "between two runs"])
def test_mirror_created_again(nats_server: NatsServer, tmp_path: Path, runs: bool) -> None:
    url, table = nats_server.url, tmp_path / "table"
    buckets.create_bucket(url, "b")
    writer = MixedWriter(url, "b", random.Random(1))
    writer.write(100)

    def mirror() -> str:
        made = make_mirror(url, "KV_m", "KV_b", max_msgs_per_subject=1, allow_direct=True)
        return str(made["created"])

    created = mirror()
    with following(url, "m", table) as follower:
        wait_for_rows(follower, writer)
        writer.write(100)
        wait_for_rows(follower, writer)
        nats_server.kill()
        nats_server.start()
        writer.write(100)
        wait_for_rows(follower, writer)
        if not runs:
            assert follower.end() == 0, follower.errors
            buckets.delete_bucket(url, "m")
            assert mirror() != created
        else:
            with paused(follower):
                buckets.delete_bucket(url, "m")
                assert mirror() != created
            writer.write(100)
            wait_for_rows(follower, writer)
            assert follower.end() == 0, follower.errors
    writer.write(100)
    follow_once(url, "m", table)
    assert differences(writer, table) == []
    assert len({one.created for one in positions(table)}) == 2


def test_signal_while_mirror_is_behind(nats_server: NatsServer, tmp_path: Path) -> None:
    url, table = nats_server.url, tmp_path / "table"
    buckets.create_bucket(url, "b")
    writer = MixedWriter(url, "b", random.Random(1))
    writer.write(100)
    make_mirror(url, "KV_m", "KV_b", max_msgs_per_subject=1, allow_direct=True)
    follow_once(url, "m", table)
    for bucket in ("m", "b"):
        buckets.delete_bucket(url, bucket)
    buckets.create_bucket(url, "b")
    make_mirror(url, "KV_m", "KV_b", max_msgs_per_subject=1, allow_direct=True)
    with following(url, "m", table) as follower:
        follower.wait(lambda: "mirror is behind" in follower.errors, "a mirror that is behind")
        assert follower.end() == 0, follower.errors
    assert differences(writer, table) == []
