"""``nats_stream`` without Spark: limits in rows and bytes, and splits."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from tests.integration.spark.reading.streams import erase, fill
from tests.support.nats.buckets import publish
from tests.support.nats.streams import create_stream
from tests.support.query_driver.driver import new_query, sequences


@pytest.mark.parametrize("direct", [False, True])
def test_limits_in_stream_of_holes(shared_server: NatsServer, name: str, direct: bool) -> None:
    """With Direct Get and, as streams have it by default, without."""
    url = shared_server.url
    create_stream(url, name, allow_direct=direct)
    fill(url, name, 300, subjects=4)
    erase(url, name, *(seq for seq in range(1, 301) if seq % 5))
    kept = list(range(5, 301, 5))
    with new_query(url, stream=name, maxRowsPerTrigger=25) as query:
        batches = [batch.records for batch in query.drain()]
        assert [seq for batch in batches for seq in sequences(batch)] == kept
        assert max(map(len, batches)) <= 25
        assert len(batches) <= 4
    with new_query(
        url, stream=name, maxRowsPerTrigger=10, filterSubjects=f"{name}.1", minPartitions=2
    ) as query:
        batches = [batch.records for batch in query.drain()]
        assert [seq for batch in batches for seq in sequences(batch)] == [
            seq for seq in kept if seq % 4 == 1
        ]
        assert max(map(len, batches)) <= 10


def test_limit_in_bytes(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create_stream(url, name)
    publish(url, ((f"{name}.a", bytes(1000), None) for _ in range(100)))
    with new_query(url, stream=name, maxBytesPerTrigger="20k") as query:
        batches = [batch.records for batch in query.drain()]
    assert [seq for batch in batches for seq in sequences(batch)] == list(range(1, 101))
    assert 10 <= max(map(len, batches)) <= 21


def test_splits(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create_stream(url, name)
    fill(url, name, 400)
    with new_query(url, stream=name, minPartitions=4) as query:
        assert query.plan()
        assert sequences(query.read().records) == list(range(1, 401))
        assert [split.range.end - split.range.start for split in query.splits] == [100] * 4
