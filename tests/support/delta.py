"""Reads Delta tables with the package `deltalake`, without Spark."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder


def rows_of(table: DeltaTable) -> list[dict[str, Any]]:
    """Return the rows of a version, without those that deletion vectors remove."""
    rows: list[dict[str, Any]] = (
        pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t"))
        .cast(pa.schema(table.schema().to_arrow()))
        .to_pylist()
    )
    return rows
