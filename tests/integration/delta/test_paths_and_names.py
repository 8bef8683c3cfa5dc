"""Paths of tables and names of columns in every form: one contract for all engines.

Each engine names the same directory and stores the same columns, or refuses before it has written
anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from delta.tables import DeltaTable as DeltaTableOfSpark
from deltalake import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import IntegerType, StructField, StructType

from nats_stream_source.delta import maintain, merge
from nats_stream_source.delta.cdc.rules import ScdType
from nats_stream_source.delta.driver.merge_on_read.creation import put_first_version
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.location import TableArgument
from nats_stream_source.delta.table import EngineRefusedError, quote
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.cdc.conftest import ENGINES
from tests.integration.delta.merge_model import Frame, put
from tests.integration.delta.table_content import live
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta

# How the test's directory and its child `name` become the argument, and the name.
FORMS: dict[str, tuple[Callable[[Path, str], TableArgument], str]] = {
    "trailing slash": (lambda root, name: f"{root}/{name}/", "fleet"),
    "two slashes": (lambda root, name: f"/{root}//{name}", "fleet"),
    "parent": (lambda root, name: f"{root}/yard/../{name}", "fleet"),
    "relative": (lambda root, name: f"./{name}", "fleet"),
    "file URI": (lambda root, name: f"file://{root}/{name}", "my fleet"),
    "pathlib": (lambda root, name: Path(name), "fleet"),
    "spaces and signs": (lambda root, name: f"{root}/{name}", "a b+c=d&e#f?g:h;i,j'k\"l*n{o}100%"),
    "unicode": (lambda root, name: root / name, "flotte ü é 艦隊"),
}


@pytest.mark.parametrize("form", FORMS)
def test_engines_name_same_directory(
    frame: Frame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    argument, name = FORMS[form]
    table = argument(tmp_path, name)
    merge(frame(put("a", 1)), table, engine="spark")
    merge(frame(put("b", 2)), table, engine="delta-rs")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert live(tmp_path / name) == {"a": 1, "b": 2}


def test_path_that_delta_rs_cannot_name(frame: Frame, tmp_path: Path) -> None:
    """With the default engine Spark takes over, for the state table and upkeep too."""
    table = tmp_path / "a%20b[c]\\d|e^f"
    with pytest.raises(ConfigurationError, match="'%20' in a path literally"):
        merge(frame(put("a", 1)), table, engine="delta-rs")
    with pytest.raises(ConfigurationError, match="write the path without a scheme"):
        merge(frame(put("a", 1)), f"file://{table}")
    assert list(tmp_path.iterdir()) == []
    for revision in (1, 2):
        merge(frame(put("a", revision)), table, stored_as_scd_type=2, upkeep=None)
    maintain(frame().sparkSession, table)
    names = {table.name, f"{table.name}__cdc_state"}
    assert {path.name for path in tmp_path.iterdir()} == names
    versions = frame().sparkSession.read.format("delta").load(str(table))
    assert versions.select("revision").orderBy("revision").collect() == [(1,), (2,)]


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


def named(batch: DataFrame) -> DataFrame:
    """The batch with a column of each name."""
    own = [(F.col("revision") * 100 + i).alias(name) for i, name in enumerate(NAMES)]
    return batch.select("*", *own)


def values(revision: int) -> dict[str, int]:
    return {name: revision * 100 + i for i, name in enumerate(NAMES)}


def test_columns_of_any_name_with_engines_in_turn(frame: Frame, table: Path) -> None:
    for number, engine in enumerate(ENGINES.values(), start=1):
        revisions = number * 10 + 1, number * 10 + 2
        entries = [put(key, revision) for key, revision in zip("ab", revisions, strict=True)]
        merge(named(frame(*entries)), table, **engine)
        stored = sorted(rows_of(DeltaTable(table)), key=lambda row: str(row["key"]))
        assert [{name: row[name] for name in NAMES} for row in stored] == list(
            map(values, revisions)
        )


@pytest.mark.parametrize("scd_type", [pytest.param(1, marks=pytest.mark.faults), 2])
def test_keys_and_sequence_of_any_name_with_engines_in_turn(
    frame: Frame, table: Path, scd_type: ScdType
) -> None:
    """Names that the engine for events gives to its own columns, too."""
    keys, order = ["row", "a.b", "s.key"], ["state", "a`b"]
    for number, engine in enumerate(ENGINES.values(), start=1):
        batch = named(frame(put("a", number))).select(
            *(quote(name) if name in order else F.lit(7).alias(name) for name in NAMES)
        )
        merge(
            batch,
            table,
            keys=keys,
            sequence_by=order,
            stored_as_scd_type=scd_type,
            track_history_column_list=order if scd_type == 2 else None,
            **engine,
        )
        stored = rows_of(DeltaTable(table))
        assert len(stored) == (1 if scd_type == 1 else number)
        assert max(row["state"] for row in stored) == values(number)["state"]


def refused(error: str, *names: str) -> tuple[str, tuple[str, ...]]:
    return error, names


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("error", "names"),
    [
        *(refused(f"has {sign!r} in its name", f"a{sign}b") for sign in " ,;{}()\n\t="),
        refused("has an empty name", ""),
        refused("columns 'a' and 'A', whose names Delta Lake does not distinguish", "a", "A"),
        refused("columns 'key' and 'KEY'", "KEY"),
        refused("columns 'delta' and 'Delta'", "Delta"),
        refused("begin with '_nats_stream_source_'", "_nats_stream_source_row"),
        *(
            refused(f"column '{name}', and Delta Lake or delta-rs has a column of this name", name)
            for name in (
                "_source_row_present_",
                "_Target_Row_Present_",
                "_row_dropped_",
                "__delta_internal_is_row_deleted",
                "__delta_rs_source",
                "__delta_rs_target",
                "__delta_rs_operation",
            )
        ),
    ],
)
def test_column_that_no_engine_stores(
    frame: Frame, table: Path, engine: str, error: str, names: tuple[str, ...]
) -> None:
    batch = frame(put("a", 1)).select("*", *(F.lit(1).alias(name) for name in names))
    with pytest.raises(ConfigurationError, match=re.escape(error)):
        merge(batch, table, **ENGINES[engine])
    assert not table.exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_field_that_no_engine_stores(frame: Frame, table: Path, engine: str) -> None:
    field = F.array(F.struct(F.lit(1).alias("a b")))
    with pytest.raises(ConfigurationError, match="column 'a b' has ' ' in its name"):
        merge(frame(put("a", 1)).withColumn("n", field), table, **ENGINES[engine])
    assert not table.exists()


def twin_fields() -> Column:
    """An array of structs whose fields differ in case only, whatever the session's settings."""
    return F.array(F.struct(F.lit(1).alias("x"), F.lit(2).alias("X")))


