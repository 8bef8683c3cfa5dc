"""The offset's JSON in both formats, ranges between positions, sequences that did not come."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from nats_stream_source.errors import OffsetError
from nats_stream_source.rows import data_loss as module
from nats_stream_source.rows.data_loss import SequenceGapTracker
from nats_stream_source.rows.offsets import ONE_STREAM, Offset, Position, name_some, range_between

FLEET = Position(
    created="2026-11-20T23:55:01.123456789Z",
    epoch=0,
    origin=0,
    stream_seq=1234,
    time="2026-11-20T23:59:12.000000001Z",
    consumer_seq=1100,
    initial_through=900,
)

CARS = replace(FLEET, epoch=1, stream_seq=7, time=None)
ONE = Offset({"KV_fleet": FLEET}, ("plane.>",), ONE_STREAM)
SEVERAL = Offset({"KV_fleet": FLEET, "KV_cars": CARS}, ("plane.>",), started="2026-11-20T23:55:00Z")


def test_json_of_one_stream_is_stable() -> None:
    assert json.dumps(ONE.to_json()) == (
        '{"v": 1, "stream": "KV_fleet", "created": "2026-11-20T23:55:01.123456789Z", "epoch": 0, '
        '"origin": 0, "stream_seq": 1234, "time": "2026-11-20T23:59:12.000000001Z", '
        '"consumer_seq": 1100, "initial_through": 900, "filter": ["plane.>"]}'
    )


def test_json_of_several_streams_is_stable() -> None:
    assert json.dumps(SEVERAL.to_json()) == (
        '{"v": 2, "started": "2026-11-20T23:55:00Z", "filter": ["plane.>"], "streams": '
        '{"KV_cars": {"created": "2026-11-20T23:55:01.123456789Z", "epoch": 1, "origin": 0, '
        '"stream_seq": 7, "time": null, "consumer_seq": 1100, "initial_through": 900}, '
        '"KV_fleet": {"created": "2026-11-20T23:55:01.123456789Z", "epoch": 0, "origin": 0, '
        '"stream_seq": 1234, "time": "2026-11-20T23:59:12.000000001Z", "consumer_seq": 1100, '
        '"initial_through": 900}}}'
    )


OFFSETS = [ONE, Offset({"KV_cars": CARS}, (), ONE_STREAM), SEVERAL, Offset({}, ())]


@pytest.mark.parametrize("offset", OFFSETS)
def test_json_round_trip(offset: Offset) -> None:
    assert Offset.parse(json.loads(json.dumps(offset.to_json()))) == offset


def test_names_of_streams_are_shortened() -> None:
    assert name_some([]) == "none yet"
    assert name_some("cba") == "a, b, c"
    assert name_some("ecdba") == "a, b, c and 2 more"


BROKEN: dict[str, tuple[Offset, dict[str, Any], str]] = {
    "a newer version": (ONE, {"v": 3}, "format is 3, expected 2 or lower; install the version"),
    "no version": (ONE, {"v": None}, "expected an offset of this source"),
    "a text for a number": (ONE, {"stream_seq": "12"}, "stream_seq='12'"),
    "a truth for a number": (ONE, {"epoch": True}, "epoch=True"),
    "below zero": (ONE, {"origin": -1}, "expected 0 <= origin <= stream_seq"),
    "before its origin": (ONE, {"origin": 2000}, "expected 0 <= origin <= stream_seq"),
    "a negative epoch": (ONE, {"epoch": -1}, "expected 0 <= origin <= stream_seq"),
    "a number for the time": (ONE, {"time": 5}, "time=5"),
    "a text for the time": (ONE, {"time": "soon"}, "time='soon', expected an RFC 3339 timestamp"),
    "numbers as filters": (ONE, {"filter": [1]}, r"filter=\[1\], expected a list of str"),
    "a text for the creation": (
        ONE,
        {"created": "yesterday"},
        "created=.yesterday., expected an RFC",
    ),
    "null for streams": (SEVERAL, {"streams": None}, "streams=None, expected dict"),
    "a list of streams": (SEVERAL, {"streams": []}, "streams=.*, expected dict"),
    "a number for a position": (SEVERAL, {"streams": {"KV_a": 5}}, "found 5 for stream KV_a"),
    "a position without a field": (SEVERAL, {"streams": {"a": {}}}, "field 'created' is missing"),
    "a text for a time": (SEVERAL, {"started": "yesterday"}, "expected an RFC 3339 timestamp"),
    "a text for the filters": (SEVERAL, {"filter": "a"}, "filter='a', expected list"),
}


@pytest.mark.parametrize(("offset", "change", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_offset(offset: Offset, change: dict[str, Any], message: str) -> None:
    with pytest.raises(OffsetError, match=message):
        Offset.parse({**offset.to_json(), **change})


FIELDS = [(offset, name) for offset in (ONE, SEVERAL) for name in offset.to_json() if name != "v"]


@pytest.mark.parametrize(("offset", "name"), FIELDS)
def test_missing_field(offset: Offset, name: str) -> None:
    incomplete = offset.to_json()
    del incomplete[name]
    with pytest.raises(OffsetError, match=f"field '{name}' is missing"):
        Offset.parse(incomplete)


def at(stream_seq: int, *, origin: int = 0, epoch: int = 0, created: str = "A") -> Position:
    return replace(FLEET, stream_seq=stream_seq, origin=origin, epoch=epoch, created=created)


RANGES = {
    "one after the other": (at(10), at(20), (10, 20)),
    "empty": (at(10), at(10), (10, 10)),
    "a failed first batch, paired with a new initial offset": (
        at(150, origin=150),
        at(120, origin=100),
        (100, 120),
    ),
    "a new epoch begins at its origin": (at(500), at(30, origin=12, epoch=1), (12, 30)),
    "a replaced stream begins at 0": (at(500), at(30, epoch=1, created="B"), (0, 30)),
    "a new initial offset of a replaced stream": (at(0, created="B"), at(30), (0, 30)),
}


@pytest.mark.parametrize(("start", "end", "expected"), RANGES.values(), ids=RANGES)
def test_range_between(start: Position, end: Position, expected: tuple[int, int]) -> None:
    assert range_between(start, end) == expected


def test_backwards_range_is_error() -> None:
    with pytest.raises(OffsetError, match=r"run backwards, from 20 to 10; .* edited by hand"):
        range_between(at(20), at(10))


BEYOND = 1000
Gone = tuple[int, int, int]


# First wanted, what came, where the stream begins now, what is gone up to 10.
CASES: dict[str, tuple[int, list[list[int]], int, Gone | None]] = {
    "nothing came, all is gone": (5, [], BEYOND, (5, 10, 6)),
    "nothing came, one is gone": (5, [], 6, (5, 5, 1)),
    "nothing came, nothing is gone": (5, [], 5, None),
    "an empty batch": (5, [[]], 8, (5, 7, 3)),
    "all came": (5, [[5, 6], [7, 8, 9, 10]], BEYOND, None),
    "what comes after the end does not count": (5, [[5, 6, 7, 8, 9, 10]], BEYOND, None),
    "what came aged out later": (5, [[5, 6, 7]], 8, None),
    "the next is gone": (5, [[5, 6, 7]], 9, (8, 8, 1)),
    "a hole in a batch": (5, [[5, 6, 8, 9, 10]], BEYOND, (7, 7, 1)),
    "a hole between batches": (5, [[5, 6], [8, 9, 10]], BEYOND, (7, 7, 1)),
    "a hole that lies ahead is none": (5, [[5, 6, 8]], 7, None),
    "a part of a hole": (5, [[5, 9, 10]], 8, (6, 7, 2)),
    "several holes": (5, [[5, 7], [8, 10]], BEYOND, (6, 9, 2)),
    "holes, and then nothing more": (5, [[5, 7]], BEYOND, (6, 10, 4)),
    "the first one": (5, [[6, 7, 8, 9, 10]], BEYOND, (5, 5, 1)),
    "what lies before the beginning": (5, [[3, 4, 5, 6]], 7, None),
}


@pytest.mark.parametrize(("first", "batches", "first_seq", "gone"), CASES.values(), ids=list(CASES))
def test_aged_out_messages(
    first: int, batches: list[list[int]], first_seq: int, gone: Gone | None
) -> None:
    assert followed(first, batches).aged_out(first_seq, 10) == gone


def followed(
    first: int, batches: list[list[int]], expiry_allowed_through: int = 0
) -> SequenceGapTracker:
    unbroken = SequenceGapTracker(first, expiry_allowed_through)
    for batch in batches:
        unbroken.add(np.array(batch, dtype=np.int64))
    return unbroken


HISTORY: dict[str, tuple[list[list[int]], Gone | None]] = {
    "its first messages went before any came": ([[4, 5, 6, 7, 8, 9, 10]], None),
    "all of it went": ([[9, 10]], None),
    "nothing came at all": ([], (9, 10, 2)),
    "more than history went": ([[10]], (9, 9, 1)),
    "a part of it went after the first came": ([[2, 5, 6, 7, 8, 9, 10]], (3, 4, 2)),
}


@pytest.mark.parametrize(("batches", "gone"), HISTORY.values(), ids=list(HISTORY))
def test_history_reaches_back_as_far_as_it_does(
    batches: list[list[int]], gone: Gone | None
) -> None:
    """1 to 8 were there when the query began."""
    assert followed(1, batches, 8).aged_out(BEYOND, 10) == gone


@given(
    st.sets(st.integers(1, 30)),
    st.integers(1, 20),
    st.lists(st.integers(0, 30), max_size=5),
    st.integers(1, 40),
    st.integers(0, 35),
)
def test_ranges_equal_single_steps(
    came: set[int], first: int, cuts: list[int], first_seq: int, end: int
) -> None:
    missing = [seq for seq in range(first, min(first_seq - 1, end) + 1) if seq not in came]
    batches = np.split(np.array(sorted(came), dtype=np.int64), sorted(cuts))
    expected = (missing[0], missing[-1], len(missing)) if missing else None
    assert (
        followed(first, [batch.tolist() for batch in batches]).aged_out(first_seq, end) == expected
    )


def test_holes_many_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_GAPS", 100)
    unbroken = SequenceGapTracker(1)
    for begin in range(2, 20_002, 200):
        unbroken.add(np.arange(begin, begin + 200, 2, dtype=np.int64))
    assert unbroken.aged_out(BEYOND * 1000, 20_000) == (1, 19_999, 10_000)
    assert sum(map(len, unbroken._gaps)) <= 200
