"""The table of refusals and its look-up by features, properties, columns and paths."""

from __future__ import annotations

import pyarrow as pa
import pytest

from nats_stream_source.delta.refused import (
    REFUSED,
    column_problem,
    feature_problem,
    implied_features,
    path_outside,
)
from nats_stream_source.delta.schema import opaque_type

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
