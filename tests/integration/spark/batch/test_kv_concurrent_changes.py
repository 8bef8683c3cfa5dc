"""Batch reads of a bucket that changes between planning and reading: every key is read once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from nats_stream_source.errors import BucketNotFoundError, DataLossError
from nats_stream_source.jetstream.api import list_subjects
from nats_stream_source.rows.base import StateSplit
from nats_stream_source.spark.reading import latest_values
from tests.support.log_fields import parse_fields
from tests.support.nats.buckets import (
    api,
    consumers,
    create_bucket,
    delete,
    delete_bucket,
    fill_bucket,
    put,
    put_many,
)
from tests.support.query_driver.batch import (
    batch_reader,
    planned_batch,
    read_batch,
    revisions,
    rows_of_task,
    skip_catch_up,
    tasks_of,
)
from tests.support.wait import WriterThread, wait_until


class Writers(WriterThread):
    """Overwrites all keys of a bucket repeatedly, in scattered order."""

    def __init__(self, url: str, bucket: str, keys: int) -> None:
        super().__init__(60)
        self._bucket = (url, bucket)
        self._keys = keys
        self.written = 0

    def write_until_stopped(self) -> None:
        # The step and the number of keys have no common divisor: all keys in turn, scattered.
        for begin in itertools.count(0, 500):
            if self.over.is_set():
                return
            keys = (f"k{i * 7919 % self._keys}" for i in range(begin, begin + 500))
            self.written += len(put_many(*self._bucket, ((key, b"new") for key in keys)))


KEYS = 100_000


@pytest.fixture(scope="module")
def large(url: str) -> Callable[[int], str]:
    """Function that returns a bucket of 100,000 keys by its history; creates each once."""
    made: dict[int, str] = {}

    def bucket_of(history: int) -> str:
        if history not in made:
            name = made[history] = f"large{history}"
            create_bucket(url, name, history, storage="memory")
            put_many(url, name, ((f"k{i}", b"old") for i in range(KEYS)))
        return made[history]

    return bucket_of


@pytest.mark.parametrize(("history", "keys"), [(1, None), (3, "*")])
def test_complete_though_all_is_overwritten(
    url: str, large: Callable[[int], str], history: int, keys: str | None
) -> None:
    bucket = large(history)
    options: dict[str, Any] = {"bucket": bucket} | ({"keys": keys} if keys else {})
    with Writers(url, bucket, KEYS) as writers:
        reader = batch_reader(url, **options)
        (task,) = tasks_of(reader)
        enough = writers.written + 3000
        wait_until(lambda: writers.written > enough, "keys overwritten since the plan")
        rows = list(rows_of_task(reader, task))
    assert isinstance(task.splits[0], StateSplit)
    end = task.splits[0].range.end
    newer = [row for row in rows if row["revision"] > end]
    assert newer  # keys were overwritten while the batch was read
    assert len(newer) < len(rows)
    assert len({row["key"] for row in rows}) == len(rows) == KEYS
    # Entries up to the end of the plan were the last of their key when it was planned.
    assert revisions(rows[: -len(newer)]) == sorted(revisions(rows[: -len(newer)]))


@pytest.mark.parametrize("pauses", [True, False])
def test_keys_that_come_and_go_meanwhile(
    url: str, bucket: str, monkeypatch: pytest.MonkeyPatch, pauses: bool
) -> None:
    fill_bucket(url, bucket, [(key, b"1") for key in "abcdef"], deny_delete=False)
    read = planned_batch(url, bucket=bucket)
    put(url, bucket, "a", b"2")
    put(url, bucket, "new", b"1")
    api(url, f"STREAM.PURGE.KV_{bucket}", {"filter": f"$KV.{bucket}.b"})
    delete(url, bucket, "c")
    if pauses:
        rows = list(read())
        assert [row["key"] for row in rows] == ["d", "e", "f", "a", "new", "c"]
        return
    put(url, bucket, "d", b"2")

    async def then_removed(*args: Any) -> set[str]:
        found = await list_subjects(*args)
        await asyncio.to_thread(
            api, url, f"STREAM.PURGE.KV_{bucket}", {"filter": f"$KV.{bucket}.d"}
        )
        return found

    skip_catch_up(monkeypatch)
    monkeypatch.setattr(latest_values, "list_subjects", then_removed)
    rows = list(read())
    assert [(row["key"], row["operation"]) for row in rows] == [
        ("e", "PUT"),
        ("f", "PUT"),
        ("a", "PUT"),
        ("new", "PUT"),
        ("c", "DEL"),
    ]
    assert next(row for row in rows if row["key"] == "a")["value"] == b"2"
    # A second attempt of the task returns the same rows.
    assert revisions(list(read())) == revisions(rows)


def test_keys_overtaken_and_removed_while_read(url: str, bucket: str) -> None:
    """The number of keys equals the number of keys read, but the keys differ."""
    fill_bucket(url, bucket, [(key, b"1") for key in "abc"])
    read = planned_batch(url, bucket=bucket)
    put(url, bucket, "b", b"2")
    rows = read()
    found = [next(rows)]
    api(url, f"STREAM.PURGE.KV_{bucket}", {"filter": f"$KV.{bucket}.c"})
    found += rows
    assert [(row["key"], row["revision"]) for row in found] == [("a", 1), ("c", 3), ("b", 4)]


@pytest.mark.parametrize("pauses", [True, False])
def test_values_that_were_overtaken_obey_options(
    url: str, bucket: str, monkeypatch: pytest.MonkeyPatch, pauses: bool
) -> None:
    if not pauses:
        skip_catch_up(monkeypatch)
    fill_bucket(url, bucket, [("a", b"1"), ("b", b"1"), ("c", b"1")], 2)
    given = {"metaOnly": True, "ignoreDeletes": True, "includeHeaders": True, "keys": "a,b"}
    read = planned_batch(url, bucket=bucket, **given)
    put_many(url, bucket, [("a", b"22"), ("c", b"22")])
    delete(url, bucket, "b")
    (row,) = read()
    assert (row["key"], row["value"], row["revision"]) == ("a", None, 4)
    # A headers-only consumer sets this header too.
    assert dict(row["headers"])["Nats-Msg-Size"] == ["2"]


@pytest.mark.parametrize("history", [1, 2])
def test_consumer_lost_while_read(
    url: str, bucket: str, history: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The rebuilt consumer lists the last entries again; each key is read exactly once."""
    create_bucket(url, bucket, history)
    # More than the server sends before the reader reads.
    put_many(url, bucket, ((f"k{i}", bytes(4096)) for i in range(15_000)))
    read = planned_batch(url, bucket=bucket)
    rows = read()
    found = [next(rows)]
    put_many(url, bucket, [(f"k{i}", b"new") for i in (0, 1, 14_998, 14_999)] * history)
    (consumer,) = consumers(url, bucket)
    api(url, f"CONSUMER.DELETE.KV_{bucket}.{consumer}")
    found += rows
    line = next(text for text in caplog.messages if text.startswith("consumer rebuilt"))
    fields = parse_fields(line)
    assert [fields[name] for name in ("stream", "start", "end")] == [f"KV_{bucket}", "0", "15000"]
    assert fields["reason"] in ("consumer gone", "missed heartbeat")
    assert len({row["key"] for row in found}) == len(found) == 15_000
    newer = {row["key"] for row in found if row["revision"] > 15_000}
    assert {"k14998", "k14999"} <= newer <= {"k0", "k1", "k14998", "k14999"}


