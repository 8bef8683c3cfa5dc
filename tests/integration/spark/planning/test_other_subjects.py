"""A bucket whose stream has messages that are not its entries: left out, with a warning."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from nats_stream_source.errors import DataLossError
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from tests.support.nats.buckets import (
    api,
    bucket_config,
    bucket_state,
    create_bucket,
    fill_bucket,
    publish,
    put_many,
)
from tests.support.nats.topology import make_mirror, wait_for_seq
from tests.support.query_driver.batch import read_batch
from tests.support.query_driver.driver import new_query
from tests.support.wait import wait_until

TEXT = "messages that are not entries of the bucket"
TRANSFORM = [{"src": "$KV.origin.>", "dest": "$KV.b.>"}]


def create_with_source(url: str, **source: Any) -> None:
    fill_bucket(url, "origin", [("a", b"1"), ("b", b"2"), ("c", b"3")])
    fill_bucket(url, "b", [("own", b"4")], sources=[{"name": "KV_origin", **source}])
    wait_until(lambda: bucket_state(url, "b")["messages"] == 4, "the sourced messages")


@pytest.mark.parametrize("mode", ["batch", "streaming"])
def test_source_without_transform_is_reported(
    url: str, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    create_with_source(url)
    start(url, mode)
    (record,) = [one for one in caplog.records if TEXT in one.getMessage()]
    assert "messages=3" in record.getMessage()
    assert "subject transform to $KV.b.>" in record.getMessage()


@pytest.mark.parametrize("mirrored", [False, True], ids=["bucket", "mirror"])
def test_further_subject_is_reported(
    url: str, caplog: pytest.LogCaptureFixture, mirrored: bool
) -> None:
    bucket = "m" if mirrored else "b"
    fill_bucket(url, "b", [("own", b"1")], subjects=["$KV.b.>", "other.>"])
    publish(url, [("other.1", b"2", None), ("other.2", b"3", None)])
    if mirrored:
        make_mirror(url, "KV_m", "KV_b", max_msgs_per_subject=1)
    assert len(read_batch(url, bucket=bucket)) == 1
    (record,) = [one for one in caplog.records if TEXT in one.getMessage()]
    assert f"stream=KV_{bucket} messages=2" in record.getMessage()


@pytest.mark.parametrize("entries", [0, 1, 2])
def test_messages_that_arrive_while_query_runs_are_reported(
    url: str, caplog: pytest.LogCaptureFixture, entries: int
) -> None:
    create_bucket(url, "b", subjects=["$KV.b.>", "other.>"])
    put_many(url, "b", [(f"k{n}", b"1") for n in range(entries)])
    with new_query(url, bucket="b") as query:
        query.drain()
        assert TEXT not in caplog.text
        for number in range(4):
            publish(url, [(f"other.{number}", b"2", None)])
            query.drain()
        assert len(query.rows) == entries
    (record,) = [one for one in caplog.records if TEXT in one.getMessage()]
    assert f"messages={max(1, entries)}" in record.getMessage()


def test_source_with_transform_is_not_reported(url: str, caplog: pytest.LogCaptureFixture) -> None:
    create_with_source(url, subject_transforms=TRANSFORM)
    for mode in ("batch", "streaming"):
        start(url, mode)
    assert TEXT not in caplog.text
    assert len(read_batch(url, bucket="b")) == 4


def start(url: str, mode: str) -> None:
    if mode == "batch":
        read_batch(url, bucket="b")
        return
    with new_query(url, bucket="b") as query:
        query.initial_offset()


LEFT_OUT = "messages of other subjects are left out"


@pytest.mark.servers
@pytest.mark.parametrize("count", [1, 50], ids=["small range", "consumer"])
@pytest.mark.parametrize("history", [1, 5])
def test_messages_of_removed_subject_are_left_out(
    url: str, caplog: pytest.LogCaptureFixture, history: int, count: int
) -> None:
    config = bucket_config("b", history)
    further = {**config, "subjects": [*config["subjects"], "other.>"]}
    api(url, "STREAM.CREATE.KV_b", further)
    for number in range(count):
        publish(url, [(f"other.{number}", b"2", None)])
        put_many(url, "b", [(f"k{number}", b"1")])
    api(url, "STREAM.UPDATE.KV_b", config)
    for options in ({}, {"includeHistory": True}, {"asOfSequence": 2 * count}):
        assert len(read_batch(url, bucket="b", **options)) == count
    for options in ({}, {"includeHistory": True}, {"maxRowsPerTrigger": 7}):
        with new_query(url, bucket="b", **options) as query:
            query.drain()
            assert len(query.rows) == count
    assert f"stream=KV_b messages={count} expected=$KV.b.>" in caplog.text


@pytest.mark.parametrize("history", [1, 5])
def test_batch_completes_while_bucket_with_removed_subject_is_written(
    url: str, monkeypatch: pytest.MonkeyPatch, history: int
) -> None:
    """The list of the leader's subjects, the last resort of a batch, lacks other subjects too."""
    config = bucket_config("b", history)
    api(url, "STREAM.CREATE.KV_b", {**config, "subjects": [*config["subjects"], "other.>"]})
    publish(url, [(f"other.{number}", b"2", None) for number in range(50)])
    put_many(url, "b", [(f"k{number}", b"1") for number in range(50)])
    api(url, "STREAM.UPDATE.KV_b", config)
    verify_end = OrderedReader._verify_end

    async def write_meanwhile(reader: OrderedReader) -> None:
        entries = [(f"k{number}", b"2") for number in range(50)]
        await asyncio.to_thread(put_many, url, "b", entries)
        await verify_end(reader)

    monkeypatch.setattr(OrderedReader, "_verify_end", write_meanwhile)
    assert len({row["key"] for row in read_batch(url, bucket="b")}) == 50


