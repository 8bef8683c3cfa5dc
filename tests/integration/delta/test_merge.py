"""``merge`` against the model, with names and paths of any form, in catalog and object store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession, functions as F

from nats_stream_source.delta import (
    Deletes,
    Engine,
    MaintenanceResult,
    maintain,
    merge,
    merge_changes,
    reconcile,
)
from nats_stream_source.errors import ConfigurationError, TableError
from tests.integration.delta.merge_model import (
    ENGINES,
    RECREATED,
    Bucket,
    Entry,
    Frame,
    Merge,
    Model,
    both_modes,
    delete,
    live,
    purge,
    put,
    stored,
    version,
)
from tests.support.delta import rows_of
from tests.support.object_store import ObjectStore

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


def test_table_in_catalog(spark: SparkSession, frame: Frame) -> None:
    spark.sql("CREATE DATABASE IF NOT EXISTS lake")
    for _ in range(2):
        merge_changes("lake.fleet")(frame(put("a", 1)), 0)
    assert [row.key for row in spark.table("lake.fleet").collect()] == ["a"]
    spark.sql("DROP TABLE lake.fleet")


@both_modes
def test_table_in_object_store(
    spark: SparkSession,
    frame: Frame,
    store: ObjectStore,
    uri: str,
    bucket: Bucket,
    deletes: Deletes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both libraries take the keys of the environment: `examples/deploy/kubernetes/s3` has them."""
    options = store.storage_options
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, options.pop(name))
    follow = merge_changes(uri, deletes=deletes, storage_options=options)
    first = bucket.write(("a", "PUT"), ("b", "PUT"))
    second = bucket.write(("a", "DEL"), ("c", "PUT"))
    for number, batch in enumerate((first, second), start=1):
        for _ in range(2):
            follow(frame(*batch), number)
        assert DeltaTable(uri, storage_options=options).version() == number
    assert live(uri, options) == {"b": 2, "c": 4}
    assert len(stored(uri, options)) == (3 if deletes == "mark" else 2)
    assert maintain(spark, uri, storage_options=options) == MaintenanceResult(2, 1)
    target = DeltaTable(uri, storage_options=options)
    assert target.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
    bucket.purge_subjects("b")
    arguments = {"bucket": bucket.name, "servers": bucket.url, "deletes": deletes}
    result = reconcile(spark, uri, storage_options=options, **arguments)
    assert (result.removed, result.kept) == (1, 1)
    assert live(uri, options) == {"c": 4}


def test_object_store_unavailable(frame: Frame, uri: str) -> None:
    options = ObjectStore("http://127.0.0.1:1").storage_options
    options |= {"AWS_SECRET_ACCESS_KEY": "hidden", "max_retries": "0"}
    with pytest.raises(TableError, match=r"could not open table 's3://.*'") as failed:
        merge(frame(put("a", 1)), uri, storage_options=options)
    assert "hidden" not in str(failed.value)


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ("file://", "my fleet"),
        ("", "flotte ü é 艦隊"),
        pytest.param("", "a b+c=d&e#f?g:h;i,j'k\"l*n{o}100%", marks=pytest.mark.faults),
    ],
)
def test_engines_name_same_directory(frame: Frame, tmp_path: Path, scheme: str, name: str) -> None:
    table = f"{scheme}{tmp_path / name}"
    merge(frame(put("a", 1)), table, engine="spark")
    merge(frame(put("b", 2)), table, engine="driver")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert live(tmp_path / name) == {"a": 1, "b": 2}


def test_jvm_that_cannot_encode_path(
    frame: Frame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a JVM in the locale C: it would write "flotte ?"."""
    batch = frame(put("a", 1))
    system = batch.sparkSession._jvm.System
    encoding = system.getProperty("sun.jnu.encoding")
    system.setProperty("sun.jnu.encoding", "ANSI_X3.4-1968")
    try:
        with pytest.raises(ConfigurationError, match=r"names of files as ANSI.*LC_ALL=C.UTF-8"):
            merge(batch, tmp_path / "flotte ü", engine="spark")
    finally:
        system.setProperty("sun.jnu.encoding", encoding)
    assert list(tmp_path.iterdir()) == []


NAMES = (
    *("a.b", "a`b", 'a"b', "a'b", "Größe", "艦", "select", "UPPER", "a%20b", "a-b/c\\d:e", "[x]"),
    *("event", "row", "state", "s", "t", "_row_key", "s.key", "1", "*", "$?"),
)


def values(revision: int) -> dict[str, int]:
    return {name: revision * 100 + i for i, name in enumerate(NAMES)}


# Names that the engine for events gives to its own columns, too.
OF_NAMES = {"keys": ["row", "a.b", "s.key"], "sequence_by": ["state", "a`b"]}
HISTORY = {"stored_as_scd_type": 2, "track_history_column_list": OF_NAMES["sequence_by"]}


@pytest.mark.parametrize(
    "rules",
    [{}, pytest.param(OF_NAMES, marks=pytest.mark.faults), {**OF_NAMES, **HISTORY}],
    ids=["entries", "events", "history"],
)
def test_columns_of_any_name_with_engines_in_turn(
    frame: Frame, table: Path, rules: dict[str, Any]
) -> None:
    for number, engine in enumerate((*ENGINES, "driver"), start=1):
        expected = {**values(number), **dict.fromkeys(rules.get("keys", ()), 7)}
        own = [F.lit(value).alias(name) for name, value in expected.items()]
        merge(frame(put("a", number)).select("*", *own), table, engine=engine, **rules)
        rows = sorted(rows_of(DeltaTable(table)), key=lambda row: row["state"])
        assert len(rows) == (number if "stored_as_scd_type" in rules else 1)
        assert {name: rows[-1][name] for name in NAMES} == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_values_without_type_become_those_of_column(
    frame: Frame, table: Path, engine: Engine
) -> None:
    own = "array(1) AS list", "map('a', 1) AS map", "named_struct('x', 1, 'y', 2) AS struct"
    void = "array() AS list", "map('b', NULL) AS map", "named_struct('x', NULL) AS struct"
    for revision, columns in ((1, own), (2, void)):
        merge(frame(put("a", revision)).selectExpr("*", *columns), table, engine=engine)
    (row,) = rows_of(DeltaTable(table))
    found = row["list"], dict(row["map"]), row["struct"]
    assert found == ([], {"b": None}, {"x": None, "y": None})
