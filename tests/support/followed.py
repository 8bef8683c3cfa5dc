"""Buckets that a client writes while queries follow them, and the rows of the tables then."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from tests.support.cdc.events import Event, history, marked
from tests.support.delta import rows_of
from tests.support.nats import buckets
from tests.support.writer_thread import WriterThread

VALUES = (b"x", b"y")
_DEADLINE = 300.0  # seconds

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Query:
    """A query: the options of its source, the arguments of its merge."""

    options: dict[str, str]
    arguments: dict[str, Any] = field(default_factory=dict)

    def reads(self, bucket: str) -> bool:
        if "bucketPattern" in self.options:
            return re.fullmatch(self.options["bucketPattern"], bucket) is not None
        return bucket in self.options.get("bucket", self.options.get("buckets", "")).split(",")

    @property
    def has_history(self) -> bool:
        return self.arguments.get("stored_as_scd_type") == 2

    def expected(self, written: dict[str, list[Event]]) -> list[Row]:
        """The rows of the table after these writes to each bucket."""
        return sorted(
            (bucket, *row)
            for bucket, events in written.items()
            if self.reads(bucket)
            for row in self._of(events)
        )

    def _of(self, events: list[Event]) -> Iterator[Row]:
        if self.has_history:
            for key, start, end, seq, value, _ in history(events):
                yield key, start, end or 0, seq, value
            return
        for key, seq, value, _, deleted in marked(events):
            if not deleted or self.arguments.get("deletes") == "mark":
                yield key, seq, value or 0, deleted

    def stored(self, table: Path | DeltaTable) -> list[Row]:
        """The rows of the table, as `expected` has them."""
        opened = table if isinstance(table, DeltaTable) else DeltaTable(table)
        return sorted(self._row(row) for row in rows_of(opened))

    def _row(self, row: dict[str, Any]) -> Row:
        value = VALUES.index(row["value"]) if row["value"] else 0
        if self.has_history:
            start, end = row["__START_AT"], row["__END_AT"] or {"revision": 0}
            versions = (start["revision"], end["revision"])
            return (row["bucket"], row["key"], *versions, row["revision"], value)
        return (row["bucket"], row["key"], row["revision"], value, bool(row.get("deleted")))


class Writer(WriterThread):
    """Writes to buckets and keeps what was acknowledged."""

    def __init__(self, url: str, names: Sequence[str], rng: random.Random) -> None:
        super().__init__(_DEADLINE)
        self._url, self._rng = url, rng
        self.written: dict[str, list[Event]] = {bucket: [] for bucket in names}

    @property
    def writes(self) -> int:
        return sum(map(len, self.written.values()))

    def write_until_stopped(self) -> None:
        while not self.over.wait(0.05):
            self._write()

    def _write(self) -> None:
        sent = [
            (bucket, self._event(len(self.written[bucket]) + number))
            for bucket in self.written
            for number in range(self._rng.randint(0, 8))
        ]
        messages = [
            (
                f"$KV.{bucket}.{event.key}",
                b"" if event.a is None else VALUES[event.a],
                buckets.DEL if event.op == "D" else None,
            )
            for bucket, event in sent
        ]
        for (bucket, event), seq in zip(sent, buckets.publish(self._url, messages), strict=True):
            self.written[bucket].append(event._replace(seq=seq))

    def _event(self, number: int) -> Event:
        # Most keys are written once: a later entry would hide a lost one.
        back = self._rng.randint(1, 50) if self._rng.random() < 0.3 else 0
        key = f"key.{max(number - back, 0)}"
        if back and self._rng.random() < 0.5:
            return Event(key, 0, "D", None, None)
        return Event(key, 0, "U", self._rng.randrange(len(VALUES)), None)
