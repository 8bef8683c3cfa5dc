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


@pytest.mark.parametrize(
    ("field", "partitions", "problem"),
    [
        (pa.field("n", pa.int64()), ["n"], None),
        (pa.field("s", pa.string(), metadata={"comment": "x"}), ["s"], None),
        (pa.field("t", pa.timestamp("us", tz="UTC")), [], None),
        (pa.field("t", pa.timestamp("us", tz="UTC")), ["t"], "'t' is a TIMESTAMP"),
        (pa.field("d", pa.float64()), ["d"], "'d' is a DOUBLE"),
        (pa.field("b", pa.binary()), ["b"], "'b' is a BINARY"),
        (pa.field("v", opaque_type("variant")), [], "Arrow lacks the type of column 'v'"),
        (
            pa.field("c", pa.string(), metadata={"__CHAR_VARCHAR_TYPE_STRING": "char(3)"}),
            [],
            "'c' has a declared length",
        ),
        (
            pa.field("g", pa.int64(), metadata={"delta.generationExpression": "n + 1"}),
            [],
            "'g' is generated",
        ),
    ],
)
def test_column_found(field: pa.Field, partitions: list[str], problem: str | None) -> None:
    found = column_problem(pa.schema([field]), partitions)
    assert found is None if problem is None else problem in str(found)


@pytest.mark.parametrize(
    ("path", "outside"),
    [("part-0.parquet", False), ("k=a%3A/part-0.parquet", False), ("/lake/part-0.parquet", True)]
    + [(f"{scheme}:/lake/part-0.parquet", True) for scheme in ("file", "s3a")],
)
def test_data_file_outside_of_table_found(path: str, outside: bool) -> None:
    assert (path_outside(["part-1.parquet", path]) is not None) == outside


def test_legacy_protocol_implies_features() -> None:
    assert implied_features(1) == set()
    assert implied_features(2) == {"appendOnly", "invariants"}
    assert "identityColumns" in implied_features(6)
    assert implied_features(7) == set()
    assert "columnMapping" not in implied_features(4)


def test_rows_have_reason_and_action() -> None:
    assert len({(row.kind, row.name) for row in REFUSED}) == len(REFUSED)
    assert all(row.reason and row.action for row in REFUSED)
