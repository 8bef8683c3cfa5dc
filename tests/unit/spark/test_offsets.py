"""The offset's JSON, and the range between two offsets."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from nats_stream_source.errors import OffsetError
from nats_stream_source.spark.formats.offsets import Offset, range_between

OFFSET = Offset(
    stream="KV_fleet",
    created="2026-11-20T23:55:01.123456789Z",
    epoch=0,
    origin=0,
    stream_seq=1234,
    time="2026-11-20T23:59:12.000000001Z",
    consumer_seq=1100,
    initial_through=900,
    filter=("plane.>",),
)


def test_json_is_stable() -> None:
    assert json.dumps(OFFSET.to_json()) == (
        '{"v": 1, "stream": "KV_fleet", "created": "2026-11-20T23:55:01.123456789Z", "epoch": 0, '
        '"origin": 0, "stream_seq": 1234, "time": "2026-11-20T23:59:12.000000001Z", '
        '"consumer_seq": 1100, "initial_through": 900, "filter": ["plane.>"]}'
    )


@pytest.mark.parametrize("offset", [OFFSET, replace(OFFSET, time=None, filter=())])
def test_round_trip(offset: Offset) -> None:
    assert Offset.parse(json.loads(json.dumps(offset.to_json()))) == offset


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "of several streams": ({"v": 2, "streams": {"KV_a": {}}}, r"several streams \(KV_a\)"),
    "a newer version": ({"v": 3}, "install the version"),
    "no version": ({"v": None}, "expected an offset of this source"),
    "a text for a number": ({"stream_seq": "12"}, "stream_seq='12'"),
    "a truth for a number": ({"epoch": True}, "epoch=True"),
    "below zero": ({"origin": -1}, "expected 0 <= origin <= stream_seq"),
    "before its origin": ({"origin": 2000}, "expected 0 <= origin <= stream_seq"),
    "a negative epoch": ({"epoch": -1}, "expected 0 <= origin <= stream_seq"),
    "a number for the time": ({"time": 5}, "time=5"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_offsets(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OffsetError, match=message):
        Offset.parse({**OFFSET.to_json(), **change})


@pytest.mark.parametrize("name", [name for name in OFFSET.to_json() if name != "v"])
def test_a_missing_part(name: str) -> None:
    incomplete = OFFSET.to_json()
    del incomplete[name]
    with pytest.raises(OffsetError, match=name):
        Offset.parse(incomplete)


def at(stream_seq: int, *, origin: int = 0, epoch: int = 0, created: str = "A") -> Offset:
    return replace(OFFSET, stream_seq=stream_seq, origin=origin, epoch=epoch, created=created)


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
def test_range_between(start: Offset, end: Offset, expected: tuple[int, int]) -> None:
    assert range_between(start, end) == expected


def test_backwards_is_an_error() -> None:
    with pytest.raises(OffsetError, match="backwards"):
        range_between(at(20), at(10))
