"""Events of change data, the rows that result by the rules, and the situations run on Spark.

:func:`latest` and :func:`history` compute the rows from all events of a key in plain Python, one by
one, as the rules define it. They share nothing with the package.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

SITUATIONS = json.loads(Path(__file__).with_name("auto_cdc.json").read_text())["situations"]
"""What AUTO CDC of Spark 4.3 gave: batches of events, and the rows after each of them."""

SCHEMA = "key STRING, seq BIGINT, op STRING, a BIGINT, b STRING"
"""The columns of a DataFrame of events."""

RULES: dict[str, Any] = {
    "keys": ["key"],
    "sequence_by": "seq",
    "apply_as_deletes": "op = 'D'",
    "except_column_list": ["op"],
}
"""The arguments of a merge of events."""


class Event(NamedTuple):
    """An event of a key; the columns of the tables are ``key``, ``seq``, ``a`` and ``b``."""

    key: str
    seq: int
    op: str | None
    a: int | None
    b: str | None


def random_event(rng: random.Random, key: str, seq: int) -> Event:
    """Return an update or a delete with values that often repeat; those of deletes do not count."""
    operation = "D" if rng.random() < 0.3 else "U"
    return Event(key, seq, operation, rng.choice([None, 1, 2]), rng.choice([None, "x"]))


def events_of(situation: str) -> list[list[Event]]:
    """Return the batches of a situation; the key is its name."""
    return [
        [Event(situation, *event) for event in batch] for batch in SITUATIONS[situation]["batches"]
    ]


def latest(events: Iterable[Event]) -> list[tuple[Any, ...]]:
    """Return the rows of SCD type 1 as (key, seq, a, b)."""
    return [row[:-1] for row in marked(events) if not row[-1]]


def marked(events: Iterable[Event]) -> list[tuple[Any, ...]]:
    """Return the rows of SCD type 1 with marked deletes as (key, seq, a, b, deleted)."""
    rows = []
    for key, of_key in _by_key(events):
        event = of_key[-1]
        values = (None, None) if event.op == "D" else (event.a, event.b)
        rows.append((key, event.seq, *values, event.op == "D"))
    return rows


def history(events: Iterable[Event], tracked: str = "ab") -> list[tuple[Any, ...]]:
    """Return the rows of SCD type 2 as (key, start, end, seq, a, b)."""
    rows = []
    for key, of_key in _by_key(events):
        open_row: list[Any] | None = None
        for event in of_key:
            if event.op == "D":
                if open_row is not None:
                    open_row[2] = event.seq
                    rows.append(tuple(open_row))
                open_row = None
                continue
            values = [event.seq, event.a, event.b]
            if open_row is not None:
                before = dict(zip("ab", open_row[4:], strict=True))
                if all(before[name] == getattr(event, name) for name in tracked):
                    open_row[3:] = values
                    continue
                open_row[2] = event.seq
                rows.append(tuple(open_row))
            open_row = [key, event.seq, None, *values]
        if open_row is not None:
            rows.append(tuple(open_row))
    return rows


def _by_key(events: Iterable[Event]) -> list[tuple[str, list[Event]]]:
    """Return the events of each key in order, of each sequence the one that counts."""
    keys: dict[str, dict[int, Event]] = defaultdict(dict)
    for event in events:
        before = keys[event.key].get(event.seq)
        if before is None or _rank(event) > _rank(before):
            keys[event.key][event.seq] = event
    return sorted((key, [of_key[seq] for seq in sorted(of_key)]) for key, of_key in keys.items())


def _rank(event: Event) -> tuple[Any, ...]:
    if event.op == "D":
        return (True,)
    return (
        False,
        event.a is not None,
        event.a or 0,
        event.b is not None,
        event.b or "",
    )
