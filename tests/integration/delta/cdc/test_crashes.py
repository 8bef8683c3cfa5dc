"""Crashes at each commit, other writers, and random batches: the rows are those of the rules."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from nats_stream_source.delta import merge
from nats_stream_source.delta.driver.merge_on_read.delta_log import DeltaLog
from tests.integration.delta.cdc.conftest import EventFrame, columns_of
from tests.support.cdc.events import Event, history, latest
from tests.support.delta import rows_of

pytestmark = pytest.mark.delta
RULES: dict[str, Any] = {
    "keys": ["key"],
    "sequence_by": "seq",
    "apply_as_deletes": "op = 'D'",
    "except_column_list": ["op"],
    "engine": "delta-rs",
}
BATCHES = [
    [Event("a", 1, "U", 1, "x"), Event("b", 2, "U", 1, "x"), Event("c", 9, "D", None, None)],
    [Event("a", 3, "U", 1, "x"), Event("b", 5, "D", None, None), Event("c", 4, "U", 1, "x")],
    [Event("a", 2, "D", None, None), Event("b", 4, "U", 2, "y"), Event("c", 11, "U", 1, "x")],
]


class Crash(BaseException):
    """Ends a merge where a process would end."""


class Commits:
    """Commits to a table and its state table, one of which ends the process.

    Args:
        point: the number of the commit, times two; one more for a crash after it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, point: int) -> None:
        self._monkeypatch = monkeypatch
        self._number, self._after = divmod(point, 2)
        self._put = DeltaLog.put
        self._count = 0
        self.crashed = False

    def merge(self, *arguments: Any, **rules: Any) -> None:
        """Merge a batch, again if it crashes."""
        commits = self

        def put(log: DeltaLog, *entry: Any) -> None:
            commits._commit(log, *entry)

        with self._monkeypatch.context() as patch:
            patch.setattr(DeltaLog, "put", put)
            try:
                merge(*arguments, **rules)
                return
            except Crash:
                self.crashed = True
        merge(*arguments, **rules)

    def _commit(self, log: DeltaLog, *entry: Any) -> None:
        number, self._count = self._count, self._count + 1
        if number != self._number or self._after:
            self._put(log, *entry)
        if number == self._number:
            raise Crash


@pytest.mark.parametrize("scd_type", [1, 2])
def test_crash_at_each_commit_is_mended_by_repeated_batch(
    event_frame: EventFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scd_type: int
) -> None:
    frames = [event_frame(batch) for batch in BATCHES]
    for point in itertools.count():
        table, commits = tmp_path / f"point{point}", Commits(monkeypatch, point)
        seen: list[Event] = []
        for batch, frame in zip(BATCHES, frames, strict=True):
            seen += batch
            commits.merge(frame, str(table), stored_as_scd_type=scd_type, **RULES)
            assert stored(table, scd_type) == expected(seen, scd_type), point
        if not commits.crashed:
            break
    # Both tables are created, and each batch commits to the table and to its state.
    assert point >= 2 * (2 + 3 + 2)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_writers_at_same_time_merge_events_of_same_keys(
    event_frame: EventFrame, table: Path, scd_type: int
) -> None:
    rng = random.Random(scd_type)
    events = random_events(rng, 30)
    merge(event_frame([]), str(table), stored_as_scd_type=scd_type, **RULES)
    batches = [events[start::6] for start in range(6)]
    frames = [event_frame(batch) for batch in batches]
    errors: list[BaseException] = []

    def write(part: int) -> None:
        try:
            for frame in frames[part::2]:
                merge(frame, str(table), stored_as_scd_type=scd_type, **RULES)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert stored(table, scd_type) == expected(events, scd_type)


@pytest.mark.parametrize("scd_type", [1, 2])
def test_random_batches_give_rows_of_rules(
    event_frame: EventFrame, table: Path, scd_type: int
) -> None:
    rng = random.Random(7 + scd_type)
    events = random_events(rng, 200)
    for start in range(5):
        batch = [*events[start::5], *rng.sample(events[: start + 1], start + 1)]
        # The third merge compacts and changes the table as another writer would.
        if start == 3:
            DeltaTable(table).optimize.compact()
        options = {"deletion_vectors": False} if start % 2 else {}
        merge(event_frame(batch), str(table), stored_as_scd_type=scd_type, **RULES, **options)
    merge(event_frame(events), str(table), stored_as_scd_type=scd_type, **RULES)
    assert stored(table, scd_type) == expected(events, scd_type)
    before = DeltaTable(table).version()
    merge(event_frame(events), str(table), stored_as_scd_type=scd_type, **RULES)
    assert DeltaTable(table).version() == before


def random_events(rng: random.Random, keys: int) -> list[Event]:
    events = [
        Event(
            f"key {key}",
            seq,
            "D" if rng.random() < 0.3 else "U",
            rng.choice([None, 1, 2]),
            rng.choice([None, "x"]),
        )
        for key in range(keys)
        for seq in rng.sample(range(1, 40), rng.randrange(1, 9))
    ]
    rng.shuffle(events)
    return events


def expected(events: list[Event], scd_type: int) -> list[tuple[Any, ...]]:
    rows = latest(events) if scd_type == 1 else history(events)
    return sorted(rows, key=lambda row: row[:2])


def stored(table: Path, scd_type: int) -> list[tuple[Any, ...]]:
    if not rows_of(DeltaTable(table)):
        return []
    bounds = ("__START_AT", "__END_AT") if scd_type == 2 else ()
    return columns_of(table, "key", *bounds, "seq", "a", "b")
