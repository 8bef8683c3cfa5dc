"""The table of refusals, and which directory the text of a table names or is refused for."""

from __future__ import annotations

import os
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
from nats_stream_source.delta.schema import opaque_type
from nats_stream_source.errors import ConfigurationError

VECTORS = {"deletionVectors", "appendOnly", "invariants"}


@pytest.mark.parametrize(
    ("features", "properties", "problem"),
    [
        (VECTORS, {"delta.enableDeletionVectors": "true"}, None),
        ({*VECTORS, "changeDataFeed"}, {"delta.enableChangeDataFeed": "false"}, None),
        ({"rowTracking", "clustering"}, {}, "the driver lacks (clustering, rowTracking)"),
        (set(), {"delta.enableChangeDataFeed": "true"}, "delta.enableChangeDataFeed=true"),
        (set(), {"delta.appendOnly": "TRUE"}, "append-only (delta.appendOnly=TRUE)"),
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
        (field(pa.binary()), ["c"], "'c' is a BINARY"),
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
        ("/lake/a%20b", "file:///", "does not take '%20' in a path literally"),
    ],
)
def test_location_of_driver(table: str, filesystem: str | None, problem: str | None) -> None:
    found = TableLocation(table).driver_problem(filesystem)
    assert found is None if problem is None else problem in str(found)
