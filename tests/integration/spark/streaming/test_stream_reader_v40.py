"""The stream reader of Spark 4.0 and 4.1, called in the order of Spark's calls, without Spark.

With Spark, ``make test-spark`` shows the same (tests/compat/spark).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError, OffsetError, OptionError
from nats_stream_source.options import Mode, kv_options
from nats_stream_source.rows.formats import KvFormat
from nats_stream_source.spark.readers import NatsInputPartition, NoAdmissionReader
from tests.support.nats.buckets import create_bucket, put

Json = dict[str, Any]
Make = Callable[..., NoAdmissionReader]


@pytest.fixture
def bucket(url: str, name: str) -> str:
    create_bucket(url, name, history=10)
    return name


@pytest.fixture
def make(url: str, bucket: str) -> Iterator[Make]:
    """Makes readers, one for each start of the query."""
    made: list[NoAdmissionReader] = []

    def reader(**options: str) -> NoAdmissionReader:
        given = {"servers": url, "bucket": bucket, **options}
        made.append(NoAdmissionReader(KvFormat(kv_options(given, Mode.STREAMING))))
        return made[-1]

    yield reader
    for one in made:
        one.stop()


def write(server: NatsServer, bucket: str, *keys: str) -> None:
    for key in keys:
        put(server.url, bucket, key, b"1")


def logged(offset: Json) -> Json:
    """An offset as it comes back from the checkpoint."""
    return dict(json.loads(json.dumps(offset)))


def revisions(reader: NoAdmissionReader, start: Json, end: Json) -> list[int]:
    """The revisions of a micro-batch."""
    found: list[int] = []
    for split in pickle.loads(pickle.dumps(reader.partitions(start, end))):
        assert isinstance(split, NatsInputPartition)
        for rows in reader.read(split):
            found += rows.column("revision").to_pylist()
    return found


def test_query_continues(shared_server: NatsServer, bucket: str, make: Make) -> None:
    """``latestOffset`` before ``initialOffset``, then from where the last one ended."""
    write(shared_server, bucket, "a", "b", "a")
    reader = make()
    end = reader.latestOffset()
    start = reader.initialOffset()
    assert revisions(reader, start, end) == [2, 3]
    assert reader.latestOffset() == end
    write(shared_server, bucket, "a", "c")
    then = reader.latestOffset()
    assert reader.latestOffset() == then
    reader.commit(end)
    assert revisions(reader, end, then) == [4, 5]
    assert then["origin"] == 0
    assert then["initial_through"] == 3


def test_end_requested_twice(shared_server: NatsServer, bucket: str, make: Make) -> None:
    """The initial values stay one micro-batch of last entries, whatever is written meanwhile."""
    write(shared_server, bucket, "a", "a")
    reader = make()
    first = reader.latestOffset()
    write(shared_server, bucket, "b", "b")
    assert reader.latestOffset()["stream_seq"] == first["stream_seq"] == 2
    assert revisions(reader, reader.initialOffset(), first) == [2]
    assert revisions(reader, first, reader.latestOffset()) == [3, 4]


@pytest.mark.parametrize("options", [{}, {"updatesOnly": "true"}, {"includeHistory": "true"}])
def test_query_restarts(
    shared_server: NatsServer, bucket: str, make: Make, options: dict[str, str]
) -> None:
    """Spark passes where the query stands by the splits of an empty range."""
    write(shared_server, bucket, "a")
    reader = make(**options)
    end = logged(reader.latestOffset())
    revisions(reader, reader.initialOffset(), end)
    write(shared_server, bucket, "a", "b")

    again = make(**options)
    assert again.partitions(end, end) == []
    then = again.latestOffset()
    assert revisions(again, end, then) == [2, 3]
    unchanged = ("created", "epoch", "origin", "initial_through")
    assert [then[name] for name in unchanged] == [end[name] for name in unchanged]


def test_micro_batch_failed(shared_server: NatsServer, bucket: str, make: Make) -> None:
    """The micro-batch is repeated with the same rows, also the first one of updates only."""
    write(shared_server, bucket, "a")
    reader = make(updatesOnly="true")
    reader.initialOffset()
    write(shared_server, bucket, "b", "c")
    end = logged(reader.latestOffset())
    write(shared_server, bucket, "d")

    again = make(updatesOnly="true")
    assert again.partitions(end, end) == []
    assert revisions(again, again.initialOffset(), end) == [2, 3]
    assert revisions(again, end, again.latestOffset()) == [4]


def test_data_loss_is_seen_after_restart(
    shared_server: NatsServer, bucket: str, make: Make
) -> None:
    write(shared_server, bucket, "a")
    reader = make()
    end = logged(reader.latestOffset())

    again = make()
    other = {**end, "created": "2020-01-01T00:00:00Z", "time": "2020-01-01T00:00:01Z"}
    assert again.partitions(other, other) == []
    with pytest.raises(DataLossError, match="deleted and re-created"):
        again.latestOffset()


def test_end_taken_too_early_is_refused(shared_server: NatsServer, bucket: str, make: Make) -> None:
    """As with Spark's wrapper for AvailableNow, which would lose what came since the last run."""
    write(shared_server, bucket, "a")
    reader = make(updatesOnly="true")
    end = logged(reader.latestOffset())
    write(shared_server, bucket, "b")

    again = make(updatesOnly="true")
    early = again.latestOffset()
    with pytest.raises(OffsetError, match="triggerAvailableNowWrapper"):
        again.partitions(end, end)
    assert early["origin"] == 2, "from here on, revision 2 would have been left out"


@pytest.mark.parametrize("option", ["maxRowsPerTrigger", "maxBytesPerTrigger"])
def test_limits_are_refused_where_spark_keeps_none(make: Make, option: str) -> None:
    with pytest.raises(OptionError, match=rf"{option}' needs Spark 4\.2 or newer"):
        make(**{option: "5"})
