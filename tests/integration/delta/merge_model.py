"""Entries and buckets of Delta tests, a model of what a table holds after merges, and its content.

An entry has a short form: ``put("a", 3)`` is the PUT of key ``a`` at revision 3. :class:`Model`
computes the expected rows in plain Python, without Spark; the package `deltalake` reads a table.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame

from nats_stream_source.delta import Deletes, Engine, ReconcileResult
from nats_stream_source.jetstream.times import nanoseconds
from tests.support import delta
from tests.support.cdc.events import Event
from tests.support.delta import rows_of
from tests.support.nats import buckets

SCHEMA = (
    "bucket STRING, key STRING, value BINARY, revision BIGINT, created TIMESTAMP, "
    "operation STRING, delta BIGINT, initial BOOLEAN, stream_created TIMESTAMP"
)
CREATED = datetime(2026, 1, 1, 0, 0, 0, 123456, tzinfo=timezone.utc)
RECREATED = CREATED + timedelta(microseconds=1)
both_modes = pytest.mark.parametrize("deletes", ["remove", "mark"])
ENGINES: list[Engine] = ["driver", "spark"]
# A merge by Spark takes seconds: `make test` has one way through each capability, and
# `make test-faults` has all.
_SPARK = pytest.param("spark", marks=pytest.mark.faults)
spark_in_faults = pytest.mark.parametrize("engine", ["driver", _SPARK], indirect=True)
every_engine = pytest.mark.parametrize("engine", ["driver", _SPARK, "alternating"], indirect=True)
by_driver = pytest.mark.parametrize("engine", ["driver"], indirect=True)


@dataclasses.dataclass(frozen=True)
class Entry:
    key: str
    revision: int
    operation: str
    value: bytes | None
    stream_created: datetime = CREATED
    bucket: str = "fleet"

    @property
    def order(self) -> tuple[datetime, int]:
        return (self.stream_created, self.revision)

    @property
    def created(self) -> datetime:
        return self.stream_created + timedelta(seconds=self.revision)

    def row(self) -> tuple[Any, ...]:
        return (
            self.bucket,
            self.key,
            self.value,
            self.revision,
            self.created,
            self.operation,
            random.randrange(1000),  # `delta` differs between deliveries
            random.random() < 0.5,  # `initial` too
            self.stream_created,
        )

    def stored(self, deletes: Deletes) -> dict[str, Any]:
        row = dataclasses.asdict(self) | {"created": self.created}
        return row | ({"deleted": self.operation != "PUT"} if deletes == "mark" else {})


def put(key: str, revision: int, stream_created: datetime = CREATED, **fields: Any) -> Entry:
    value = f"{key}@{revision}".encode()
    return dataclasses.replace(Entry(key, revision, "PUT", value, stream_created), **fields)


def delete(
    key: str, revision: int, stream_created: datetime = CREATED, operation: str = "DEL"
) -> Entry:
    return Entry(key, revision, operation, None, stream_created)


def purge(key: str, revision: int, stream_created: datetime = CREATED) -> Entry:
    return delete(key, revision, stream_created, "PURGE")


class Model:
    """The rows of a table after a list of batches was merged, by key."""

    def __init__(self, deletes: Deletes) -> None:
        self.deletes = deletes
        self.rows: dict[str, Entry] = {}

    def merge(self, batch: Iterable[Entry]) -> None:
        newest: dict[str, Entry] = {}
        for entry in sorted(batch, key=lambda entry: entry.order):
            newest[entry.key] = entry
        for key, entry in newest.items():
            if key in self.rows and self.rows[key].order >= entry.order:
                continue
            if entry.operation == "PUT" or self.deletes == "mark":
                self.rows[key] = entry
            else:
                self.rows.pop(key, None)

    def stored(self) -> list[dict[str, Any]]:
        rows = sorted(self.rows.values(), key=lambda entry: entry.key)
        return [entry.stored(self.deletes) for entry in rows]


Frame = Callable[..., DataFrame]
EventFrame = Callable[[Iterable[Event]], DataFrame]
Merge = Callable[..., None]
"""``merge`` with the engine of the test."""


class Bucket:
    """A bucket whose writes return the entries that the source would deliver for them."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name

    def create(self, **config: Any) -> Bucket:
        info = buckets.create_bucket(self.url, self.name, history=3, **config)
        self.stream_created = _time(info["created"])
        return self

    def delete(self) -> None:
        buckets.delete_bucket(self.url, self.name)

    def write(
        self, *entries: tuple[str, str], value: bytes = b"x", headers: dict[str, str] | None = None
    ) -> list[Entry]:
        """Write (key, operation) pairs; puts have the value and the headers."""
        contents = {
            "PUT": (value, headers),
            "DEL": (b"", buckets.DEL),
            "PURGE": (b"", buckets.PURGE),
        }
        messages = [(f"$KV.{self.name}.{key}", *contents[of]) for key, of in entries]
        return [
            Entry(key, seq, of, {"PUT": value}.get(of), self.stream_created, self.name)
            for (key, of), seq in zip(entries, buckets.publish(self.url, messages), strict=True)
        ]

    def purge_subjects(self, *keys: str) -> None:
        """Purge the subjects of keys through the API, which leaves no marker."""
        for key in keys:
            request = {"filter": f"$KV.{self.name}.{key}"}
            buckets.api(self.url, f"STREAM.PURGE.KV_{self.name}", request)

    def last(self, key: str) -> dict[str, Any] | None:
        """Return the last message of a key, as the server has it; None without one."""
        request = {"last_by_subj": f"$KV.{self.name}.{key}"}
        try:
            response = buckets.api(self.url, f"STREAM.MSG.GET.KV_{self.name}", request)
        except RuntimeError as error:
            if "no message found" in str(error):
                return None
            raise
        message: dict[str, Any] = response["message"]
        return message

    def created(self, revision: int) -> datetime:
        """Return when the server stored a revision."""
        stored = buckets.api(self.url, f"STREAM.MSG.GET.KV_{self.name}", {"seq": revision})
        return _time(stored["message"]["time"])

    def state(self) -> dict[str, Any]:
        return buckets.bucket_state(self.url, self.name)


