"""What the driver refuses, and commits that another writer replaces."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from nats_stream_source.delta.conflicts import retry_conflicts
from nats_stream_source.delta.driver.objects import TableObjects
from nats_stream_source.delta.refused import REFUSED, STORE
from nats_stream_source.delta.tables import EngineRefusedError, TableChangedError
from nats_stream_source.errors import ConfigurationError, TableError
from tests.integration.delta.driver.in_process import InProcessTable, arrow
from tests.integration.delta.merge_model import live, put
from tests.support.delta import append_entry, change_actions
from tests.support.object_store import BUCKET, ObjectStore, StoreProxy, store_proxy
from tests.support.wait import wait_until

FIRST = [put(f"k{number}", number + 1) for number in range(10)]


ADDED = {"path": "a", "partitionValues": {}, "size": 1, "modificationTime": 1, "dataChange": True}


def new_feature(path: Path) -> None:
    of = DeltaTable(path).protocol()
    features = [*(of.writer_features or ()), "rowTracking"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": of.reader_features}
    append_entry(path, json.dumps({"protocol": {**protocol, "writerFeatures": features}}))


def new_property(name: str) -> Callable[[Path], None]:
    return lambda path: DeltaTable(path).alter.set_table_properties({name: "true"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (new_property("delta.appendOnly"), "append-only"),
        (new_property("delta.enableChangeDataFeed"), "change feed"),
        (new_feature, "rowTracking"),
        (
            lambda path: append_entry(path, json.dumps({"add": {**ADDED, "path": "s3://b/a"}})),
            "s3://b/a is outside of the table",
        ),
    ],
)
def test_open_table_that_another_writer_changes_is_refused(
    path: Path, change: Callable[[Path], None], reason: str
) -> None:
    InProcessTable(path).merge(*FIRST)
    scans, adds, reads = (InProcessTable(path).table for _ in range(3))
    assert all(table.exists() for table in (scans, adds, reads))
    change(path)
    before = sorted(path.rglob("*"))
    for work in (
        lambda: scans.scan(["key"], {}),
        lambda: adds.add_columns([pa.field("other", pa.int64())]),
        lambda: reads.read(lambda rows: rows),
    ):
        with pytest.raises((EngineRefusedError, ConfigurationError), match=reason):
            retry_conflicts(work, "t", (TableChangedError,))
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        '{"add": null}',
        '{"add": {"path": "a"}}',
        '{"remove": {}}',
        '{"txn": {"appId": "a", "version": null}}',
        '{"metaData": {"id": "a"}}',
        '{"protocol": {"minReaderVersion": 1}}',
        '{"commitInfo": 1}',
    ],
)
def test_entry_that_lacks_part_of_action_is_named(path: Path, line: str) -> None:
    table = InProcessTable(path)
    table.merge(*FIRST)
    append_entry(path, '{"commitInfo": {}}', line)
    for one in (table, InProcessTable(path)):
        with pytest.raises(TableError, match=r"000002\.json is damaged; the table is unchanged"):
            one.merge(put("a", 20))


@pytest.mark.parametrize("kind", ["protocol", "metaData"])
def test_log_without_action_of_table_is_named(path: Path, kind: str) -> None:
    InProcessTable(path).merge(*FIRST)
    first = path / entry_of(0)
    lines = first.read_text().splitlines()
    first.write_text("\n".join(line for line in lines if kind not in json.loads(line)))
    with pytest.raises(TableError, match=f"_delta_log has no action '{kind}'"):
        InProcessTable(path).merge(put("a", 20))


def test_entries_of_other_writer_are_read(path: Path) -> None:
    table = InProcessTable(path)
    table.merge(*FIRST)
    append_entry(path, '{"commitInfo": {"operation": "OTHER"}}')
    append_entry(path, '{"commitInfo": {}}', '{"later": 1}', '{"domainMetadata": {"domain": "a"}}')
    txn = '{"txn": {"appId": "a", "version": 1}}'
    append_entry(path, '{"remove": {"path": "gone", "later": 1}}', txn)
    assert table.merge(put("a", 20)) == 1
    assert InProcessTable(path).merge(put("a", 30)) == 1


def test_checkpoint_of_other_kind_is_refused_where_log_begins_with_it(path: Path) -> None:
    InProcessTable(path).merge(*FIRST)
    DeltaTable(path).create_checkpoint()
    InProcessTable(path).merge(put("a", 20))
    log = path / "_delta_log"
    checkpoint = log / f"{1:020}.checkpoint.parquet"
    checkpoint.rename(log / f"{1:020}.checkpoint.80a083e8-7026-4e79-81be-64bd76c43a11.parquet")
    assert InProcessTable(path).merge(put("a", 30)) == 1
    for version in range(2):
        (log / f"{version:020}.json").unlink()
    with pytest.raises(EngineRefusedError, match=r"driver lacks \(v2Checkpoint\)"):
        InProcessTable(path).merge(put("a", 40))


@pytest.mark.parametrize("writer_version", [2, 3, 4])
def test_legacy_protocol_is_taken_as_its_features(path: Path, writer_version: int) -> None:
    InProcessTable(path, vectors=False).merge_rows(arrow([]))
    change_actions(path, "protocol", lambda of: of.update(minWriterVersion=writer_version))
    assert InProcessTable(path).merge(*FIRST) == 10
    properties = {"delta.enableChangeDataFeed": "true"}
    change_actions(path, "metaData", lambda of: of["configuration"].update(properties))
    with pytest.raises(EngineRefusedError, match="change feed"):
        InProcessTable(path).merge(put("a", 20))


@pytest.mark.parametrize("created", [True, False])
def test_other_deletion_vectors_than_those_of_table_are_error(path: Path, created: bool) -> None:
    InProcessTable(path, vectors=created).merge(*FIRST)
    expected = "has" if created else "does not have"
    with pytest.raises(
        ConfigurationError,
        match=f"with deletion_vectors={not created}: the table {expected} the property "
        "delta.enableDeletionVectors; .*remove the argument",
    ):
        InProcessTable(path, vectors=not created).merge(put("a", 20))
    assert DeltaTable(path).version() == 1
    assert InProcessTable(path).merge(put("a", 20)) == 1


@pytest.mark.parametrize("option", [one.name for one in REFUSED if one.kind == STORE])
def test_storage_option_is_refused(option: str) -> None:
    for name in (option, option.upper()):
        table = InProcessTable("s3://bucket/t", storage_options={name: "true"})
        with pytest.raises(EngineRefusedError, match=f"storage option {name} is given"):
            table.merge(*FIRST)


def entry_of(version: int) -> str:
    return f"_delta_log/{version:020d}.json"


@pytest.mark.parametrize("later", [0, 1, 3])
def test_commit_replaced_on_local_disk_ends_query(path: Path, later: int) -> None:
    """rename(2), with which Delta Lake commits on a local disk, replaces the file of its target."""
    table = InProcessTable(path)
    entries = [put(key, number) for number, key in enumerate("abcd", 1)]
    table.merge(*entries)
    copy = path.with_name("copy")  # of a writer that has looked before the next commit
    shutil.copytree(path, copy)
    write_deltalake(copy, arrow([put("other", 99)]), mode="append")
    version = DeltaTable(copy).version()
    lost = [put("a", 5), put("e", 6)]
    table.merge(*lost)
    assert DeltaTable(path).version() == version
    after = [put("b", 7 + number) for number in range(later)]
    for one in after:
        table.merge(one)
    for file in copy.glob("*.parquet"):
        if not (path / file.name).exists():
            shutil.copy(file, path)
    os.replace(copy / entry_of(version), path / entry_of(version))

    with pytest.raises(TableError, match=f"has replaced its version {version}, and the rows"):
        table.merge(put("c", 20))
    assert DeltaTable(path).version() == version + later

    # The way back that the error names.
    if later:
        DeltaTable(path).restore(version)
    table.reopen()
    table.merge(*entries, *lost, *after, put("c", 20))
    newest = {one.key: one.revision for one in (*entries, *lost, *after, put("c", 20))}
    assert live(path) == {**newest, "other": 99}


def test_commit_replaced_in_object_store_ends_query(store: ObjectStore, uri: str) -> None:
    objects = TableObjects.at(uri, store.storage_options)
    table = InProcessTable(uri, storage_options=store.storage_options)
    for number in range(1, 40):
        table.merge(put("a", number))
    objects.put(entry_of(30), objects.get(entry_of(30)) + b"\n")
    with pytest.raises(TableError, match="has replaced its version 30"):
        table.merge(put("a", 50))


def test_table_created_again_is_not_replaced_commit(path: Path) -> None:
    table = InProcessTable(path)
    for number in range(1, 4):
        table.merge(put("a", number))
    shutil.rmtree(path)
    InProcessTable(path).merge(put("b", 1))
    table.merge(put("c", 2))
    assert live(path) == {"b": 1, "c": 2}


def test_expired_entries_are_not_replaced_commits(path: Path) -> None:
    table = InProcessTable(path)
    for number in range(1, 9):
        table.merge(put("a", number))
    DeltaTable(path).create_checkpoint()
    for version in range(7):
        (path / entry_of(version)).unlink()
    table.merge(put("b", 20))
    assert live(path) == {"a": 8, "b": 20}


Proxied = tuple[StoreProxy, dict[str, str]]


@pytest.fixture
def proxied(store: ObjectStore) -> Iterator[Proxied]:
    """A proxy before the store, and the options of a table behind it."""
    with store_proxy(store.url) as proxy:
        yield proxy, {**store.storage_options, "AWS_ENDPOINT_URL": proxy.url}


def test_store_that_ignores_condition_refused_before_anything_is_written(
    store: ObjectStore, uri: str, proxied: Proxied
) -> None:
    proxy, options = proxied
    proxy.unconditional = True
    table = InProcessTable(uri, storage_options=options)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=rf"s3://{BUCKET}: the store replaces"):
            table.merge(put("a", 1))
    left = TableObjects.at(uri, store.storage_options)
    assert list(left.list()) == []
    proxy.unconditional = False
    table.merge(put("a", 1))
    assert not [one for one in left.list() if "probe" in one["path"]]


@pytest.mark.parametrize(
    ("status", "stores"),
    [(None, True), *itertools.product((409, 412, 500, 501), (False, True))],
)
def test_commit_with_other_answer_of_store_merged_once(
    uri: str, proxied: Proxied, status: int | None, stores: bool
) -> None:
    """None: the response is lost, and the commit resembles one of another writer."""
    proxy, options = proxied
    table = InProcessTable(uri, storage_options=options)
    table.merge(put("a", 1), put("b", 2))
    proxy.answers, proxy.stores = [status] if status else [], stores
    proxy.lose = 0 if status else 1
    table.merge(put("a", 3), put("c", 4))
    assert (proxy.answered, proxy.lost) == ((1, 0) if status else (0, 1))
    table.merge(put("d", 5))
    assert DeltaTable(uri, storage_options=options).version() == 3
    assert live(uri, options) == {"a": 3, "b": 2, "c": 4, "d": 5}


def test_store_without_conditional_puts_named(
    store: ObjectStore, uri: str, proxied: Proxied
) -> None:
    proxy, options = proxied
    proxy.answers = [501]
    table = InProcessTable(uri, storage_options={**options, "max_retries": "0"})
    with pytest.raises(TableError, match=r"could not create table.*probe.* 501 Not Impl"):
        table.merge(put("a", 1))
    assert proxy.answered == 1
    assert list(TableObjects.at(uri, store.storage_options).list()) == []


def test_commit_stored_after_time_out_merged_once(uri: str, proxied: Proxied) -> None:
    proxy, options = proxied
    table = InProcessTable(uri, storage_options={**options, "timeout": "2s", "max_retries": "0"})
    table.merge(put("a", 1))
    proxy.delay = True
    with pytest.raises(TableError, match="could not merge the batch"):
        table.merge(put("a", 2), put("b", 3))
    assert proxy.held.is_set()
    proxy.delay = False
    proxy.resume.set()
    opened = DeltaTable(uri, storage_options=options)
    wait_until(lambda: opened.update_incremental() or opened.version() == 2, "the commit")
    assert table.merge(put("a", 2), put("b", 3)) == 0
    assert table.merge(put("c", 4)) == 1
    assert live(uri, options) == {"a": 2, "b": 3, "c": 4}
