"""Columns as Arrow types, the table of refusals, and which directory a table's text names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.delta.location import TableArgument, TableLocation
from nats_stream_source.delta.refused import (
    REFUSED,
    column_problem,
    feature_problem,
    implied_features,
    path_outside,
)
from nats_stream_source.delta.rules.layout import Layout
from nats_stream_source.delta.schema import (
    TIMESTAMP,
    conform,
    opaque_type,
    require_not_null,
    require_storable_names,
    sql_type,
    stored_field,
    validate_names,
    widened_columns,
    with_new_columns,
)
from nats_stream_source.errors import ConfigurationError

ENTRY = pa.schema([("key", pa.string()), ("revision", pa.int64())])
I8, I16, I32, I64 = pa.int8(), pa.int16(), pa.int32(), pa.int64()
ODD_MAP = pa.map_(pa.string(), pa.struct([("x=y", I8)]))


def struct(**fields: pa.DataType) -> pa.DataType:
    return pa.struct(list(fields.items()))


@pytest.mark.parametrize(
    ("own", "given", "united"),
    [
        (I64, I64, I64),
        (I64, I32, I64),
        (I32, I64, I64),
        (I8, pa.float64(), pa.float64()),
        (pa.float64(), I32, pa.float64()),
        (pa.float64(), pa.float32(), pa.float64()),
        (pa.timestamp("us"), pa.date32(), pa.timestamp("us")),
        (TIMESTAMP, pa.timestamp("us", tz="Europe/Berlin"), TIMESTAMP),
        (pa.decimal128(10, 2), pa.decimal128(12, 4), pa.decimal128(12, 4)),
        (pa.decimal128(12, 2), I32, pa.decimal128(12, 2)),
        (pa.decimal128(10, 2), I64, pa.decimal128(21, 2)),
        (pa.string(), pa.null(), pa.string()),
        (pa.string(), pa.large_string(), pa.string()),
        (struct(x=I8), struct(x=I16, y=I8), struct(x=I16, y=I8)),
        (struct(x=I8, y=I8), struct(y=I8), struct(x=I8, y=I8)),
        (pa.list_(I8), pa.list_(I16), pa.list_(I16)),
        (pa.map_(pa.string(), I8), pa.map_(pa.string(), I16), pa.map_(pa.string(), I16)),
        (I64, pa.float64(), None),
        (pa.string(), I64, None),
        (pa.timestamp("us"), TIMESTAMP, None),
        (pa.decimal128(38, 2), pa.decimal128(38, 4), None),
        (struct(x=I8), struct(X=I8), None),
    ],
)
def test_types_of_table_and_batch_united(
    own: pa.DataType, given: pa.DataType, united: pa.DataType | None
) -> None:
    schema = pa.schema([("c", own)])
    if united is None:
        with pytest.raises(ConfigurationError, match=r"column 'c' is .* in the batch"):
            with_new_columns("lake", schema, [pa.field("c", given)])
        return
    new = with_new_columns("lake", schema, [pa.field("c", given)])
    assert sql_type(new.field("c").type) == sql_type(united)
    assert (new is schema) == (sql_type(own) == sql_type(united))


def test_new_column_nullable_with_comment_only() -> None:
    """The rest would be rules of another table, with which this one could not be read."""
    rules = {
        "CURRENT_DEFAULT": "5",
        "delta.generationExpression": "x + 1",
        "delta.invariants": "x > 0",
        "delta.columnMapping.physicalName": "col-x",
        "__CHAR_VARCHAR_TYPE_STRING": "char(3)",
        "comment": "speed",
    }
    kind = pa.struct([pa.field("x", I8, False, rules), pa.field("v", pa.null())])
    field = pa.field("s", kind, False, rules)
    described = {"comment": "speed"}
    kept = pa.field("s", pa.struct([pa.field("x", I8, metadata=described)]), metadata=described)
    stored = with_new_columns("lake", pa.schema([]), [field, pa.field("v", pa.null())])
    created = Layout.of_entries(ENTRY.names, "remove").table_schema(ENTRY.append(field))
    for schema in (stored, created):
        assert schema.field("s").equals(kept, check_metadata=True)
    assert stored.names == ["s"]
    assert stored_field(field).equals(kept, check_metadata=True)


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        (pa.field("KEY", I8), "'KEY' and the table's column 'key' differ in case only"),
        (pa.field("s", struct(x=I8, X=I8)), "the fields 'x' and 'X'"),
        (pa.field("a", pa.list_(pa.null())), "does not store VOID"),
        (pa.field("s", struct(v=pa.null())), "a struct without fields of a type"),
        (pa.field("v", opaque_type("variant")), "column 'v' is VARIANT in the batch, cast"),
    ],
)
def test_column_that_table_cannot_store_refused(field: pa.Field, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        with_new_columns("lake", pa.schema([("key", pa.string())]), [field])


def test_only_added_fields_outside_of_maps_leave_files_as_they_are() -> None:
    own = pa.schema(
        [
            ("s", struct(x=I8)),
            ("a", pa.list_(struct(x=I8))),
            ("m", pa.map_(pa.string(), struct(x=I8))),
            ("n", I8),
        ]
    )
    more = struct(x=I8, y=I8)
    new = pa.schema(
        [("s", more), ("a", pa.list_(more)), ("m", pa.map_(pa.string(), more)), ("n", I16)]
    )
    assert widened_columns(own, new) == ["m", "n"]


def test_rows_conformed_by_name() -> None:
    rows = pa.table({"s": [{"y": 1, "x": 2}], "n": pa.array([7], I32), "other": [0]})
    schema = pa.schema([("n", I64), ("s", struct(x=I64, y=I64, z=I8)), ("v", pa.string())])
    assert conform(rows, schema, "lake").to_pylist() == [
        {"n": 7, "s": {"x": 2, "y": 1, "z": None}, "v": None}
    ]


def test_null_in_not_null_column_named() -> None:
    schema = pa.schema([pa.field("k", I64), pa.field("n", I64, nullable=False)])
    rows = conform(pa.table({"k": [1]}), schema, "lake")
    with pytest.raises(ConfigurationError, match="column 'n', or a part of it, is NOT NULL"):
        require_not_null("lake", rows)


@pytest.mark.parametrize(
    ("validate", "problem"),
    [
        (lambda: validate_names(["a", "A"]), "'a' and 'A', whose names"),
        (lambda: validate_names(["_Row_Dropped_"]), "has a column of this name while it merges"),
        (lambda: validate_names(["_nats_stream_source_x"]), "are reserved"),
        (lambda: require_storable_names("t", pa.schema([("a b", I8)])), "'a b' has ' ' in its"),
        (lambda: require_storable_names("t", pa.schema([("m", ODD_MAP)])), "'x=y' has '='"),
        (lambda: require_storable_names("t", pa.schema([("", I8)])), "has an empty name"),
    ],
)
def test_names_of_columns_refused(validate: Callable[[], None], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        validate()


VECTORS = {"deletionVectors", "appendOnly", "invariants"}


@pytest.mark.parametrize(
    ("features", "properties", "problem"),
    [
        (VECTORS, {"delta.enableDeletionVectors": "true"}, None),
        ({*VECTORS, "changeDataFeed"}, {"delta.enableChangeDataFeed": "false"}, None),
        ({"rowTracking", "clustering"}, {}, "the driver lacks (clustering, rowTracking)"),
        (set(), {"delta.enableChangeDataFeed": "true"}, "delta.enableChangeDataFeed=true"),
        (set(), {"delta.columnMapping.mode": "name"}, "delta.columnMapping.mode=name"),
        (set(), {"delta.columnMapping.mode": "none"}, None),
        (set(), {"delta.constraints.positive": "n > 0"}, "constraint (positive)"),
    ],
)
def test_feature_or_property_found(
    features: set[str], properties: dict[str, str], problem: str | None
) -> None:
    found = feature_problem(features, properties)
    assert found is None if problem is None else problem in str(found)


def field(kind: pa.DataType, **metadata: str) -> pa.Field:
    return pa.field("c", kind, metadata=metadata)


@pytest.mark.parametrize(
    ("field", "partitions", "problem"),
    [
        (field(pa.int64()), ["c"], None),
        (field(pa.string(), comment="x"), ["c"], None),
        (field(pa.timestamp("us", tz="UTC")), [], None),
        (field(pa.timestamp("us", tz="UTC")), ["c"], "'c' is a TIMESTAMP"),
        (field(pa.timestamp("us")), ["c"], "'c' is a TIMESTAMP_NTZ"),
        (field(pa.float64()), ["c"], "'c' is a DOUBLE"),
        (field(pa.float32()), ["c"], "'c' is a FLOAT"),
        (field(opaque_type("variant")), [], "Arrow lacks the type of column 'c'"),
        (field(pa.string(), __CHAR_VARCHAR_TYPE_STRING="char(3)"), [], "has a declared length"),
        (field(pa.int64(), **{"delta.generationExpression": "n + 1"}), [], "'c' is generated"),
        (field(pa.int64(), **{"delta.identity.step": "1"}), [], "'c' is an identity column"),
        (field(pa.int64(), **{"delta.invariants": "c > 0"}), [], "'c' has an invariant"),
    ],
)
def test_column_found(field: pa.Field, partitions: list[str], problem: str | None) -> None:
    found = column_problem(pa.schema([field]), partitions)
    assert found is None if problem is None else problem in str(found)


def test_refusal_of_both_engines_names_action() -> None:
    with pytest.raises(ConfigurationError, match=r"\(delta.appendOnly=TRUE\); unset it"):
        feature_problem((), {"delta.appendOnly": "TRUE"})
    with pytest.raises(ConfigurationError, match=r"'c' is a BINARY, .*; replay the events"):
        column_problem(pa.schema([field(pa.binary())]), ["c"])


@pytest.mark.parametrize("path", ["file:/lake/a", "s3a://lake/a%20b", "/lake/a", "file:///lake/a"])
def test_data_file_outside_of_table_found(path: str) -> None:
    assert path_outside(["a", path]) is not None
    assert path_outside(["a.parquet", "b=c%3A%2Fd/a.parquet", "b:c/a", "a%3A/b"]) is None


def test_legacy_protocol_implies_features() -> None:
    assert implied_features(1) == set()
    assert implied_features(2) == {"appendOnly", "invariants"}
    assert "identityColumns" in implied_features(6)
    assert implied_features(7) == set()
    assert "columnMapping" not in implied_features(4)


def test_rows_have_reason_and_action() -> None:
    assert len({(row.kind, row.name) for row in REFUSED}) == len(REFUSED)
    assert all(row.reason and row.action for row in REFUSED)


@pytest.mark.parametrize(
    ("table", "uri"),
    [
        ("/lake/fleet", "/lake/fleet"),
        ("/lake/fleet/", "/lake/fleet"),
        ("//lake/fleet", "/lake/fleet"),
        ("/lake//fleet", "/lake/fleet"),
        ("/lake/yard/../fleet/.", "/lake/fleet"),
        ("./fleet", "{cwd}/fleet"),
        ("../fleet", "{parent}/fleet"),
        ("lake/fleet", "{cwd}/lake/fleet"),
        (PurePosixPath("fleet"), "{cwd}/fleet"),
        (PurePosixPath("/lake/my fleet"), "/lake/my fleet"),
        ("/lake/100%/ü#?", "/lake/100%/ü#?"),
        ("file:/lake/fleet", "/lake/fleet"),
        ("file:///lake//fleet/", "/lake/fleet"),
        ("file://localhost/lake/my fleet", "/lake/my fleet"),
        ("FILE:///lake/../fleet", "/fleet"),
        ("s3://bucket/lake//fleet/", "s3://bucket/lake/fleet"),
        ("s3://bucket/lake/../fleet", "s3://bucket/fleet"),
        ("s3://bucket", "s3://bucket"),
        ("abfss://c@account.dfs/lake/", "abfss://c@account.dfs/lake"),
    ],
)
def test_uri_of_table(table: TableArgument, uri: str) -> None:
    cwd = os.getcwd()
    expected = uri.format(cwd=cwd, parent=str(Path(cwd).parent))
    location = TableLocation(table)
    assert location.is_path
    assert location.uri == expected


@pytest.mark.parametrize("table", ["fleet", "lake.fleet", "delta.`/lake/fleet`", "`a/b`"])
def test_name_in_catalog_is_unchanged(table: str) -> None:
    location = TableLocation(table)
    assert not location.is_path
    assert location.name == location.uri == table


def test_working_directory_changed_after_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = TableLocation("./fleet")
    before = location.uri
    monkeypatch.chdir(tmp_path)
    assert location.uri == before


@pytest.mark.parametrize(
    ("table", "arguments", "problem"),
    [
        ("file://host/lake", {}, "a URI with a host; write file:///"),
        ("/lake/\udcff", {}, r"a path with '\\udcff'.*rename"),
        ("/lake/back`quote", {}, "a path with '`'"),
        ("/lake/a\0b", {}, r"a path with '\\x00'"),
        ("/lake/a%20b", {"engine": "driver"}, "'%20' in a path literally; rename .*'spark'"),
        ("/lake/a[b]", {"engine": "driver"}, r"'\[' in a path"),
        ("/lake/a\\b", {"engine": "driver"}, r"'\\\\' in a path"),
        ("s3://b/a#b", {"engine": "driver"}, "'#' in a path"),
    ],
)
def test_path_that_engines_read_differently(
    table: str, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"invalid argument: table is .*{problem}"):
        TableLocation(table, **arguments)


@pytest.mark.parametrize(
    ("table", "filesystem", "problem"),
    [
        ("/lake/fleet", "file:///", None),
        ("file:///lake/fleet", "hdfs://nodes", None),
        ("fleet", "file:///", "a name in the catalog"),
        ("/lake/fleet", "hdfs://nodes", "paths without a scheme are in hdfs://nodes"),
        ("/lake/fleet", None, "with Spark Connect"),
        ("s3://lake/fleet", "file:///", "storage_options are not given"),
        ("s3a://lake/fleet", "file:///", "scheme 's3a'"),
        ("/lake/a%20b", "file:///", "does not take '%20' in a path literally"),
    ],
)
def test_location_of_driver(table: str, filesystem: str | None, problem: str | None) -> None:
    found = TableLocation(table).driver_problem(filesystem)
    assert found is None if problem is None else problem in str(found)
