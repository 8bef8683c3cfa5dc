"""``nats_stream`` without Spark: start positions."""

from __future__ import annotations

from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from tests.integration.spark.reading.streams import erase, fill, read
from tests.support.nats.buckets import api, publish
from tests.support.nats.streams import create_stream, stream_state
from tests.support.query_driver.driver import new_query, sequences

BEGINNINGS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "default": ({}, [3, 4, 6, 7, 8, 9]),
    "all": ({"deliverPolicy": "all"}, [3, 4, 6, 7, 8, 9]),
    "new": ({"deliverPolicy": "new"}, [9]),
    "last": ({"deliverPolicy": "last"}, [8, 9]),
    "last per subject": ({"deliverPolicy": "last_per_subject"}, [6, 7, 8, 9]),
    "a sequence": ({"startSequence": 7}, [7, 8, 9]),
    "a sequence that is gone": ({"startSequence": 5}, [6, 7, 8, 9]),
    "the next sequence": ({"startSequence": 9}, [9]),
    "a sequence to come": ({"startSequence": 10}, []),
    "named twice": ({"deliverPolicy": "by_start_sequence", "startSequence": 8}, [8, 9]),
}
FILTERED: dict[str, list[int]] = {
    "default": [3, 4, 6, 7],
    "all": [3, 4, 6, 7],
    "new": [],
    "last": [7],
    "last per subject": [6, 7],
    "a sequence": [7],
    "a sequence that is gone": [6, 7],
    "the next sequence": [],
    "a sequence to come": [],
    "named twice": [],
}


@pytest.mark.servers
@pytest.mark.parametrize("case", BEGINNINGS)
@pytest.mark.parametrize("storage", ["file", "memory"])
def test_beginnings(shared_server: NatsServer, name: str, case: str, storage: str) -> None:
    """A stream with holes at its begin and in the middle, and one message that comes later."""
    url = shared_server.url
    create_stream(url, name, storage=storage)
    fill(url, name, 8)  # subjects 1, 2, 0, 1, 2, 0, 1, 2
    erase(url, name, 1, 2, 5)
    assert stream_state(url, name)["first_seq"] == 3
    options, expected = BEGINNINGS[case]
    some = f"{name}.0,{name}.1"
    with (
        new_query(url, stream=name, **options) as all_of_it,
        new_query(url, stream=name, filterSubjects=some, **options) as filtered,
    ):
        found, of_some = all_of_it.read_new(), filtered.read_new()
        publish(url, [(f"{name}.2", b"later", None)])
        assert sequences(found + all_of_it.read_new()) == expected
        assert sequences(of_some + filtered.read_new()) == FILTERED[case]


def test_start_time(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create_stream(url, name)
    fill(url, name, 6)
    times = [api(url, f"STREAM.MSG.GET.{name}", {"seq": i})["message"]["time"] for i in range(1, 7)]
    assert sequences(read(url, name, startTime=times[3])) == [4, 5, 6]
    assert sequences(read(url, name, startTime="2020-01-01T00:00:00+01:00")) == [1, 2, 3, 4, 5, 6]
    erase(url, name, 4)
    assert sequences(read(url, name, startTime=times[3])) == [5, 6]


def test_min_last_sequence(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create_stream(url, name)
    fill(url, name, 3)
    assert sequences(read(url, name, minLastSequence=3)) == [1, 2, 3]
    with pytest.raises(Exception, match="412") as raised:
        read(url, name, minLastSequence=4, requestTimeout=1)
    assert type(raised.value).__name__ == "MinLastSequenceError"
