"""A bucket as it is now, complete though it is written meanwhile; ranges of its revisions."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from batch_reads import Row, batch_reader, read_batch, rows_of_task, tasks_of
from buckets import (
    api,
    connected,
    consumers,
    create_bucket,
    delete,
    delete_bucket,
    purge,
    put,
    put_many,
    stream_state,
)
from cluster import Cluster, lagging
from loops import run
from pyspark.sql import SparkSession
from topology import make_mirror, wait_until

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    BucketNotFoundError,
    DataLossError,
    MinLastSequenceError,
    OptionError,
)
from nats_stream_source.source import current
from nats_stream_source.source.batch_plan import What
from nats_stream_source.source.reader import stream_after
from nats_stream_source.source.runtime import drop_kept_runners
from nats_stream_source.source.tail import Tail
from nats_stream_source.wire.frames import Frames

_serial = itertools.count(1)


@pytest.fixture
def bucket() -> Iterator[str]:
    yield f"b{next(_serial)}"
    drop_kept_runners()


def revisions(rows: list[Row]) -> list[int]:
    return [row["revision"] for row in rows]


# -- as it is now ---------------------------------------------------------------------------------


@pytest.mark.parametrize("history", [1, 3])
def test_the_last_entry_of_each_key(shared_server: NatsServer, bucket: str, history: int) -> None:
    url = shared_server.url
    create_bucket(url, bucket, history)
    put_many(url, bucket, [("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4"), ("d", b"5")])
    delete(url, bucket, "c")
    purge(url, bucket, "d")
    rows = read_batch(url, bucket=bucket)
    assert [(row["key"], row["operation"], row["value"], row["revision"]) for row in rows] == [
        ("b", "PUT", b"2", 2),
        ("a", "PUT", b"3", 3),
        ("c", "DEL", None, 6),
        ("d", "PURGE", None, 7),
    ]
    assert all(row["initial"] and row["bucket"] == bucket for row in rows)
    assert revisions(read_batch(url, bucket=bucket, ignoreDeletes=True)) == [2, 3]
    assert revisions(read_batch(url, bucket=bucket, keys="a,d")) == [3, 7]
    (row,) = read_batch(url, bucket=bucket, keys="a", metaOnly=True, includeHeaders=True)
    assert (row["value"], row["revision"]) == (None, 3)
    assert "headers" in row
    assert consumers(url, bucket) == []


def test_an_empty_bucket(shared_server: NatsServer, bucket: str) -> None:
    create_bucket(shared_server.url, bucket)
    for history in (False, True):
        assert read_batch(shared_server.url, bucket=bucket, includeHistory=history) == []


class Writers:
    """Overwrite all keys of a bucket again and again, in an order of its own, until stopped."""

    def __init__(self, url: str, bucket: str, keys: int) -> None:
        self.written = 0
        self._stop = threading.Event()
        self._work = (url, bucket, keys)
        self._thread = threading.Thread(target=lambda: run(self._write(*self._work)))

    def __enter__(self) -> Writers:
        self._thread.start()
        wait_until("writers write", lambda: self.written > 0)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _write(self, url: str, bucket: str, keys: int) -> None:
        async with connected(url) as client:
            jetstream = client.jetstream()
            # A step without a common divisor: all keys in turn, scattered.
            for begin in itertools.count(0, 500):
                if self._stop.is_set():
                    return
                acks = [
                    await jetstream.publish_async(f"$KV.{bucket}.k{i * 7919 % keys}", b"new")
                    for i in range(begin, begin + 500)
                ]
                await asyncio.gather(*acks)
                self.written += len(acks)


KEYS = 100_000


@pytest.fixture(scope="module")
def large(shared_server: NatsServer) -> Callable[[int], str]:
    """Buckets of 100,000 keys, by their history; each made once."""
    made: dict[int, str] = {}

    def bucket_of(history: int) -> str:
        if history not in made:
            name = made[history] = f"large{history}"
            create_bucket(shared_server.url, name, history, storage="memory")
            put_many(shared_server.url, name, ((f"k{i}", b"old") for i in range(KEYS)))
        return made[history]

    return bucket_of


@pytest.mark.parametrize(("history", "keys"), [(1, None), (3, "*")])
def test_complete_though_all_is_overwritten(
    shared_server: NatsServer, large: Callable[[int], str], history: int, keys: str | None
) -> None:
    url, bucket = shared_server.url, large(history)
    options: dict[str, Any] = {"bucket": bucket} | ({"keys": keys} if keys else {})
    with Writers(url, bucket, KEYS) as writers:
        reader = batch_reader(url, **options)
        (task,) = tasks_of(reader)
        enough = writers.written + 3000
        wait_until("keys overwritten since the plan", lambda: writers.written > enough)
        rows = list(rows_of_task(reader, task))
    drop_kept_runners()
    assert task.task.what is What.CURRENT
    end = task.task.plan.end
    newer = [row for row in rows if row["revision"] > end]
    assert newer  # overwriting did happen
    assert len(newer) < len(rows)
    assert len({row["key"] for row in rows}) == len(rows) == KEYS
    # As new as the plan: a key's entry from before it was the last one when the plan was made.
    assert revisions(rows[: -len(newer)]) == sorted(revisions(rows[: -len(newer)]))


def without_pause(self: Tail, *args: Any, **kwargs: Any) -> Iterator[Frames]:
    """Instead of ``Tail.frames``: as when the writers are too fast for it."""
    self.info = stream_after(self._runner, self._task.plan, self._query)
    yield from ()


@pytest.mark.parametrize("pauses", [True, False])
def test_keys_that_come_and_go_meanwhile(
    shared_server: NatsServer, bucket: str, monkeypatch: pytest.MonkeyPatch, pauses: bool
) -> None:
    url = shared_server.url
    create_bucket(url, bucket, deny_delete=False)
    put_many(url, bucket, [(key, b"1") for key in "abcdef"])
    reader = batch_reader(url, bucket=bucket)
    (task,) = tasks_of(reader)
    put(url, bucket, "a", b"2")
    put(url, bucket, "new", b"1")
    api(url, f"STREAM.PURGE.KV_{bucket}", {"filter": f"$KV.{bucket}.b"})
    delete(url, bucket, "c")
    if pauses:
        rows = list(rows_of_task(reader, task))
        assert [row["key"] for row in rows] == ["d", "e", "f", "a", "new", "c"]
        return
    put(url, bucket, "d", b"2")
    listed = current.listed_subjects

    async def then_removed(*args: Any) -> set[str]:
        found = await listed(*args)
        await asyncio.to_thread(
            api, url, f"STREAM.PURGE.KV_{bucket}", {"filter": f"$KV.{bucket}.d"}
        )
        return found

    monkeypatch.setattr(Tail, "frames", without_pause)
    monkeypatch.setattr(current, "listed_subjects", then_removed)
    rows = list(rows_of_task(reader, task))
    assert [(row["key"], row["operation"]) for row in rows] == [
        ("e", "PUT"),
        ("f", "PUT"),
        ("a", "PUT"),
        ("c", "DEL"),
        ("new", "PUT"),
    ]
    assert next(row for row in rows if row["key"] == "a")["value"] == b"2"
    # A second attempt at the task: the first rows are as they were.
    assert revisions(list(rows_of_task(reader, task))) == revisions(rows)


def test_one_key_overtaken_and_another_removed(shared_server: NatsServer, bucket: str) -> None:
    """As many keys as were seen are there, but not the same ones."""
    url = shared_server.url
    create_bucket(url, bucket)
    put_many(url, bucket, [(key, b"1") for key in "abc"])
    reader = batch_reader(url, bucket=bucket)
    (task,) = tasks_of(reader)
    put(url, bucket, "b", b"2")
    rows = rows_of_task(reader, task)
    found = [next(rows)]
    api(url, f"STREAM.PURGE.KV_{bucket}", {"filter": f"$KV.{bucket}.c"})
    found += rows
    assert [(row["key"], row["revision"]) for row in found] == [("a", 1), ("c", 3), ("b", 4)]


@pytest.mark.parametrize("pauses", [True, False])
def test_values_that_were_overtaken_obey_the_options(
    shared_server: NatsServer, bucket: str, monkeypatch: pytest.MonkeyPatch, pauses: bool
) -> None:
    if not pauses:
        monkeypatch.setattr(Tail, "frames", without_pause)
    url = shared_server.url
    create_bucket(url, bucket, 2)
    put_many(url, bucket, [("a", b"1"), ("b", b"1"), ("c", b"1")])
    reader = batch_reader(
        url, bucket=bucket, metaOnly=True, ignoreDeletes=True, includeHeaders=True, keys="a,b"
    )
    (task,) = tasks_of(reader)
    put_many(url, bucket, [("a", b"22"), ("c", b"22")])
    delete(url, bucket, "b")
    (row,) = rows_of_task(reader, task)
    assert (row["key"], row["value"], row["revision"]) == ("a", None, 4)
    # As from a consumer that leaves values out.
    assert dict(row["headers"])["Nats-Msg-Size"] == ["2"]


@pytest.mark.parametrize("history", [1, 2])
def test_a_consumer_that_is_lost_meanwhile(
    shared_server: NatsServer, bucket: str, history: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The list of last entries begins anew; no key comes twice, and none is missing."""
    url = shared_server.url
    create_bucket(url, bucket, history)
    # More than the server sends ahead.
    put_many(url, bucket, ((f"k{i}", bytes(4096)) for i in range(15_000)))
    reader = batch_reader(url, bucket=bucket)
    (task,) = tasks_of(reader)
    rows = rows_of_task(reader, task)
    found = [next(rows)]
    put_many(url, bucket, [(f"k{i}", b"new") for i in (0, 1, 14_998, 14_999)] * history)
    (consumer,) = consumers(url, bucket)
    api(url, f"CONSUMER.DELETE.KV_{bucket}.{consumer}")
    found += rows
    assert "consumer rebuilt" in caplog.text
    assert len({row["key"] for row in found}) == len(found) == 15_000
    newer = {row["key"] for row in found if row["revision"] > 15_000}
    assert {"k14998", "k14999"} <= newer <= {"k0", "k1", "k14998", "k14999"}


