"""``merge`` against the model, with columns of the user, in the catalog and in object stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import (
    Deletes,
    MaintenanceResult,
    maintain,
    merge,
    merge_changes,
    reconcile,
)
from nats_stream_source.errors import TableError
from tests.integration.delta.driver.in_process import InProcessTable
from tests.integration.delta.kv_bucket import Bucket
from tests.integration.delta.merge_model import (
    RECREATED,
    Entry,
    Frame,
    Merge,
    Model,
    both_modes,
    delete,
    purge,
    put,
    spark_in_faults,
)
from tests.integration.delta.table_content import live, stored, version
from tests.support.object_store import ObjectStore, StoreProxy, store_proxy

pytestmark = pytest.mark.delta


BATCHES: list[list[Entry]] = [
    [],
    [put("a", 3), put("a", 1), put("b", 2), put("c", 4), delete("d", 5), put("e", 6, value=b"")],
    [delete("a", 2), purge("b", 7), put("c", 8, value=None), put("d", 4), put("e", 6)],
    [put("b", 9), put("c", 7), put("a", 1, RECREATED)],
]


@both_modes
def test_entries_of_batches_are_merged(
    frame: Frame, table: Path, deletes: Deletes, merge: Merge
) -> None:
    """One way through each engine; tests/unit/delta/rules/test_entries.py has the cases."""
    model = Model(deletes)
    for number, batch in enumerate(BATCHES):
        for _ in range(2):  # a repeated batch makes no version
            merge(frame(*batch), str(table), deletes=deletes)
        model.merge(batch)
        assert stored(table) == model.stored()
        assert version(table) == number
    names = DeltaTable(table).schema().to_arrow().names
    assert set(names) == set(put("a", 1).stored(deletes))


def test_model_follows_rules() -> None:
    # Expected rows written by hand, so that the model does not repeat an error of the code.
    removed, marked = Model("remove"), Model("mark")
    for model in (removed, marked):
        model.merge([put("a", 1), put("a", 3), put("b", 2)])
        model.merge([delete("a", 4), put("b", 1), delete("c", 5)])
    assert list(removed.rows.values()) == [put("b", 2)]
    assert list(marked.rows.values()) == [delete("a", 4), put("b", 2), delete("c", 5)]


@spark_in_faults
def test_columns_of_user(frame: Frame, table: Path, merge: Merge) -> None:
    """Parsed and dropped columns, a column name with a hyphen, and a column of the table only."""

    def parsed(*entries: Entry) -> DataFrame:
        text = F.col("value").cast("string")
        columns = frame(*entries).drop("value", "bucket", "created", "initial")
        return (
            frame(*entries)
            .withColumn("at", F.split(text, "@")[1].cast("int"))
            .withColumn("tags", F.create_map(F.lit("text"), text))
            .withColumn("a-b", F.lit(True))
            .select(*columns.columns, "at", "tags", "a-b")
        )

    merge(parsed(put("a", 1), put("b", 2)), str(table), deletes="mark")
    spark = frame().sparkSession
    spark.sql(f"ALTER TABLE delta.`{table}` ADD COLUMN note STRING")
    spark.sql(f"UPDATE delta.`{table}` SET note = 'mine' WHERE key = 'a'")
    merge(parsed(put("a", 3), delete("b", 4), put("c", 5)), str(table), deletes="mark")
    assert [
        (row["key"], row["at"], row["tags"], row["note"], row["deleted"]) for row in stored(table)
    ] == [
        ("a", 3, [("text", "a@3")], "mine", False),
        ("b", None, None, None, True),
        ("c", 5, [("text", "c@5")], None, False),
    ]
    assert not {"value", "bucket", "created", "delta", "initial"} & set(stored(table)[0])


def test_table_in_catalog(spark: SparkSession, frame: Frame) -> None:
    spark.sql("CREATE DATABASE IF NOT EXISTS lake")
    for _ in range(2):
        merge_changes("lake.fleet")(frame(put("a", 1)), 0)
    assert [row.key for row in spark.table("lake.fleet").collect()] == ["a"]
    spark.sql("DROP TABLE lake.fleet")


@pytest.fixture
def proxy(store: ObjectStore) -> Iterator[StoreProxy]:
    with store_proxy(store.url) as proxy:
        yield proxy


def version_at(uri: str, options: dict[str, str]) -> int:
    return DeltaTable(uri, storage_options=options).version()


@both_modes
def test_table_in_object_store(
    frame: Frame, store: ObjectStore, uri: str, deletes: Deletes
) -> None:
    follow = merge_changes(uri, deletes=deletes, storage_options=store.storage_options)
    batches = [[put("a", 1), put("b", 2)], [delete("a", 3), put("c", 4)]]
    model = Model(deletes)
    for number, batch in enumerate(batches):
        model.merge(batch)
        for _ in range(2):
            follow(frame(*batch), number)
        found = [(row["key"], row["revision"]) for row in stored(uri, store.storage_options)]
        assert found == sorted((key, entry.revision) for key, entry in model.rows.items())
        assert version_at(uri, store.storage_options) == number + 1


def test_keys_of_object_store_from_environment(
    frame: Frame, store: ObjectStore, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both libraries read them there: `examples/deploy/kubernetes/s3` has no key in an argument."""
    options = store.storage_options
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, options.pop(name))
    for batch in ([put("a", 1), put("b", 2)], [delete("a", 3)]):
        merge(frame(*batch), uri, storage_options=options)
    assert live(uri, options) == {"b": 2}


def test_reconcile_in_object_store(
    spark: SparkSession, frame: Frame, store: ObjectStore, uri: str, bucket: Bucket
) -> None:
    options = store.storage_options
    merge(frame(*bucket.write(("a", "PUT"), ("b", "PUT"))), uri, storage_options=options)
    bucket.purge_subjects("a")
    result = reconcile(spark, uri, bucket=bucket.name, servers=bucket.url, storage_options=options)
    assert (result.removed, result.kept) == (1, 1)
    assert live(uri, options) == {"b": 2}


def test_upkeep_in_object_store(spark: SparkSession, store: ObjectStore, uri: str) -> None:
    options = store.storage_options
    for revision, key in enumerate("abcd", start=1):
        InProcessTable(uri, storage_options=options).merge(put(key, revision))
    result = maintain(spark, uri, storage_options=options)
    assert result == MaintenanceResult(compacted=4, written=1)
    target = DeltaTable(uri, storage_options=options)
    deleted = target.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    assert len(deleted) >= 4
    assert live(uri, options) == {key: revision for revision, key in enumerate("abcd", start=1)}


def test_commit_with_lost_response_is_merged_once(
    frame: Frame, store: ObjectStore, proxy: StoreProxy, uri: str
) -> None:
    """The commit resembles one of another writer. The merge is repeated, and no row changes."""
    merge(frame(put("a", 1), put("b", 2)), uri, storage_options=store.storage_options)
    proxy.lose = 1
    through_proxy = {**store.storage_options, "AWS_ENDPOINT_URL": proxy.url}
    merge(frame(put("a", 3), put("c", 4)), uri, storage_options=through_proxy)
    assert proxy.lost == 1
    assert live(uri, store.storage_options) == {"a": 3, "b": 2, "c": 4}
    assert version_at(uri, store.storage_options) == 2


def test_object_store_unavailable(frame: Frame, uri: str) -> None:
    options = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "max_retries": "0",
    }
    with pytest.raises(TableError, match=r"could not open table 's3://.*'") as failed:
        merge(frame(put("a", 1)), uri, storage_options=options)
    assert "hidden" not in str(failed.value)
