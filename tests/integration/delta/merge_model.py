"""Entries of buckets, and a model of what a table holds after batches of them are merged.

An entry has a short form: ``put("a", 3)`` is the PUT of key ``a`` at revision 3. :class:`Model`
computes the expected rows in plain Python, without Spark.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from pyspark.sql import DataFrame

from nats_stream_source.delta import Deletes, Engine
from tests.support.cdc.events import Event

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