@pytest.mark.parametrize("engine", ENGINES)
def test_fields_that_differ_in_case_are_refused_before_table_is_created(
    frame: Frame, table: Path, engine: str
) -> None:
    batch = frame(put("a", 1)).withColumn("n", twin_fields())
    for rules in ({}, {"stored_as_scd_type": 2}, {"sequence_by": "n[0]"}):
        with pytest.raises(ConfigurationError, match="has the fields 'x' and 'X'"):
            merge(batch, table, **rules, **ENGINES[engine])
    assert list(table.parent.iterdir()) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_fields_that_differ_in_case_are_not_added(frame: Frame, table: Path, engine: str) -> None:
    """A table with such fields could not be opened any more."""
    own = F.array(F.struct(F.lit(1).alias("x")))
    merge(
        frame(put("a", 1)).withColumn("own", own),
        table,
        engine="delta-rs",
        deletion_vectors=engine == "merge-on-read",
    )
    version = DeltaTable(table).version()
    for name in ("n", "own"):
        batch = frame(put("a", 2)).withColumn(name, twin_fields())
        with pytest.raises(ConfigurationError, match=f"column '{name}' has the fields 'x' and 'X'"):
            merge(batch, table, **ENGINES[engine])
    assert DeltaTable(table).version() == version
    assert live(table) == {"a": 1}