@pytest.mark.parametrize("kind", ["further subject", "earlier subject", "entries only"])
def test_other_messages_age_out_before_they_are_read(
    url: str, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    config = bucket_config("b", 64)
    further = {**config, "subjects": [*config["subjects"], "other.>"]}
    api(url, "STREAM.CREATE.KV_b", config if kind == "entries only" else further)
    put_many(url, "b", [("k", b"1")])
    with new_query(url, bucket="b", includeHistory=True) as query:
        query.drain()
        if kind == "entries only":
            put_many(url, "b", [("k", b"2"), ("k", b"3")])
        else:
            publish(url, [("other.1", b"x", None), ("other.1", b"y", None)])
        put_many(url, "b", [("k", b"4")])
        api(url, "STREAM.PURGE.KV_b", {"seq": 3 if kind == "earlier subject" else 4})
        if kind == "earlier subject":
            api(url, "STREAM.UPDATE.KV_b", config)
        if kind == "entries only":
            with pytest.raises(DataLossError, match="revisions 2 to 3 aged out"):
                query.read_new()
        else:
            assert [row["revision"] for row in query.read_new()] == [4]
            assert "whether any of them was an entry of the bucket is unknown" in caplog.text


def test_entries_of_mirror_age_out_before_they_are_read(url: str) -> None:
    fill_bucket(url, "b", [("k", b"1")], 64)
    make_mirror(url, "KV_m", "KV_b", max_msgs_per_subject=64)
    with new_query(url, bucket="m", includeHistory=True) as query:
        query.drain()
        put_many(url, "b", [("k", b"2"), ("k", b"3"), ("k", b"4")])
        wait_for_seq(url, "KV_m", 4)
        api(url, "STREAM.PURGE.KV_m", {"seq": 4})
        with pytest.raises(DataLossError, match="revisions 2 to 3 aged out"):
            query.read_new()


def mirror_config(name: str, origin: str) -> dict[str, Any]:
    config = bucket_config(name, 5, mirror={"name": f"KV_{origin}"})
    del config["subjects"]
    return config


@pytest.mark.servers
@pytest.mark.parametrize("filled", [True, False], ids=["filled", "empty at the start"])
def test_mirror_of_mirror_is_read(url: str, caplog: pytest.LogCaptureFixture, filled: bool) -> None:
    create_bucket(url, "a", 5)
    for name, origin in (("b", "a"), ("c", "b")):
        api(url, f"STREAM.CREATE.KV_{name}", mirror_config(name, origin))
    if filled:
        put_many(url, "a", [("x", b"1"), ("y", b"2")])
        wait_for_seq(url, "KV_c", 2)
    with (
        new_query(url, bucket="c") as query,
        new_query(url, buckets="b, c", includeHistory=True) as both,
    ):
        query.drain()
        both.drain()
        if not filled:
            put_many(url, "a", [("x", b"1"), ("y", b"2")])
            wait_for_seq(url, "KV_c", 2)
        assert len(query.rows) + len(query.read_new()) == 2
        assert len(both.rows) + len(both.read_new()) == 4
    assert len(read_batch(url, bucket="c")) == 2
    assert TEXT not in caplog.text


def test_mirror_promoted_with_subjects_of_origin_is_read(url: str) -> None:
    fill_bucket(url, "a", [("x", b"1"), ("y", b"2")], 5)
    api(url, "STREAM.CREATE.KV_m", mirror_config("m", "a"))
    wait_for_seq(url, "KV_m", 2)
    with new_query(url, bucket="m") as query:
        assert len(query.read_new()) == 2
        put_many(url, "a", [("z", b"3")])
        wait_for_seq(url, "KV_m", 3)
        api(url, "STREAM.DELETE.KV_a")
        promote(url, "$KV.a.>")
        put_many(url, "a", [("z", b"4")])
        assert [row["revision"] for row in query.read_new()] == [3, 4]
    assert len(read_batch(url, bucket="m")) == 3


@pytest.mark.parametrize("fail", [True, False])
def test_mirror_promoted_with_other_subjects_is_data_loss(
    url: str, caplog: pytest.LogCaptureFixture, fail: bool
) -> None:
    fill_bucket(url, "a", [("x", b"1"), ("y", b"2")], 5)
    api(url, "STREAM.CREATE.KV_m", mirror_config("m", "a"))
    wait_for_seq(url, "KV_m", 2)
    with new_query(url, bucket="m", failOnDataLoss=fail) as query:
        assert len(query.read_new()) == 2
        put_many(url, "a", [("z", b"3")])
        wait_for_seq(url, "KV_m", 3)
        promote(url, "$KV.m.>")
        put_many(url, "m", [("z", b"4")])
        text = r"changed from \$KV.a.> to \$KV.m.>"
        if fail:
            with pytest.raises(DataLossError, match=text):
                query.read_new()
        else:
            assert [row["revision"] for row in query.read_new()] == [4]
            assert re.search(text, caplog.text)
            assert LEFT_OUT in caplog.text


def promote(url: str, subject: str) -> None:
    api(url, "STREAM.UPDATE.KV_m", bucket_config("m", 5, subjects=[subject]))
