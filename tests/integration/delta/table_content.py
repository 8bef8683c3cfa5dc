"""Rows for Delta tables, and their content, read with the package `deltalake` without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from tests.support.delta import rows_of

SCHEMA = pa.schema([("key", pa.string()), ("revision", pa.int64())])


def rows(*keys: str, revision: int = 1) -> pa.Table:
    """Return a row of each key, with :data:`SCHEMA`."""
    return pa.table([list(keys), [revision] * len(keys)], schema=SCHEMA)


def stored(
    table: Path | str, storage_options: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return the table's rows, sorted by bucket and key."""
    found = rows_of(DeltaTable(table, storage_options=storage_options))
    return sorted(found, key=lambda row: (row.get("bucket") or "", row["key"]))


def version(table: Path) -> int:
    return DeltaTable(table).version()


def live(table: Path | str, storage_options: dict[str, str] | None = None) -> dict[str, int]:
    """Return the revision of each key that is not marked as deleted."""
    found = stored(table, storage_options)
    return {row["key"]: row["revision"] for row in found if not row.get("deleted")}


def marks(table: Path) -> dict[str, tuple[int, str]]:
    """Return revision and operation of each key that is marked as deleted."""
    return {
        row["key"]: (row["revision"], row["operation"])
        for row in stored(table)
        if row.get("deleted")
    }


def versions(table: Path) -> list[int]:
    """Return the versions of a table and of its state table."""
    state = table.with_name(f"{table.name}__cdc_state")
    return [DeltaTable(one).version() for one in (table, state) if one.exists()]


def columns_of(table: Path, *columns: str) -> list[tuple[Any, ...]]:
    """Return columns of the table's rows, sorted by the first two."""
    rows = rows_of(DeltaTable(table))
    return sorted((tuple(row[c] for c in columns) for row in rows), key=lambda row: row[:2])