def test_a_bucket_made_anew_or_deleted_meanwhile(shared_server: NatsServer, bucket: str) -> None:
    url = shared_server.url
    for history in (1, 2):
        create_bucket(url, bucket, history)
        put_many(url, bucket, [("a", b"1")] * 3)
        reader = batch_reader(url, bucket=bucket)
        (task,) = tasks_of(reader)
        delete_bucket(url, bucket)
        create_bucket(url, bucket, history)
        put_many(url, bucket, [("a", b"1")] * 4)
        with pytest.raises(DataLossError, match="made again"):
            list(rows_of_task(reader, task))
        delete_bucket(url, bucket)
    with pytest.raises(BucketNotFoundError, match=r"'bucket'"):
        read_batch(url, bucket=bucket)


def test_a_mirror_of_a_bucket(shared_server: NatsServer, bucket: str) -> None:
    url = shared_server.url
    create_bucket(url, bucket, 2)
    put_many(url, bucket, [("a", b"1"), ("b", b"1"), ("a", b"2")])
    make_mirror(url, f"KV_{bucket}m", f"KV_{bucket}", max_msgs_per_subject=2)
    rows = read_batch(url, bucket=f"{bucket}m")
    assert [(row["key"], row["revision"]) for row in rows] == [("b", 2), ("a", 3)]
    rows = read_batch(url, bucket=f"{bucket}m", asOfSequence=1)
    assert [(row["key"], row["revision"]) for row in rows] == [("a", 1)]


