"""``nats_stream`` without Spark: work queues, mirrors, sources, domains, buckets."""

from __future__ import annotations

import re

import pytest

from nats_stream_source.errors import StreamNotFoundError, UnsupportedStreamError
from tests.integration.spark.reading.streams import both_ways, fill, read
from tests.support.nats import buckets
from tests.support.nats.buckets import api, publish, put_many
from tests.support.nats.streams import create_stream, stream_state
from tests.support.nats.topology import CONSUMER_LIMITS, hub_and_leaf, make_mirror, wait_for_seq
from tests.support.query_driver.batch import read_batch
from tests.support.query_driver.driver import Record, new_query, sequences
from tests.support.wait import wait_until


@pytest.mark.servers
@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_messages_removed_by_read(url: str, name: str, retention: str) -> None:
    """Refused, and nothing consumed; a mirror of it is read."""
    create_stream(url, name, retention=retention)
    if retention == "interest":
        config = {"name": "keep", "durable_name": "keep", "ack_policy": "explicit"}
        request = {"stream_name": name, "config": config}
        api(url, f"CONSUMER.CREATE.{name}.keep", request)
    fill(url, name, 4)
    with pytest.raises(
        UnsupportedStreamError,
        match=f"retention is '{retention}', expected 'limits'.* read a copy, .*docs/streams.md",
    ):
        read(url, name)
    assert stream_state(url, name)["messages"] == 4
    if retention == "workqueue":
        make_mirror(url, f"{name}M", name)
        assert sequences(read(url, f"{name}M", filterSubjects=f"{name}.1")) == [1, 4]


def test_mirror_is_read(url: str, name: str) -> None:
    """Its sequences are those of its origin, also where it has a part only."""
    create_stream(url, name)
    fill(url, name, 9)
    make_mirror(url, f"{name}M", name)
    api(
        url,
        f"STREAM.CREATE.{name}P",
        {
            "name": f"{name}P",
            "mirror": {"name": name, "opt_start_seq": 4, "filter_subject": f"{name}.1"},
        },
    )
    wait_until(lambda: stream_state(url, f"{name}P")["messages"] == 2, "the part")
    with new_query(url, stream=f"{name}M", maxRowsPerTrigger=4) as query:
        assert sequences(query.read_new()) == list(range(1, 10))
        publish(url, [(f"{name}.x", b"", None)])
        wait_for_seq(url, f"{name}M", 10)
        assert sequences(query.read_new()) == [10]
    assert sequences(read(url, f"{name}P")) == [4, 7]


def test_sources_and_transforms(url: str, name: str) -> None:
    """Subjects of elsewhere: the stream has the subjects of a filter for them."""
    create_stream(url, name)
    fill(url, name, 6)
    sources = [
        {
            "name": name,
            "subject_transforms": [{"src": f"{name}.*", "dest": "moved.{{wildcard(1)}}"}],
        }
    ]
    create_stream(url, f"{name}A", sources=sources)
    transform = {"src": f"{name}B.*", "dest": "changed.{{wildcard(1)}}"}
    create_stream(url, f"{name}B", f"{name}B.*", subject_transform=transform)
    publish(url, [(f"{name}A.own", b"", None), (f"{name}B.x", b"", None)])
    wait_until(lambda: stream_state(url, f"{name}A")["messages"] == 7, "the sourced messages")
    found = {row["subject"] for row in read(url, f"{name}A")}
    assert found == {"moved.0", "moved.1", "moved.2", f"{name}A.own"}
    assert len(read(url, f"{name}A", filterSubjects="moved.1")) == 2
    assert len(read(url, f"{name}A", filterSubjects=f"{name}A.>")) == 1
    (row,) = read(url, f"{name}B", filterSubjects="changed.*")
    assert row["subject"] == "changed.x"


@pytest.mark.servers
def test_origin_of_sourced_messages(url: str, name: str) -> None:
    """The stream that the source copied from, also where that one is an aggregate itself."""
    create_stream(url, name)
    fill(url, name, 3)
    create_stream(url, f"{name}A", sources=[{"name": name, "filter_subject": f"{name}.2"}])
    wait_until(lambda: stream_state(url, f"{name}A")["messages"] == 1, "the sourced message")
    publish(url, [(f"{name}A.own", b"", {"Trace": "x"})])
    create_stream(url, f"{name}B", sources=[{"name": f"{name}A"}])
    wait_until(lambda: stream_state(url, f"{name}B")["messages"] == 2, "the sourced messages")

    def origins(stream: str) -> list[tuple[str | None, int | None]]:
        return [_origin(row) for row in read(url, stream, includeOrigin=True, headersOnly=True)]

    assert origins(name) == [(None, None)] * 3
    assert origins(f"{name}A") == [(name, 2), (None, None)]
    assert origins(f"{name}B") == [(f"{name}A", 1), (f"{name}A", 2)]