def test_version_that_delta_rs_could_not_read_is_not_committed(table: Path) -> None:
    fields = StructType([StructField("x", IntegerType()), StructField("X", IntegerType())])
    schema, storage = StructType([StructField("n", fields)]), TableStorage("fleet", str(table))
    for put_version in (put_first_version, TableStorage.put_copy_on_write):
        with pytest.raises(EngineRefusedError, match="Duplicate field name"):
            put_version(storage, schema, {})
    assert not table.exists()


# Values of types that Delta Lake does not store, and the part of the type that the error names.
TYPES = {
    "array()": "VOID",
    "map('a', NULL)": "VOID",
    "named_struct('x', NULL)": "a struct without fields",
    "array(named_struct('x', NULL))": "a struct without fields",
    "named_struct('x', 1, 'y', array())": "VOID",
    "INTERVAL 1 DAY": "INTERVAL DAY",
    "make_interval(1, 2)": "INTERVAL",
    "array(TIME '12:00:00')": "TIME",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_type_that_no_engine_stores(frame: Frame, tmp_path: Path, engine: str) -> None:
    """Refused before a table is created or changed, with each form of a merge."""
    new, table = tmp_path / "new", tmp_path / "fleet"
    own = F.expr("named_struct('x', 1)").alias("n")
    merge(
        frame(put("a", 1)).select("*", own),
        table,
        engine="delta-rs",
        deletion_vectors=engine == "merge-on-read",
    )
    version = DeltaTable(table).version()
    for value, part in TYPES.items():
        batch = frame(put("a", 2)).select("*", F.expr(value).alias("m"))
        field = F.struct(F.lit(1).alias("x"), F.expr(value).alias("z")).alias("n")
        in_struct = frame(put("a", 2)).select("*", field)
        for refused, target, rules in (
            (batch, new, {}),
            (batch, new, {"stored_as_scd_type": 2}),
            (batch, table, {}),
            (in_struct, table, {}),
        ):
            error = f"column '[mn]' is .*, and Delta Lake does not store {part}"
            with pytest.raises(ConfigurationError, match=error):
                merge(refused, target, **rules, **ENGINES[engine])
    assert list(tmp_path.iterdir()) == [table]
    assert DeltaTable(table).version() == version


@pytest.mark.parametrize("engine", ENGINES)
def test_values_without_type_become_those_of_column(frame: Frame, table: Path, engine: str) -> None:
    own = "array(1) AS list", "map('a', 1) AS map", "named_struct('x', 1, 'y', 2) AS struct"
    void = "array() AS list", "map('b', NULL) AS map", "named_struct('x', NULL) AS struct"
    for revision, columns in ((1, own), (2, void)):
        merge(frame(put("a", revision)).selectExpr("*", *columns), table, **ENGINES[engine])
    (row,) = rows_of(DeltaTable(table))
    found = row["list"], dict(row["map"]), row["struct"]
    assert found == ([], {"b": None}, {"x": None, "y": None})


@pytest.mark.parametrize("engine", ENGINES)
def test_added_column_that_no_engine_stores(frame: Frame, table: Path, engine: str) -> None:
    merge(frame(put("a", 1)), table, engine="delta-rs", deletion_vectors=engine == "merge-on-read")
    version = DeltaTable(table).version()
    with pytest.raises(ConfigurationError, match="column 'a b' has ' ' in its name"):
        merge(frame(put("a", 2)).withColumn("a b", F.lit(1)), table, **ENGINES[engine])
    assert DeltaTable(table).version() == version


def test_names_in_table_with_column_mapping(frame: Frame, spark: SparkSession, table: Path) -> None:
    """Each engine that can change such a table stores any name."""
    batch = frame(put("a", 1)).withColumn("a b;c", F.col("revision"))
    builder = (
        DeltaTableOfSpark.create(spark)
        .location(str(table))
        .addColumns(batch.drop("delta", "initial").schema)
    )
    builder.property("delta.columnMapping.mode", "name").execute()
    merge(batch, table, engine="spark")
    batch = frame(put("b", 2)).withColumn("a b;c", F.col("revision"))
    merge(batch, table, engine="delta-rs")
    assert sorted(row["a b;c"] for row in rows_of(DeltaTable(table))) == [1, 2]