@pytest.mark.parametrize("history", [1, 2])
def test_a_replica_that_lags_gives_no_old_entry(bucket: str, history: int) -> None:
    """Most consumers are placed on servers other than the leader, one of which is behind."""
    with Cluster(lines=True) as cluster:
        create_bucket(cluster.url, bucket, history, num_replicas=3)
        put_many(cluster.url, bucket, [("a", b"1"), ("b", b"1"), ("c", b"1")])
        with lagging(cluster, bucket) as one:
            put_many(one.leader.url, bucket, [("a", b"2"), ("d", b"1")])
            for _ in range(4):
                rows = read_batch(one.third.url, bucket=bucket)
                assert [(row["key"], row["revision"]) for row in rows] == [
                    ("b", 2),
                    ("c", 3),
                    ("a", 4),
                    ("d", 5),
                ]
        drop_kept_runners()
        assert consumers(cluster.url, bucket) == []


# -- ranges ---------------------------------------------------------------------------------------


def test_all_revisions_and_those_from_one_on(shared_server: NatsServer, bucket: str) -> None:
    url = shared_server.url
    create_bucket(url, bucket, 2)
    put_many(url, bucket, [("a", b"%d" % i) for i in range(3)] + [("b", b"3")])
    assert revisions(read_batch(url, bucket=bucket, includeHistory=True)) == [2, 3, 4]
    assert revisions(read_batch(url, bucket=bucket, startSequence=3)) == [3, 4]
    created = {
        row["revision"]: row["created"]
        for row in read_batch(url, bucket=bucket, includeHistory=True)
    }
    rows = read_batch(url, bucket=bucket, startTime=created[4].isoformat())
    assert revisions(rows) == [4]
    assert all(row["initial"] for row in rows)
    # Where the last batch ended there is nothing yet, which is no mistake.
    assert read_batch(url, bucket=bucket, startSequence=5) == []
    with pytest.raises(OptionError, match=r"'startSequence': 6 lies beyond.*minLastRevision=6"):
        read_batch(url, bucket=bucket, startSequence=6)
    with pytest.raises(OptionError, match=r"'startTime'.*future"):
        read_batch(url, bucket=bucket, startTime="2999-01-01T00:00:00Z")


