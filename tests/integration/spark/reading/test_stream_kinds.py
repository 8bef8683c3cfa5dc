"""``nats_stream`` without Spark: work queues, mirrors, sources, domains, buckets."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import StreamNotFoundError, UnsupportedStreamError
from tests.integration.spark.reading.streams import create, fill, read, state
from tests.support.nats import buckets
from tests.support.nats.buckets import api, publish
from tests.support.nats.topology import hub_and_leaf, make_mirror, wait_for_seq
from tests.support.query_driver.driver import new_query, sequences
from tests.support.wait import wait_until


@pytest.mark.servers
@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_messages_removed_by_a_read(shared_server: NatsServer, name: str, retention: str) -> None:
    """Refused, and nothing consumed; a mirror of it is read."""
    url = shared_server.url
    create(url, name, retention=retention)
    if retention == "interest":
        config = {"name": "keep", "durable_name": "keep", "ack_policy": "explicit"}
        request = {"stream_name": name, "config": config}
        api(url, f"CONSUMER.CREATE.{name}.keep", request)
    fill(url, name, 4)
    with pytest.raises(
        UnsupportedStreamError,
        match=f"retention is '{retention}', expected 'limits'.* read a mirror",
    ):
        read(url, name)
    assert state(url, name)["messages"] == 4
    if retention == "workqueue":
        make_mirror(url, f"{name}M", name)
        assert sequences(read(url, f"{name}M", filterSubjects=f"{name}.1")) == [1, 4]


def test_mirror_is_read(shared_server: NatsServer, name: str) -> None:
    """Its sequences are those of its origin, also where it has a part only."""
    url = shared_server.url
    create(url, name)
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
    wait_until(lambda: state(url, f"{name}P")["messages"] == 2, "the part")
    with new_query(url, stream=f"{name}M", maxRowsPerTrigger=4) as query:
        assert sequences(query.read_new()) == list(range(1, 10))
        publish(url, [(f"{name}.x", b"", None)])
        wait_for_seq(url, f"{name}M", 10)
        assert sequences(query.read_new()) == [10]
    assert sequences(read(url, f"{name}P")) == [4, 7]


def test_sources_and_transforms(shared_server: NatsServer, name: str) -> None:
    """Subjects of elsewhere: the stream has the subjects of a filter for them."""
    url = shared_server.url
    create(url, name)
    fill(url, name, 6)
    sources = [
        {
            "name": name,
            "subject_transforms": [{"src": f"{name}.*", "dest": "moved.{{wildcard(1)}}"}],
        }
    ]
    create(url, f"{name}A", sources=sources)
    transform = {"src": f"{name}B.*", "dest": "changed.{{wildcard(1)}}"}
    create(url, f"{name}B", subjects=[f"{name}B.*"], subject_transform=transform)
    publish(url, [(f"{name}A.own", b"", None), (f"{name}B.x", b"", None)])
    wait_until(lambda: state(url, f"{name}A")["messages"] == 7, "the sourced messages")
    found = {row["subject"] for row in read(url, f"{name}A")}
    assert found == {"moved.0", "moved.1", "moved.2", f"{name}A.own"}
    assert len(read(url, f"{name}A", filterSubjects="moved.1")) == 2
    assert len(read(url, f"{name}A", filterSubjects=f"{name}A.>")) == 1
    (row,) = read(url, f"{name}B", filterSubjects="changed.*")
    assert row["subject"] == "changed.x"


def test_stream_of_other_domain() -> None:
    with hub_and_leaf() as two:
        create(two.hub.url, "FAR")
        fill(two.hub.url, "FAR", 50)
        assert sequences(read(two.leaf.url, "FAR", domain="hub")) == list(range(1, 51))
        assert len(read(two.leaf.url, None, subject="FAR.1", domain="hub")) == 17
        with pytest.raises(StreamNotFoundError, match="'stream', 'servers' and 'domain'"):
            read(two.leaf.url, "FAR")


def test_bucket_read_as_stream(shared_server: NatsServer, name: str) -> None:
    """Markers are messages like others; each key's last message is what a bucket has."""
    url = shared_server.url
    buckets.create_bucket(url, name, history=1)
    buckets.put_many(url, name, [("a", b"1"), ("b", b"1"), ("a", b"2")])
    buckets.delete(url, name, "b")
    found = read(url, f"KV_{name}", deliverPolicy="last_per_subject", includeHeaders=True)
    assert [(row["sequence"], row["data"], row["headers"]) for row in found] == [
        (3, b"2", None),
        (4, b"", [("KV-Operation", ["DEL"])]),
    ]
