"""A bucket as Arrow without Spark: current values, history, as of a revision; DuckDB and Polars."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import duckdb
import polars
import pytest

from nats_stream_source import read_bucket
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import BucketNotFoundError, OptionError
from tests.support.nats import buckets


@pytest.fixture(scope="module")
def url(shared_server: NatsServer) -> str:
    buckets.fill_bucket(shared_server.url, "arrow", [("a", b"1"), ("b", b"1"), ("a", b"2")], 5)
    return shared_server.url


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {("a", 3), ("b", 2)}),
        ({"includeHistory": "true"}, {("a", 1), ("b", 2), ("a", 3)}),
        ({"includeHistory": True, "connectTimeout": 5.0}, {("a", 1), ("b", 2), ("a", 3)}),
        ({"asOfSequence": "2"}, {("a", 1), ("b", 2)}),
        ({"asOfSequence": 2}, {("a", 1), ("b", 2)}),
        ({"keys": "b"}, {("b", 2)}),
        ({"keys": "c"}, set()),
    ],
)
def test_bucket_as_arrow_has_rows_of_batch(
    url: str, options: dict[str, Any], expected: set[tuple[str, int]]
) -> None:
    rows = read_bucket("arrow", servers=url, **options).read_all().to_pylist()
    assert {(row["key"], row["revision"]) for row in rows} == expected
    assert buckets.consumers(url, "arrow") == []


def test_duckdb_and_polars_read_it_in_one_line(url: str) -> None:
    found = duckdb.from_arrow(read_bucket("arrow", servers=url)).aggregate("max(revision)")
    assert found.fetchall() == [(3,)]
    frame = polars.DataFrame(read_bucket("arrow", servers=url))
    assert frame["revision"].max() == 3


async def test_read_in_running_event_loop_and_closed_early(url: str) -> None:
    threads = threading.active_count()
    reader = read_bucket("arrow", servers=url)
    assert reader.read_next_batch().num_rows > 0
    other = read_bucket("arrow", servers=url)  # beside the first one
    assert other.read_all().num_rows == 2
    del reader, other
    await asyncio.sleep(0)
    assert threading.active_count() <= threads


def test_bucket_as_arrow_absent_is_error_of_call(url: str) -> None:
    with pytest.raises(BucketNotFoundError):
        read_bucket("none", servers=url)
    with pytest.raises(OptionError, match="updatesOnly"):
        read_bucket("arrow", servers=url, updatesOnly="true")
