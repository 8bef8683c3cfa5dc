"""Tasks with many splits: their rows one after the other, their requests together."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.options import Mode, kv_options
from nats_stream_source.rows.formats import KvFormat
from nats_stream_source.spark.reading import split_reader
from nats_stream_source.spark.reading.split_reader import read_splits
from nats_stream_source.spark.runner import close_cached_runners
from nats_stream_source.wire.framing.frames import Frames
from tests.support.nats.buckets import consumers, create_bucket, delete_bucket, put_many
from tests.support.query_driver.driver import Record, new_query, sequences_by_stream

pytestmark = pytest.mark.servers

NAMES = [f"b{i:02}" for i in range(12)]


@pytest.fixture
def twelve(nats_server: NatsServer) -> str:
    """The address of a server with twelve buckets of 100 entries: more than a small range."""
    for name in NAMES:
        create_bucket(nats_server.url, name)
        put_many(nats_server.url, name, ((f"k{i}", b"v") for i in range(100)))
    return nats_server.url


@pytest.mark.parametrize("long", [False, True], ids=["short ranges", "long ranges"])
def test_rows_come_split_by_split(twelve: str, monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
    """Ranges that count as long are read one at a time; the rows are the same."""
    if long:
        monkeypatch.setattr(split_reader, "_MAX_AHEAD_SEQUENCES", 50)
    open_now, most = 0, 0
    original = OrderedReader.batches

    async def counted(reader: OrderedReader) -> AsyncGenerator[Frames, None]:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        async for frames in original(reader):
            yield frames
        open_now -= 1

    monkeypatch.setattr(OrderedReader, "batches", counted)
    with new_query(twelve, bucketPattern="b.*", cores=1) as query:
        assert query.read_sequences() == {name: list(range(1, 101)) for name in NAMES}
        (task,) = query.tasks
        ordered = [split.range.stream for split in task]
        assert [f"KV_{row['bucket']}" for row in query.records[::100]] == ordered
    assert open_now == 0
    assert most == 1 if long else most > 1
    assert not any(consumers(twelve, name) for name in NAMES)


def test_task_that_ends_early_deletes_its_consumers(twelve: str) -> None:
    """As when Spark cancels a task, or a ``LIMIT`` needs no more rows."""
    options = kv_options({"servers": twelve, "bucketPattern": "b.*"}, Mode.STREAMING)
    with new_query(twelve, bucketPattern="b.*", cores=1) as query:
        query.read_sequences()
        (task,) = query.tasks
        rows = read_splits(task, KvFormat(options))
        first = next(iter(rows))
        assert first.num_rows == 100
        rows.close()  # type: ignore[attr-defined]
        close_cached_runners()
    assert not any(consumers(twelve, name) for name in NAMES)


def test_split_that_fails_ends_task_when_it_is_its_turn(
    twelve: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    options = kv_options({"servers": twelve, "bucketPattern": "b.*"}, Mode.STREAMING)
    with new_query(twelve, bucketPattern="b.*", cores=1) as query:
        query.read_sequences()
        (task,) = query.tasks
        delete_bucket(twelve, NAMES[2])
        create_bucket(twelve, NAMES[2])
        put_many(twelve, NAMES[2], ((f"k{i}", b"v") for i in range(100)))
        rows: list[Record] = []
        batches = read_splits(task, KvFormat(options))
        with pytest.raises(DataLossError, match=rf"KV_{NAMES[2]}.*re-created"):
            rows.extend(row for batch in batches for row in batch.to_pylist())
        close_cached_runners()
    assert sequences_by_stream(rows).keys() <= {*NAMES[:3]}
    assert sequences_by_stream(rows)[NAMES[1]] == list(range(1, 101))
    assert not any(consumers(twelve, name) for name in NAMES)
    assert not caplog.records  # no exception of a split that nobody waited for


def test_bucket_deleted_while_task_reads(twelve: str, caplog: pytest.LogCaptureFixture) -> None:
    """A data loss: an error that names it, or without ``failOnDataLoss`` the rows of the others."""
    given = {"servers": twelve, "bucketPattern": "b.*"}
    with new_query(twelve, bucketPattern="b.*", cores=1) as query:
        query.read_sequences()
        (task,) = query.tasks
        delete_bucket(twelve, NAMES[2])
        with pytest.raises(DataLossError, match=rf"KV_{NAMES[2]}.*was deleted while the range"):
            list(read_splits(task, KvFormat(kv_options(given, Mode.STREAMING))))
        accepting = kv_options({**given, "failOnDataLoss": "false"}, Mode.STREAMING)
        batches = list(read_splits(task, KvFormat(accepting)))
        close_cached_runners()
    found = sequences_by_stream([row for batch in batches for row in batch.to_pylist()])
    assert found == {name: list(range(1, 101)) for name in NAMES if name != NAMES[2]}
    assert f"data loss accepted: stream KV_{NAMES[2]}" in caplog.text