@pytest.mark.servers
def test_origin_of_entries_of_aggregate_bucket(url: str, name: str) -> None:
    """Markers too, by both ways of reading."""
    for site in ("de", "us"):
        buckets.create_bucket(url, name + site, history=5)
        buckets.put_many(url, name + site, [("a", b"1"), ("b", b"2")])
    buckets.delete(url, f"{name}de", "a")
    sources = [
        {
            "name": f"KV_{name}{site}",
            "subject_transforms": [{"src": f"$KV.{name}{site}.>", "dest": f"$KV.{name}.{site}.>"}],
        }
        for site in ("de", "us")
    ]
    buckets.create_bucket(url, name, history=5, sources=sources)
    wait_until(lambda: stream_state(url, f"KV_{name}")["messages"] == 5, "the sourced entries")
    buckets.put(url, name, "own", b"3")
    expected = {
        ("de.a", "DEL", f"KV_{name}de", 3),
        ("de.b", "PUT", f"KV_{name}de", 2),
        ("us.a", "PUT", f"KV_{name}us", 1),
        ("us.b", "PUT", f"KV_{name}us", 2),
        ("own", "PUT", None, None),
    }
    for found in (
        read_batch(url, bucket=name, includeOrigin=True),
        both_ways(url, bucket=name, includeOrigin=True),
    ):
        rows = [(row["key"], row["operation"], *_origin(row)) for row in found]
        assert len(rows) == len(expected)
        assert set(rows) == expected


def _origin(row: Record) -> tuple[str | None, int | None]:
    return row["origin_stream"], row["origin_sequence"]


def test_stream_of_other_domain() -> None:
    with hub_and_leaf() as two:
        create_stream(two.hub.url, "FAR")
        fill(two.hub.url, "FAR", 50)
        assert sequences(read(two.leaf.url, "FAR", domain="hub")) == list(range(1, 51))
        assert len(read(two.leaf.url, None, subject="FAR.1", domain="hub")) == 17
        create_stream(
            two.leaf.url, "ALL", sources=[{"name": "FAR", "external": {"api": "$JS.hub.API"}}]
        )
        wait_until(
            lambda: stream_state(two.leaf.url, "ALL")["messages"] == 50, "the sourced messages"
        )
        (origin, _), *_ = map(_origin, read(two.leaf.url, "ALL", includeOrigin=True))
        assert re.fullmatch(r"FAR:\w{8}", origin or "")  # with a hash of the API prefix
        with pytest.raises(StreamNotFoundError, match="'stream', 'servers' and 'domain'"):
            read(two.leaf.url, "FAR")


def test_bucket_read_as_stream(url: str, name: str) -> None:
    """Markers are messages like others; each key's last message is what a bucket has."""
    buckets.fill_bucket(url, name, [("a", b"1"), ("b", b"1"), ("a", b"2")], history=1)
    buckets.delete(url, name, "b")
    found = read(url, f"KV_{name}", deliverPolicy="last_per_subject", includeHeaders=True)
    assert [(row["sequence"], row["data"], row["headers"]) for row in found] == [
        (3, b"2", None),
        (4, b"", [("KV-Operation", ["DEL"])]),
    ]


@pytest.mark.servers
@pytest.mark.parametrize("limits", CONSUMER_LIMITS, ids=str)
@pytest.mark.parametrize("history", [1, 5])
def test_stream_with_consumer_limits_is_read(
    url: str, name: str, limits: dict[str, int], history: int
) -> None:
    create_stream(url, name, consumer_limits=limits)
    fill(url, name, 40)
    assert sequences(read(url, name)) == list(range(1, 41))
    assert sequences(read_batch(url, stream=name)) == list(range(1, 41))
    buckets.create_bucket(url, name, history, consumer_limits=limits)
    put_many(url, name, [(f"k{number % 40}", b"1") for number in range(80)])
    assert len(read_batch(url, bucket=name)) == 40
    with new_query(url, bucket=name) as query:
        assert len(query.read_new()) == 40


@pytest.mark.servers
def test_query_continues_after_stream_gets_consumer_limits(url: str, name: str) -> None:
    create_stream(url, name)
    fill(url, name, 40)
    with new_query(url, stream=name) as query:
        assert len(query.read_new()) == 40
        config = api(url, f"STREAM.INFO.{name}")["config"]
        limits = {"inactive_threshold": 1_000_000_000, "max_ack_pending": 10}
        api(url, f"STREAM.UPDATE.{name}", {**config, "consumer_limits": limits})
        fill(url, name, 40)
        assert len(query.read_new()) == 40
