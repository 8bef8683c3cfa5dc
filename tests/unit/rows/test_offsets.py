"""The offset's JSON in both formats, and the range between two positions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from nats_stream_source.errors import OffsetError
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
