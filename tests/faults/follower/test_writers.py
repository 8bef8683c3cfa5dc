"""Other writers change the table while the command `follow` runs, and restore its versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from nats_stream_source.embedded import NatsServer
from tests.support.follower import (
    TABLES,
    follow_once,
    following,
    positions,
    version,
    written_bucket,
)
from tests.support.nats import buckets

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("kind", TABLES)
def test_two_followers_of_one_table(nats_server: NatsServer, tmp_path: Path, kind: str) -> None:
    words, query = TABLES[kind]
    url, table = nats_server.url, tmp_path / "table"
    writer = written_bucket(url, 100, query)
    follow_once(url, "b", table, *words)
    before = version(table)
    words = ("--commit-interval", "0", *words)
    with following(url, "b", table, *words) as one, following(url, "b", table, *words) as other:
        with writer:
            one.wait(lambda: version(table) > before + 50, "50 commits")
            other.alive()
            one.kill()
            other.wait_for_commits(10)
            writer.stop()
        other.wait_for_rows(writer, query)
        assert other.end() == 0, other.errors
    stored = positions(table)
    assert [one.sequence for one in stored] == sorted({one.sequence for one in stored})
    assert stored[-1].sequence == buckets.bucket_state(url, "b")["last_seq"]


@pytest.mark.parametrize("kind", TABLES)
def test_table_restored_while_it_is_followed(
    nats_server: NatsServer, tmp_path: Path, kind: str
) -> None:
    words, query = TABLES[kind]
    url, table = nats_server.url, tmp_path / "table"
    writer = written_bucket(url, 100, query)
    with following(url, "b", table, *words) as follower:
        follower.wait_for_rows(writer, query)
        for _ in range(2):
            before = version(table)
            writer.write(100)
            follower.wait_for_rows(writer, query)
            DeltaTable(table).restore(before)
            assert writer.differences(query, table)
            writer.write(10)
            follower.wait_for_rows(writer, query)
        assert follower.errors.count("starts again") == 2
        assert follower.end() == 0, follower.errors
    follow_once(url, "b", table, *words)
    assert writer.differences(query, table) == []


@pytest.mark.parametrize("kind", TABLES)
def test_table_restored_between_two_runs(
    nats_server: NatsServer, tmp_path: Path, kind: str
) -> None:
    words, query = TABLES[kind]
    url, table = nats_server.url, tmp_path / "table"
    writer = written_bucket(url, 100, query)
    follow_once(url, "b", table, *words)
    before = version(table)
    writer.write(100)
    follow_once(url, "b", table, *words)
    DeltaTable(table).restore(before)
    assert writer.differences(query, table)
    follow_once(url, "b", table, *words)
    assert writer.differences(query, table) == []
    last = positions(table)[-1]
    writer.write(10)
    follow_once(url, "b", table, *words)
    assert writer.differences(query, table) == []
    assert positions(table)[-1].sequence > last.sequence
