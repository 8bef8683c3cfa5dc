"""A start position for each stream, start times later than the last message, and batches."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError, OptionError
from tests.support.nats.buckets import api, fill_bucket, publish, put_many
from tests.support.nats.streams import create_stream
from tests.support.query_driver.batch import batch_reader, read_batch, tasks_of
from tests.support.query_driver.driver import new_query, read_all, sequences_by_stream
from tests.support.wait import wait_until

pytestmark = pytest.mark.servers


@pytest.fixture
def url(nats_server: NatsServer) -> str:
    """The address of a server with the streams A, B and C, of four messages each."""
    for name in ("A", "B", "C"):
        create_stream(nats_server.url, name)
        publish(nats_server.url, [(f"{name}.x", b"", None)] * 4)
    return nats_server.url


def _time(url: str, stream: str, seq: int) -> str:
    message = api(url, f"STREAM.MSG.GET.{stream}", {"seq": seq})["message"]
    return str(message["time"])


def starts(**by_name: int | str) -> str:
    return json.dumps(by_name)


def test_sequences_by_name(url: str) -> None:
    given = {"streams": "A,B,C", "startSequence": starts(A=3, B="earliest", C="latest")}
    with new_query(url, **given) as query:
        assert query.read_sequences() == {"A": [3, 4], "B": [1, 2, 3, 4]}
        publish(url, [(f"{name}.x", b"", None) for name in ("A", "B", "C")])
        assert query.read_sequences() == {"A": [5], "B": [5], "C": [5]}


def test_times_by_name(url: str) -> None:
    given = {
        "streams": "A,B,C",
        "startTime": starts(A=_time(url, "A", 2), B="latest", C="earliest"),
    }
    with new_query(url, **given) as query:
        assert query.read_sequences() == {"A": [2, 3, 4], "C": [1, 2, 3, 4]}
        publish(url, [("B.x", b"", None)])
        assert query.read_sequences() == {"B": [5]}


def test_revisions_by_name_of_buckets(nats_server: NatsServer) -> None:
    url = nats_server.url
    for name in ("a", "b"):
        fill_bucket(url, name, [("k", b"1"), ("k", b"2"), ("k", b"3")], history=5)
    with new_query(url, buckets="a,b", startSequence=starts(a="earliest", b=2)) as query:
        assert query.read_sequences() == {"a": [1, 2, 3], "b": [2, 3]}


def test_pattern_with_starts_of_some_streams(url: str) -> None:
    """Streams without a start begin with their first message, and so do later ones."""
    given = {"streamPattern": ".", "discoveryInterval": 1}
    with new_query(url, **given, startSequence=starts(A=3, B="latest", D=9)) as query:
        assert query.read_sequences() == {"A": [3, 4], "C": [1, 2, 3, 4]}
        create_stream(url, "D")
        publish(url, [("D.x", b"", None)])
        assert query.read_sequences() == {"D": [1]}


def test_checkpoint_takes_precedence_over_starts(url: str) -> None:
    with new_query(url, streams="A,B", startSequence=starts(A=3, B=2)) as query:
        query.read_sequences()
    publish(url, [("A.x", b"", None)])
    given = {"streams": "A,B,C", "startSequence": starts(A=1, B=1, C=4)}
    with new_query(url, offset=query.offset, **given) as restarted:
        assert restarted.read_sequences() == {"A": [5], "C": [4]}


def test_batch_with_starts_by_name(url: str, spark: SparkSession) -> None:
    given = {"streams": "A,B", "startSequence": starts(A=3, B="earliest")}
    assert sequences_by_stream(read_batch(url, **given)) == {"A": [3, 4], "B": [1, 2, 3, 4]}
    with pytest.raises(
        OptionError, match="read stream A with option 'startSequence': 6 lies beyon"
    ):
        read_batch(url, streams="A,B", startSequence=starts(A=6, B=1))
    rows = spark.read.format("nats_stream").options(servers=url, **given).load().collect()
    assert sorted((row.stream, row.sequence) for row in rows) == [
        *(("A", 3), ("A", 4)),
        *(("B", seq) for seq in range(1, 5)),
    ]


def test_chosen_sequence_that_aged_out_is_data_loss(url: str) -> None:
    """As for one stream; a stream that begins with its earliest message has lost none."""
    for name in ("A", "B"):
        api(url, f"STREAM.PURGE.{name}", {"keep": 1})
    with pytest.raises(DataLossError, match=r"A: .*2 to 3"):
        read_all(url, streams="A,B", startSequence=starts(A=2, B="earliest"))
    with new_query(url, streams="A,B", startSequence=starts(A=4, B="earliest")) as query:
        assert query.read_sequences() == {"A": [4], "B": [4]}


FUTURE = "2222-01-01T00:00:00Z"

LATE: dict[str, tuple[dict[str, Any], str | None]] = {
    "default": ({}, None),
    "latest": ({"startTimeStrategy": "latest"}, None),
    "future, latest": ({"startTimeStrategy": "latest", "startTime": FUTURE}, None),
    "future, default": ({"startTime": FUTURE}, "is in the future, expected the server's time"),
    "error": (
        {"startTimeStrategy": "error"},
        "the last message of stream A is of 20.*, expected a message of 20.* or later; set an "
        "earlier time, or 'startTimeStrategy' to 'latest'",
    ),
    "future, error": (
        {"startTimeStrategy": "error", "startTime": FUTURE},
        "the last message of stream A is of 20.*, expected a message of 2222-01-01T00:00:00Z",
    ),
}


@pytest.mark.parametrize(("given", "problem"), LATE.values(), ids=LATE)
def test_start_time_later_than_last_message(
    url: str, given: dict[str, Any], problem: str | None
) -> None:
    """In a micro-batch and in a batch."""
    publish(url, [("B.x", b"", None)])
    options = {"stream": "A", "startTime": _time(url, "B", 5), **given}
    if problem is not None:
        for read in (read_all, read_batch):
            with pytest.raises(OptionError, match=problem):
                read(url, **options)
        return
    with new_query(url, **options) as query:
        assert query.read_sequences() == {}
        publish(url, [("A.x", b"", None)])
        assert query.read_sequences() == {"A": [5]}
    if given:
        assert len(read_batch(url, **options)) == (0 if FUTURE in given.values() else 1)


def test_strategy_applies_to_each_stream(url: str) -> None:
    late = starts(A=_time(url, "C", 1), C=_time(url, "C", 1))
    given = {"streams": "A,C", "startTime": late}
    with pytest.raises(OptionError, match="the last message of stream A is of"):
        read_all(url, **given, startTimeStrategy="error")
    with new_query(url, **given, startTimeStrategy="latest") as query:
        assert query.read_sequences() == {"C": [1, 2, 3, 4]}


def test_strategy_error_and_empty_stream(url: str) -> None:
    create_stream(url, "E")
    options = {"stream": "E", "startTime": _time(url, "A", 1), "startTimeStrategy": "error"}
    with pytest.raises(OptionError, match="stream E is empty"):
        read_all(url, **options)


@pytest.fixture
def sites(nats_server: NatsServer) -> str:
    """The address of a server with three buckets; the second one keeps a history."""
    for name, history in (("site-1", 1), ("site-2", 5), ("other", 1)):
        fill_bucket(nats_server.url, name, ((f"k{i % 2}", b"v") for i in range(4)), history=history)
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
        fill_bucket(nats_server.url, f"b{i}", [("k", b"v")])
    tasks = tasks_of(batch_reader(nats_server.url, bucketPattern=".*"))
    assert len(tasks) == 1
    assert len(tasks[0].splits) == 12


def test_time_beyond_end_of_streams(sites: str) -> None:
    with pytest.raises(OptionError, match="'endTime'"):
        read_batch(sites, streams="KV_other,KV_site-1", endTime="2999-01-01T00:00:00Z")
