"""The JSON of the offset of several streams, and of one stream that such a query resumes from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from nats_stream_source.errors import OffsetError
from nats_stream_source.spark.formats.multi_stream_offset import MultiStreamOffset, parse_offset
from nats_stream_source.spark.formats.offsets import Offset

FLEET = Offset(
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
CARS = replace(FLEET, stream="KV_cars", epoch=1, stream_seq=7, time=None)
SEVERAL = MultiStreamOffset(
    "2026-11-20T23:55:00Z", ("plane.>",), {"KV_fleet": FLEET, "KV_cars": CARS}
)


def test_json_is_stable() -> None:
    assert json.dumps(SEVERAL.to_json()) == (
        '{"v": 2, "started": "2026-11-20T23:55:00Z", "filter": ["plane.>"], "streams": '
        '{"KV_cars": {"created": "2026-11-20T23:55:01.123456789Z", "epoch": 1, "origin": 0, '
        '"stream_seq": 7, "time": null, "consumer_seq": 1100, "initial_through": 900}, '
        '"KV_fleet": {"created": "2026-11-20T23:55:01.123456789Z", "epoch": 0, "origin": 0, '
        '"stream_seq": 1234, "time": "2026-11-20T23:59:12.000000001Z", "consumer_seq": 1100, '
        '"initial_through": 900}}}'
    )


@pytest.mark.parametrize("offset", [SEVERAL, MultiStreamOffset(None, (), {})])
def test_round_trip(offset: MultiStreamOffset) -> None:
    stored = json.loads(json.dumps(offset.to_json()))
    assert MultiStreamOffset.parse(stored) == parse_offset(stored) == offset


def test_offset_of_one_stream_is_a_set_of_one() -> None:
    stored = FLEET.to_json()
    assert parse_offset(stored) == FLEET
    assert MultiStreamOffset.parse(stored) == MultiStreamOffset(
        None, ("plane.>",), {"KV_fleet": FLEET}
    )


def test_repr_names_the_positions() -> None:
    assert repr(SEVERAL) == "<MultiStreamOffset KV_fleet 1234, KV_cars 7>"
    assert repr(MultiStreamOffset(None, (), {})) == "<MultiStreamOffset without a stream>"


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a newer version": ({"v": 3}, "format is 3, expected 2 or lower; install the version"),
    "no streams": ({"streams": None}, "field 'streams' is missing"),
    "a list of streams": ({"streams": []}, "field 'streams' is missing"),
    "a position that is no object": ({"streams": {"KV_a": 5}}, "found 5 for stream KV_a"),
    "a position without a field": ({"streams": {"KV_a": {"epoch": 0}}}, "field 'created' is miss"),
    "a time that is none": ({"started": "yesterday"}, "expected an RFC 3339 timestamp"),
    "a text for the filters": ({"filter": "a"}, "filter='a', expected list"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_offsets(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OffsetError, match=message):
        MultiStreamOffset.parse({**SEVERAL.to_json(), **change})


@pytest.mark.parametrize("name", ["started", "filter", "streams"])
def test_missing_field(name: str) -> None:
    incomplete = SEVERAL.to_json()
    del incomplete[name]
    with pytest.raises(OffsetError, match=f"field '{name}' is missing"):
        MultiStreamOffset.parse(incomplete)