def test_own_writes_are_seen(shared_server: NatsServer, bucket: str) -> None:
    url = shared_server.url
    create_bucket(url, bucket)
    revision = put(url, bucket, "a", b"1")
    assert revisions(read_batch(url, bucket=bucket, minLastRevision=revision)) == [revision]
    with pytest.raises(MinLastSequenceError):
        read_batch(url, bucket=bucket, minLastRevision=revision + 1, requestTimeout=1)


def test_splits_of_a_history(shared_server: NatsServer, bucket: str) -> None:
    url = shared_server.url
    create_bucket(url, bucket, 2)
    put_many(url, bucket, [(f"k{i % 700}", b"%d" % i) for i in range(2000)])
    expected = revisions(read_batch(url, bucket=bucket, includeHistory=True))
    assert len(expected) == stream_state(url, bucket)["messages"]
    reader = batch_reader(url, bucket=bucket, includeHistory=True, minPartitions=4)
    tasks = tasks_of(reader)
    assert len(tasks) == 4
    found = [revisions(list(rows_of_task(reader, task))) for task in tasks]
    assert all(found)
    assert list(itertools.chain(*found)) == expected


# -- in Spark -------------------------------------------------------------------------------------


def test_spark_reads(spark: SparkSession, shared_server: NatsServer, bucket: str) -> None:
    url = shared_server.url
    create_bucket(url, bucket, 2)
    put_many(url, bucket, [("a", b"1"), ("b", b"2"), ("a", b"3")])

    def read(**options: Any) -> list[Any]:
        frame = spark.read.format("nats_kv").options(servers=url, bucket=bucket, **options).load()
        rows: list[Any] = frame.select("key", "revision").orderBy("revision").collect()
        return [tuple(row) for row in rows]

    assert read() == [("b", 2), ("a", 3)]
    assert read(asOfSequence=2) == [("a", 1), ("b", 2)]
    assert read(includeHistory=True, minPartitions=2) == [("a", 1), ("b", 2), ("a", 3)]
    put_many(url, bucket, [("a", b"4")])
    with pytest.raises(Exception, match=r"DataLossError: .*of 1 keys \('a'\)"):
        read(asOfSequence=2)
    with pytest.raises(Exception, match="OptionError: option 'asOfSequence': 9 lies beyond"):
        read(asOfSequence=9)
    assert consumers(url, bucket) == []


def test_a_ttl_uncovers_an_older_value(shared_server: NatsServer, bucket: str) -> None:
    """Nothing is written, and yet the key's last value is another one than was listed."""
    url = shared_server.url
    create_bucket(url, bucket, 2, allow_msg_ttl=True)
    older = put(url, bucket, "a", b"older")
    put_many(url, bucket, ((f"k{i}", bytes(5000)) for i in range(6000)))
    put(url, bucket, "a", b"newer", {"Nats-TTL": "2s"})
    reader = batch_reader(url, bucket=bucket)
    (task,) = tasks_of(reader)
    found = rows_of_task(reader, task)
    rows = [next(found)]

    def last() -> int:
        request = {"last_by_subj": f"$KV.{bucket}.a"}
        return int(api(url, f"STREAM.MSG.GET.KV_{bucket}", request)["message"]["seq"])

    # While the reader pauses, the server has not come so far in its list.
    wait_until("the newer value is gone", lambda: last() == older)
    rows += found
    assert len(rows) == 6001
    assert [row["revision"] for row in rows if row["key"] == "a"] == [older]
