"""The command `follow` beside other writers, and with a table in S3."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from nats_stream_source.embedded import NatsServer
from tests.support.follower import (
    QUERY,
    TABLES,
    FollowProcess,
    follow_once,
    following,
    positions,
    version,
    written_bucket,
)
from tests.support.nats import buckets
from tests.support.object_store import BUCKET, ObjectStore, object_store, store_proxy
from tests.support.wait import wait_until

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


KILLS = 5
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
        for _ in range(KILLS):
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


def test_signal_in_commit(nats_server: NatsServer, store: ObjectStore) -> None:
    url = nats_server.url
    writer = written_bucket(url, 20)
    with store_proxy(store.url) as proxy:
        options = storage_words({**store.storage_options, "AWS_ENDPOINT_URL": proxy.url})
        follow_once(url, "b", TABLE, *options)
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
    assert writer.differences(QUERY, opened(store)) == []


def test_lost_responses_of_commits(nats_server: NatsServer, store: ObjectStore) -> None:
    """The store has a commit whose response is lost: it is not another writer's."""
    url = nats_server.url
    writer = written_bucket(url, 20)
    with store_proxy(store.url) as proxy:
        options = storage_words({**store.storage_options, "AWS_ENDPOINT_URL": proxy.url})
        follow_once(url, "b", TABLE, *options)
        with following(url, "b", TABLE, *options) as follower:
            for _ in range(3):
                proxy.lose, lost = 1, proxy.lost
                writer.write(20)
                follower.wait(lambda: writer.differences(QUERY, opened(store)) == [], "equal rows")
                wait_until(lambda lost=lost: proxy.lost > lost, "a lost response")
            assert follower.end() == 0
    assert writer.differences(QUERY, opened(store)) == []
