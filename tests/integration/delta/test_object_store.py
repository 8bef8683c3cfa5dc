"""Delta tables in an S3-compatible object store: what delta-rs does there, with which options."""

from __future__ import annotations

import http.client
import threading
import uuid

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from deltalake.exceptions import CommitFailedError

from nats_stream_source.delta.driver.upkeep import maintain_by_delta_rs
from nats_stream_source.delta.upkeep import MaintenanceResult, Upkeep
from tests.integration.delta.table_content import SCHEMA, rows
from tests.support.delta import rows_of
from tests.support.object_store import BUCKET, ObjectStore

pytestmark = pytest.mark.delta


def create(store: ObjectStore, uri: str) -> None:
    DeltaTable.create(uri, Schema.from_arrow(SCHEMA), storage_options=store.storage_options)


def opened(store: ObjectStore, uri: str) -> DeltaTable:
    return DeltaTable(uri, storage_options=store.storage_options)


def merge(target: DeltaTable, entries: pa.Table) -> None:
    columns = {"key": "s.key", "revision": "s.revision"}
    (
        target.merge(entries, "t.key = s.key", source_alias="s", target_alias="t")
        .when_matched_update(columns, "s.revision > t.revision")
        .when_not_matched_insert(columns)
        .execute()
    )


def content(store: ObjectStore, uri: str) -> list[tuple[str, int]]:
    found = rows_of(opened(store, uri))
    return sorted((row["key"], row["revision"]) for row in found)


def test_object_is_created_by_one_of_many_writers(store: ObjectStore) -> None:
    """What a commit relies on; without it, the other tests would show nothing."""
    address = store.url.removeprefix("http://")
    together = threading.Barrier(6)

    def create_object(name: str, statuses: list[int]) -> None:
        connection = http.client.HTTPConnection(address)
        together.wait()
        connection.request("PUT", f"/{BUCKET}/{name}", b"x", {"If-None-Match": "*"})
        statuses.append(connection.getresponse().status)
        connection.close()

    for _ in range(10):
        statuses: list[int] = []
        name = str(uuid.uuid4())
        writers = [threading.Thread(target=create_object, args=(name, statuses)) for _ in range(6)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert (len(statuses), statuses.count(200)) == (6, 1)


def test_merge_and_repeat(store: ObjectStore, uri: str) -> None:
    create(store, uri)
    merge(opened(store, uri), rows("a", "b"))
    merge(opened(store, uri), rows("b", "c", revision=2))
    merge(opened(store, uri), rows("b", "c", revision=2))
    assert content(store, uri) == [("a", 1), ("b", 2), ("c", 2)]
    assert opened(store, uri).version() == 2


def test_second_commit_from_version_conflicts(store: ObjectStore, uri: str) -> None:
    create(store, uri)
    merge(opened(store, uri), rows("a"))
    first, second = opened(store, uri), opened(store, uri)
    merge(first, rows("a", revision=2))
    with pytest.raises(CommitFailedError):
        merge(second, rows("a", revision=3))
    assert content(store, uri) == [("a", 2)]


def test_concurrent_appends_are_all_kept(store: ObjectStore, uri: str) -> None:
    """delta-rs commits an append again after a conflict: the log's files are created once each."""
    create(store, uri)
    options = store.storage_options

    def append(number: int) -> None:
        for part in range(3):
            write_deltalake(uri, rows(f"{number}.{part}"), mode="append", storage_options=options)

    writers = [threading.Thread(target=append, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert opened(store, uri).version() == 12
    assert [key for key, _ in content(store, uri)] == sorted(
        f"{number}.{part}" for number in range(4) for part in range(3)
    )


def test_upkeep(store: ObjectStore, uri: str) -> None:
    create(store, uri)
    for key in "abcd":
        write_deltalake(uri, rows(key), mode="append", storage_options=store.storage_options)
    result = maintain_by_delta_rs(opened(store, uri), Upkeep(), uri)
    assert result == MaintenanceResult(compacted=4, written=1)
    deleted = opened(store, uri).vacuum(
        0, dry_run=False, enforce_retention_duration=False, full=True
    )
    assert len(deleted) == 4
    assert [key for key, _ in content(store, uri)] == list("abcd")
