"""``nats_stream`` without Spark: the columns of a row, and unusual subjects."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.ordered import small_range
from nats_stream_source.jetstream.times import nanoseconds
from tests.integration.spark.reading.streams import read
from tests.support.nats import buckets
from tests.support.nats.buckets import publish
from tests.support.nats.streams import create_stream, stream_state
from tests.support.nats.topology import wait_for_seq
from tests.support.wait import wait_until

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@pytest.fixture(params=["small ranges", "consumers"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a range is read."""
    if request.param == "consumers":
        monkeypatch.setattr(small_range, "MAX_SEQUENCES", 0)
    return str(request.param)


def test_row_of_message(shared_server: NatsServer, name: str, way: str) -> None:
    url = shared_server.url
    created = create_stream(url, name)["created"]
    publish(url, [(f"{name}.a.b", b"\x00\xff", None), (f"{name}.c", b"", {"A": "1"})])
    first, second = read(url, name)
    now = datetime.now(timezone.utc)
    assert first["timestamp"] <= second["timestamp"] <= now
    assert first == {
        "stream": name,
        "subject": f"{name}.a.b",
        "data": b"\x00\xff",
        "sequence": 1,
        "timestamp": first["timestamp"],
        "stream_created": EPOCH + timedelta(microseconds=nanoseconds(created) // 1000),
    }
    assert (second["subject"], second["data"], second["sequence"]) == (f"{name}.c", b"", 2)


def test_headers_only(shared_server: NatsServer, name: str, way: str) -> None:
    url = shared_server.url
    create_stream(url, name)
    publish(url, [(f"{name}.a", b"12345", None), (f"{name}.b", b"", {"A": "1"})])
    found = read(url, name, headersOnly=True, includeHeaders=True)
    assert [row["data"] for row in found] == [None, None]
    assert [dict(row["headers"]) for row in found] == [
        {"Nats-Msg-Size": ["5"]},
        {"A": ["1"], "Nats-Msg-Size": ["0"]},
    ]


SUBJECTS = [b"x.a", "x.ü.日".encode(), b"x.\xff\xfe", b"x.>", b"x.*", b"x.a>b", b"x.\x01", b"y"]
# Not 0x7F: under a wildcard, nats-server 2.15.1 loses subjects with that byte.


@pytest.mark.parametrize("pattern", [None, "{}.x.>", "{}.x.*", "{}.x.ü.日", "{}.x.a"])
def test_unusual_subjects(shared_server: NatsServer, name: str, pattern: str | None) -> None:
    """Whatever the server takes can be read, and both ways of reading give the same."""
    url = shared_server.url
    create_stream(url, name)
    _publish_raw(shared_server, name.encode(), SUBJECTS)
    wait_for_seq(url, name, 1)
    wait_until(lambda: _settled(url, name), "all that the server takes")
    filters = None if pattern is None else pattern.format(name)
    found = read(url, name, filterSubjects=filters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_range, "MAX_SEQUENCES", 0)
        assert read(url, name, filterSubjects=filters) == found
    assert found or pattern
    if pattern is None:
        assert f"{name}.x.\ufffd\ufffd" in [row["subject"] for row in found]


def _publish_raw(server: NatsServer, prefix: bytes, subjects: list[bytes]) -> None:
    async def work(client: Any) -> None:
        for subject in subjects:
            client._transport.write(b"PUB %s.%s 1\r\nv\r\n" % (prefix, subject))
        await client.flush()

    buckets.with_client(server.url, work)


def _settled(url: str, name: str) -> bool:
    """Whether the stream has all earlier messages: its last message shows it."""
    publish(url, [(f"{name}.end", b"", None)])
    return bool(stream_state(url, name)["messages"] > 1)
