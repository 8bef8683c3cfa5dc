"""The command `follow` is killed or stopped at random points, or the table's disk is full."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.delta import values
from tests.support.follower import (
    QUERY,
    TABLES,
    follow_once,
    following,
    operation,
    positions,
    unnamed_files,
    version,
    written_bucket,
)
from tests.support.nats import buckets
from tests.support.nats.store_files import small_disk

pytestmark = pytest.mark.faults


KILLS = int(os.environ.get("FOLLOW_KILLS", "6"))
SEED = int(os.environ.get("FOLLOW_SEED", "1"))


@pytest.mark.parametrize("kind", TABLES)
def test_killed_follower_loses_nothing(nats_server: NatsServer, tmp_path: Path, kind: str) -> None:
    words, query = TABLES[kind]
    url, table, rng = nats_server.url, tmp_path / "table", random.Random(f"{SEED} {kind}")
    writer = written_bucket(url, 20, query, rng=rng, expiring=True)
    follow_once(url, "b", table, *words)
    with writer:
        in_commits = early = 0
        for kill in range(KILLS):
            before, unnamed = version(table), unnamed_files(table)
            with following(url, "b", table, "--commit-interval", "0", *words) as follower:
                if kill % 4 == 3:
                    time.sleep(rng.uniform(0, 2))  # the start, too
                else:
                    follower.wait_for_commits()
                    time.sleep(rng.uniform(0, 0.5))
                follower.alive()
                follower.kill()
            early += version(table) == before
            in_commits += unnamed_files(table) > unnamed
        with following(url, "b", table, *words) as follower:
            writer.stop()  # a marker of a key with a TTL does not stay
            follower.wait_for_rows(writer, query)
            assert follower.end() == 0, follower.errors
    print(
        f"{kind}: {KILLS} kills, {in_commits} between data files and their commit, {early} before "
        f"the first commit, {version(table)} versions, {len(writer.written)} writes, seed {SEED}"
    )
    assert version(table) > KILLS // 2
    assert in_commits or KILLS < 20  # a share of the kills
    follow_once(url, "b", table, *words)
    assert writer.differences(query, table) == []
    assert positions(table)[-1].sequence == buckets.bucket_state(url, "b")["last_seq"]


STOPS = 8


def test_follower_stopped_at_random_points(nats_server: NatsServer, tmp_path: Path) -> None:
    url, table, rng = nats_server.url, tmp_path / "table", random.Random(1)
    writer = written_bucket(url, 20, rng=rng)
    follow_once(url, "b", table)
    with writer:
        for _ in range(STOPS):
            with following(url, "b", table, "--commit-interval", "0") as follower:
                follower.wait_for_commits()
                time.sleep(rng.uniform(0, 0.3))
                assert follower.end() == 0, follower.errors
                # Each commit of rows has a position; a compaction does not.
                last = positions(table)[-1].version
                assert {operation(table, n) for n in range(last + 1, version(table) + 1)} <= {
                    "OPTIMIZE"
                }
        writer.stop()
    assert unnamed_files(table) == set()  # a commit that has begun is made
    follow_once(url, "b", table)
    assert writer.differences(QUERY, table) == []


def test_table_disk_full(nats_server: NatsServer, tmp_path: Path) -> None:
    def entries(first: int) -> dict[str, bytes]:
        # Values that Parquet does not compress.
        made = range(first, first + 20)
        return {
            f"k.{n}": b"".join((n * 7919 + i**3).to_bytes(8, "big") for i in range(2000))
            for n in made
        }

    url, disk = nats_server.url, tmp_path / "disk"
    buckets.create_bucket(url, "b")
    written = entries(0)
    buckets.put_many(url, "b", written.items())
    with small_disk(disk, 4) as resize:
        table = disk / "table"
        with following(url, "b", table) as follower:
            follower.wait(lambda: version(table) > 0 and len(values(table)) == 20, "20 rows")
            filler = disk / "filler"
            with pytest.raises(OSError, match="No space left"):
                filler.write_bytes(b"x" * (8 << 20))
            before = version(table)
            written |= entries(10)
            buckets.put_many(url, "b", entries(10).items())
            assert follower.process.wait(60) == 1
        assert version(table) == before
        assert "No space left" in follow_once(url, "b", table, status=1)
        assert values(table).keys() == entries(0).keys()
        resize(32)
        follow_once(url, "b", table)
        assert values(table) == written
        assert positions(table)[-1].sequence == buckets.bucket_state(url, "b")["last_seq"]