def _time(text: str) -> datetime:
    """The time of the server in microseconds."""
    micros = nanoseconds(text) // 1000
    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=micros)


Reconciled = Callable[..., ReconcileResult]


stored = delta.rows


def version(table: Path) -> int:
    return DeltaTable(table).version()


def live(table: Path | str, storage_options: dict[str, str] | None = None) -> dict[str, int]:
    """Return the revision of each key that is not marked as deleted."""
    found = stored(table, storage_options)
    return {row["key"]: row["revision"] for row in found if not row.get("deleted")}


def versions(table: Path) -> list[int]:
    """Return the versions of a table and of its state table."""
    state = table.with_name(f"{table.name}__cdc_state")
    return [DeltaTable(one).version() for one in (table, state) if one.exists()]


def history_of(table: Path, *columns: str) -> list[tuple[Any, ...]]:
    """Return key, value and the revisions that start and end each version, and columns of it."""
    rows = [
        (
            row["key"],
            row["value"],
            row["__START_AT"]["revision"],
            row["__END_AT"] and row["__END_AT"]["revision"],
            *(row[name] for name in columns),
        )
        for row in rows_of(DeltaTable(table))
    ]
    return sorted(rows, key=lambda row: (row[0], row[2]))


def columns_of(table: Path, *columns: str) -> list[tuple[Any, ...]]:
    """Return columns of the table's rows, sorted by the first two."""
    rows = rows_of(DeltaTable(table))
    return sorted((tuple(row[c] for c in columns) for row in rows), key=lambda row: row[:2])
