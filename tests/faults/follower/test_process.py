"""The command `follow` killed, stopped, with a full disk, beside other writers, and in S3.

Killed (-9) at random points while a client writes, a run with ``--once`` makes the table equal to
the bucket, and the history to that of all writes. ``FOLLOW_KILLS`` sets the number of kills of each
table, ``FOLLOW_SEED`` the points.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from nats_stream_source.embedded import NatsServer
from tests.support.delta import values
from tests.support.follower import (
    QUERY,
    TABLES,
    FollowProcess,
    MixedWriter,
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
from tests.support.object_store import (
    BUCKET,
    ObjectStore,
    StoreProxy,
    object_store,
    store_proxy,
)
from tests.support.wait import wait_until

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


KILLS_IN_S3 = 5
TABLE = f"s3://{BUCKET}/table"


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


def storage_words(options: dict[str, str], *more: str) -> list[str]:
    given = [["--storage-option", f"{name}={value}"] for name, value in options.items()]
    return [word for pair in given for word in pair] + list(more)


def opened(store: ObjectStore) -> DeltaTable:
    return DeltaTable(TABLE, storage_options=store.storage_options)


def wait_for_version(follower: FollowProcess, store: ObjectStore, least: int) -> None:
    follower.wait(lambda: opened(store).version() >= least, f"version {least}")


def test_killed_follower_of_table_in_s3(nats_server: NatsServer, store: ObjectStore) -> None:
    url, rng = nats_server.url, random.Random(1)
    options = storage_words(store.storage_options, "--commit-interval", "0")
    writer = written_bucket(url, 20, rng=rng)
    follow_once(url, "b", TABLE, *options)
    with writer:
        for _ in range(KILLS_IN_S3):
            with following(url, "b", TABLE, *options) as follower:
                wait_for_version(follower, store, opened(store).version() + 2)
                time.sleep(rng.uniform(0, 0.5))
                follower.alive()
                follower.kill()
        writer.stop()
    follow_once(url, "b", TABLE, *options)
    assert writer.differences(QUERY, opened(store)) == []


def test_two_followers_of_table_in_s3(nats_server: NatsServer, store: ObjectStore) -> None:
    url = nats_server.url
    options = storage_words(store.storage_options, "--commit-interval", "0")
    writer = written_bucket(url, 20)
    follow_once(url, "b", TABLE, *options)
    first = opened(store).version()
    with (
        following(url, "b", TABLE, *options) as one,
        following(url, "b", TABLE, *options) as other,
    ):
        with writer:
            wait_for_version(one, store, first + 30)
            other.alive()
            writer.stop()
        for follower in (one, other):
            follower.wait(lambda: writer.differences(QUERY, opened(store)) == [], "equal rows")
            assert follower.end() == 0
    assert writer.differences(QUERY, opened(store)) == []


@contextlib.contextmanager
def behind_proxy(
    url: str, store: ObjectStore
) -> Iterator[tuple[MixedWriter, StoreProxy, list[str]]]:
    """A table in S3 whose requests go through a proxy; at the end it has what was written."""
    writer = written_bucket(url, 20)
    with store_proxy(store.url) as proxy:
        options = storage_words({**store.storage_options, "AWS_ENDPOINT_URL": proxy.url})
        follow_once(url, "b", TABLE, *options)
        yield writer, proxy, options
    assert writer.differences(QUERY, opened(store)) == []


def test_signal_in_commit(nats_server: NatsServer, store: ObjectStore) -> None:
    url = nats_server.url
    with behind_proxy(url, store) as (writer, proxy, options):
        for _ in range(3):
            with following(url, "b", TABLE, *options) as follower:
                before, version = proxy.paused, opened(store).version()
                proxy.pause = 2.0
                writer.write(20)
                follower.wait(lambda before=before: proxy.paused > before, "a commit")
                assert opened(store).version() == version
                assert follower.end() == 0
                proxy.pause = 0.0
                assert opened(store).version() > version


def test_lost_responses_of_commits(nats_server: NatsServer, store: ObjectStore) -> None:
    """The store has a commit whose response is lost: it is not another writer's."""
    url = nats_server.url
    with (
        behind_proxy(url, store) as (writer, proxy, options),
        following(url, "b", TABLE, *options) as follower,
    ):
        for _ in range(3):
            proxy.lose, lost = 1, proxy.lost
            writer.write(20)
            follower.wait(lambda: writer.differences(QUERY, opened(store)) == [], "equal rows")
            wait_until(lambda lost=lost: proxy.lost > lost, "a lost response")
        assert follower.end() == 0