def test_bucket_recreated_or_deleted_while_read(url: str, bucket: str) -> None:
    for history in (1, 2):
        fill_bucket(url, bucket, [("a", b"1")] * 3, history)
        read = planned_batch(url, bucket=bucket)
        delete_bucket(url, bucket)
        fill_bucket(url, bucket, [("a", b"1")] * 4, history)
        with pytest.raises(DataLossError, match="re-created"):
            list(read())
        delete_bucket(url, bucket)
    with pytest.raises(BucketNotFoundError, match=r"'bucket'"):
        read_batch(url, bucket=bucket)


def test_ttl_uncovers_older_value(url: str, bucket: str) -> None:
    """A value expires, and the last value of its key is an older one than was listed."""
    create_bucket(url, bucket, 2, allow_msg_ttl=True)
    older = put(url, bucket, "a", b"older")
    put_many(url, bucket, ((f"k{i}", bytes(5000)) for i in range(6000)))
    put(url, bucket, "a", b"newer", {"Nats-TTL": "2s"})
    read = planned_batch(url, bucket=bucket)
    found = read()
    rows = [next(found)]

    def last_sequence() -> int:
        request = {"last_by_subj": f"$KV.{bucket}.a"}
        return int(api(url, f"STREAM.MSG.GET.KV_{bucket}", request)["message"]["seq"])

    # While the reader pauses, the server has not reached this key in its list.
    wait_until(lambda: last_sequence() == older, "the newer value has expired")
    rows += found
    assert len(rows) == 6001
    assert [row["revision"] for row in rows if row["key"] == "a"] == [older]
