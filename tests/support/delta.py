"""Reads Delta tables without Spark, and changes their logs as users and other writers do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

ENTRIES = pa.schema(
    [
        ("bucket", pa.string()),
        ("key", pa.string()),
        ("value", pa.binary()),
        ("revision", pa.int64()),
        ("created", pa.timestamp("us", "UTC")),
        ("operation", pa.string()),
        ("stream_created", pa.timestamp("us", "UTC")),
    ]
)
"""The columns of ``nats_kv`` that a table of entries stores."""


def rows_of(table: DeltaTable) -> list[dict[str, Any]]:
    """Return the rows of a version, without those that deletion vectors remove."""
    rows: list[dict[str, Any]] = (
        pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t"))
        .cast(pa.schema(table.schema().to_arrow()))
        .to_pylist()
    )
    return rows


def rows(
    table: Path | str, storage_options: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """All rows of the newest version, by key and revision."""
    opened = DeltaTable(str(table), storage_options=dict(storage_options or {}) or None)
    return sorted(rows_of(opened), key=lambda row: (row["key"], row["revision"]))


def values(table: Path | str) -> dict[str, bytes]:
    """The value of each key."""
    found = rows(table)
    assert len({row["key"] for row in found}) == len(found)
    return {row["key"]: row["value"] for row in found}


def age(files: Iterable[Path], hours: float) -> None:
    """Make files look older, as after that time."""
    then = time.time() - 3600 * hours
    for file in files:
        os.utime(file, (then, then))


def change_actions(table: Path, kind: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change each action of a kind in the log of a table."""
    for entry in (table / "_delta_log").glob("*.json"):
        actions = [json.loads(line) for line in entry.read_text().splitlines()]
        changed = [action[kind] for action in actions if kind in action]
        for action in changed:
            change(action)
        if changed:
            entry.write_text("".join(f"{json.dumps(action)}\n" for action in actions))


def append_entry(table: Path, *lines: str) -> None:
    """Commit the next version of a table, with these lines."""
    log = table / "_delta_log"
    version = 1 + max(int(entry.stem) for entry in log.glob("*.json"))
    (log / f"{version:020}.json").write_text("\n".join(lines))


def partition_by(table: Path, *columns: str) -> None:
    """Partition a table without rows: the driver creates tables without partitions."""
    change_actions(table, "metaData", lambda of: of.update(partitionColumns=list(columns)))


def change_columns(table: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the columns of a table, which the function gets by name."""

    def change_schema(metadata: dict[str, Any]) -> None:
        schema = json.loads(metadata["schemaString"])
        columns = {field["name"]: field for field in schema["fields"]}
        change(columns)
        metadata["schemaString"] = json.dumps({**schema, "fields": list(columns.values())})

    change_actions(table, "metaData", change_schema)
