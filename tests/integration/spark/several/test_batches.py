"""Batches of several buckets or streams."""

from __future__ import annotations

from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import OptionError
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.query_driver.batch import batch_reader, read_batch, tasks_of
from tests.support.query_driver.driver import sequences_by_stream
from tests.support.wait import wait_until

pytestmark = pytest.mark.servers


@pytest.fixture
def sites(nats_server: NatsServer) -> str:
    """The address of a server with three buckets; the second one keeps a history."""
    for name, history in (("site-1", 1), ("site-2", 5), ("other", 1)):
        create_bucket(nats_server.url, name, history=history)
        put_many(nats_server.url, name, ((f"k{i % 2}", b"v") for i in range(4)))
    return nats_server.url


BATCHES: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
    "present entries": ({"buckets": "site-1,site-2"}, {"site-1": [3, 4], "site-2": [3, 4]}),
    "a pattern": ({"bucketPattern": "site-2|other"}, {"site-2": [3, 4], "other": [3, 4]}),
    "every revision": (
        {"bucketPattern": "site.*", "includeHistory": True},
        {"site-1": [3, 4], "site-2": [1, 2, 3, 4]},
    ),
    "a filter": ({"bucketPattern": "site.*", "keys": "k1"}, {"site-1": [4], "site-2": [4]}),
    "in several tasks": (
        {"bucketPattern": "site.*", "includeHistory": True, "minPartitions": 4},
        {"site-1": [3, 4], "site-2": [1, 2, 3, 4]},
    ),
    "streams": ({"streams": "KV_site-2,KV_other"}, {"KV_site-2": [1, 2, 3, 4], "KV_other": [3, 4]}),
    "no match": ({"bucketPattern": "nothing.*"}, {}),
}


@pytest.mark.parametrize(("options", "expected"), BATCHES.values(), ids=BATCHES)
def test_batch(sites: str, options: dict[str, Any], expected: dict[str, list[int]]) -> None:
    found = sequences_by_stream(read_batch(sites, **options))
    assert {name: sorted(rows) for name, rows in found.items()} == expected


def test_state_of_all_buckets_at_time(sites: str) -> None:
    first = read_batch(sites, bucketPattern="site.*")
    newest = max(row["created"] for row in first)

    def later() -> bool:
        put_many(sites, "site-2", [("k0", b"w")])
        return max(row["created"] for row in read_batch(sites, bucket="site-2")) > newest

    wait_until(later, "an entry that is later")
    found = sequences_by_stream(
        read_batch(sites, bucketPattern="site.*", asOfTime=newest.isoformat())
    )
    assert {name: sorted(rows) for name, rows in found.items()} == {
        "site-1": [3, 4],
        "site-2": [3, 4],
    }


def test_small_buckets_share_tasks(nats_server: NatsServer) -> None:
    for i in range(12):
        create_bucket(nats_server.url, f"b{i}")
        put_many(nats_server.url, f"b{i}", [("k", b"v")])
    tasks = tasks_of(batch_reader(nats_server.url, bucketPattern=".*"))
    assert len(tasks) == 1
    assert len(tasks[0].splits) == 12
    assert repr(tasks[0]).endswith("and 11 more)")


def test_time_beyond_end_of_streams(sites: str) -> None:
    with pytest.raises(OptionError, match="'endTime'"):
        read_batch(sites, streams="KV_other,KV_site-1", endTime="2999-01-01T00:00:00Z")
