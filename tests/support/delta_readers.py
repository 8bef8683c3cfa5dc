"""The rows of a Delta table as other libraries read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
from deltalake import DeltaTable

from tests.support.delta import rows_of


def by_deltalake(path: Path) -> list[dict[str, Any]]:
    """All rows as deltalake reads them."""
    return rows_of(DeltaTable(path))


def by_polars(path: Path) -> list[dict[str, Any]]:
    """All rows as polars reads them."""
    return pl.scan_delta(str(path)).collect().to_dicts()


def by_duckdb(path: Path) -> list[dict[str, Any]]:
    """All rows as DuckDB reads them."""
    with duckdb.connect() as connection:
        connection.register("fleet", DeltaTable(path).scan())
        rows: list[dict[str, Any]] = pa.table(connection.sql("SELECT * FROM fleet")).to_pylist()
        return rows
