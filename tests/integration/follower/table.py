"""The rows of a table with deletion vectors, read by deltalake."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder


def rows(
    table: Path | str, storage_options: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """All rows, by key and revision."""
    opened = DeltaTable(str(table), storage_options=dict(storage_options or {}) or None)
    query = QueryBuilder().register("t", opened).execute("SELECT * FROM t ORDER BY key, revision")
    found: list[dict[str, Any]] = pa.table(query).to_pylist()
    return found


def values(table: Path | str) -> dict[str, bytes]:
    """The value of each key."""
    found = rows(table)
    assert len({row["key"] for row in found}) == len(found)
    return {row["key"]: row["value"] for row in found}
