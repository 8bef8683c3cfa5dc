"""Paths of tables and names of columns in every form: the engines name and store the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import Engine, merge
from nats_stream_source.delta.location import TableArgument
from nats_stream_source.delta.rules.events import ScdType
from nats_stream_source.delta.spark.columns import quote
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.merge_model import ENGINES, Frame, put
from tests.integration.delta.table_content import live
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta

# How the test's directory and its child `name` become the argument, and the name.
FORMS: dict[str, tuple[Callable[[Path, str], TableArgument], str]] = {
    "parent and slashes": (lambda root, name: f"/{root}//yard/../{name}/", "fleet"),
    "relative": (lambda root, name: f"./{name}", "fleet"),
    "file URI": (lambda root, name: f"file://{root}/{name}", "my fleet"),
    "pathlib": (lambda root, name: Path(name), "fleet"),
    "spaces and signs": (lambda root, name: f"{root}/{name}", "a b+c=d&e#f?g:h;i,j'k\"l*n{o}100%"),
    "unicode": (lambda root, name: root / name, "flotte ü é 艦隊"),
}


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=[] if form in ("file URI", "unicode") else pytest.mark.faults)
        for form in FORMS
    ],
)
def test_engines_name_same_directory(
    frame: Frame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    argument, name = FORMS[form]
    table = argument(tmp_path, name)
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


def named(batch: DataFrame) -> DataFrame:
    """The batch with a column of each name."""
    own = [(F.col("revision") * 100 + i).alias(name) for i, name in enumerate(NAMES)]
    return batch.select("*", *own)


def values(revision: int) -> dict[str, int]:
    return {name: revision * 100 + i for i, name in enumerate(NAMES)}


def test_columns_of_any_name_with_engines_in_turn(frame: Frame, table: Path) -> None:
    for number, engine in enumerate((*ENGINES, "driver"), start=1):
        revisions = number * 10 + 1, number * 10 + 2
        entries = [put(key, revision) for key, revision in zip("ab", revisions, strict=True)]
        merge(named(frame(*entries)), table, engine=engine)
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
    for number, engine in enumerate((*ENGINES, "driver"), start=1):
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
            engine=engine,
        )
        stored = rows_of(DeltaTable(table))
        assert len(stored) == (1 if scd_type == 1 else number)
        assert max(row["state"] for row in stored) == values(number)["state"]


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
