"""The rows of a table with deletion vectors, read by deltalake."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from tests.support.delta import rows_of


def rows(
    table: Path | str, storage_options: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """All rows, by key and revision."""
    opened = DeltaTable(str(table), storage_options=dict(storage_options or {}) or None)
    return sorted(rows_of(opened), key=lambda row: (row["key"], row["revision"]))


def values(table: Path | str) -> dict[str, bytes]:
    """The value of each key."""
    found = rows(table)
    assert len({row["key"] for row in found}) == len(found)
    return {row["key"]: row["value"] for row in found}
