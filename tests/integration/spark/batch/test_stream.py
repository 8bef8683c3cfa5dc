"""Ranges of a stream by sequence and time, deliver policies, splits, messages removed meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    MinLastSequenceError,
    OptionError,
    StreamNotFoundError,
    UnsupportedStreamError,
)
from nats_stream_source.rows.start_position import resolve_start
from nats_stream_source.spark.planning import batch_planner
from tests.support.nats.buckets import api, publish
from tests.support.nats.streams import create_stream
from tests.support.query_driver.batch import (
    batch_reader,
    planned_batch,
    read_batch,
    rows_of_task,
    tasks_of,
)
from tests.support.query_driver.driver import sequences


@pytest.fixture
def stream(url: str, name: str) -> str:
    """A stream of the test's own."""
    create_stream(url, name)
    return name


def fill(url: str, name: str, subjects: str) -> list[int]:
    """One message for each letter, on the subject of that letter."""
    return publish(url, [(f"{name}.{one}", b"%d" % i, None) for i, one in enumerate(subjects)])


def read(url: str, name: str, **options: Any) -> list[int]:
    return sequences(read_batch(url, stream=name, **options))


# -- what is read ---------------------------------------------------------------------------------


POLICIES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "nothing said": ({}, [1, 2, 3, 4, 5, 6]),
    "all": ({"deliverPolicy": "all"}, [1, 2, 3, 4, 5, 6]),
    "last": ({"deliverPolicy": "last"}, [6]),
    "last that matches": ({"deliverPolicy": "last", "filterSubjects": "NAME.a"}, [5]),
    "last of each": ({"deliverPolicy": "last_per_subject"}, [4, 5, 6]),
    "last of some": (
        {"deliverPolicy": "last_per_subject", "filterSubjects": "NAME.a,NAME.b"},
        [4, 5],
    ),
    "from one on": ({"startSequence": 4}, [4, 5, 6]),
    "up to one": ({"endSequence": 2}, [1, 2]),
    "from one to another": ({"startSequence": 2, "endSequence": 4}, [2, 3, 4]),
    "one": ({"startSequence": 3, "endSequence": 3}, [3]),
    "some subjects": ({"filterSubjects": "NAME.a"}, [1, 3, 5]),
    "some of a range": (
        {"filterSubjects": "NAME.a", "startSequence": 2, "endSequence": 4},
        [3],
    ),
    "beyond the last": ({"startSequence": 7}, []),
}


@pytest.mark.parametrize("case", POLICIES)
def test_deliver_policy_selects_messages(url: str, stream: str, case: str) -> None:
    options, expected = POLICIES[case]
    fill(url, stream, "abab" + "ac")
    options = {name: str(value).replace("NAME", stream) for name, value in options.items()}
    assert read(url, stream, **options) == expected
    if "filterSubjects" not in options:
        assert sequences(read_batch(url, subject=f"{stream}.>", **options)) == expected


def test_columns(url: str, stream: str) -> None:
    publish(url, [(f"{stream}.a", b"x", {"Colour": "red"})])
    (row,) = read_batch(url, stream=stream, includeHeaders=True)
    assert (row["stream"], row["subject"], row["data"]) == (stream, f"{stream}.a", b"x")
    assert dict(row["headers"]) == {"Colour": ["red"]}
    (row,) = read_batch(url, stream=stream, headersOnly=True, deliverPolicy="last_per_subject")
    assert row["data"] is None


def test_ranges_of_time_adjoin(url: str, stream: str) -> None:
    for one in "abcdef":
        fill(url, stream, one)
    times = [row["timestamp"].isoformat() for row in read_batch(url, stream=stream)]
    assert len(set(times)) == 6
    # Times as Spark shows them are floored: the message of this microsecond comes later than it.
    for i, time in enumerate(times):
        assert read(url, stream, endTime=time) == list(range(1, i + 1))
        assert read(url, stream, startTime=time) == list(range(i + 1, 7))
    assert read(url, stream, startTime=times[1], endTime=times[4]) == [2, 3, 4]
    assert read(url, stream, startTime="2020-01-01T00:00:00Z", endTime="2020-01-02T00:00:00Z") == []


def test_range_outside_stream(url: str, name: str) -> None:
    with pytest.raises(StreamNotFoundError, match="'stream'"):
        read(url, name)
    create_stream(url, name)
    assert read(url, name) == []
    assert read(url, name, deliverPolicy="last_per_subject") == []
    assert read(url, name, deliverPolicy="last") == []
    fill(url, name, "ab")
    with pytest.raises(OptionError, match=r"'endSequence': 3 lies beyond.*minLastSequence=3"):
        read(url, name, endSequence=3)
    with pytest.raises(OptionError, match=r"'startSequence': 4 lies beyond"):
        read(url, name, startSequence=4)
    for option in ("startTime", "endTime"):
        with pytest.raises(OptionError, match=f"'{option}'.*future"):
            read(url, name, **{option: "2999-01-01T00:00:00Z"})
    with pytest.raises(ConfigurationError, match="has no subject"):
        read(url, name, filterSubjects="elsewhere.>")
    with pytest.raises(MinLastSequenceError):
        read(url, name, minLastSequence=3, requestTimeout=1)
    assert read(url, name, minLastSequence=2, endSequence=2) == [1, 2]
    create_stream(url, f"{name}w", retention="workqueue")
    with pytest.raises(UnsupportedStreamError, match="retention"):
        read(url, f"{name}w")


def test_holes_and_splits(url: str, stream: str) -> None:
    fill(url, stream, "ab" * 500)
    for seq in (1, 2, 500, 501, 1000):
        api(url, f"STREAM.MSG.DELETE.{stream}", {"seq": seq})
    expected = [seq for seq in range(1, 1001) if seq not in (1, 2, 500, 501, 1000)]
    for options in ({}, {"filterSubjects": f"{stream}.a,{stream}.b"}):
        reader = batch_reader(url, stream=stream, minPartitions=3, **options)
        tasks = tasks_of(reader)
        assert len(tasks) == 3
        found = [sequences(rows_of_task(reader, task)) for task in tasks]
        assert all(found)
        assert list(itertools.chain(*found)) == expected
        # Spark may run a task again.
        assert sequences(rows_of_task(reader, tasks[1])) == found[1]


def test_messages_written_after_planning(url: str, name: str) -> None:
    """A batch ends with the last message at planning; last messages may be newer."""
    create_stream(url, name, max_msgs_per_subject=1)
    fill(url, name, "abc")
    last = planned_batch(url, stream=name, deliverPolicy="last_per_subject")
    everything = planned_batch(url, stream=name, filterSubjects=f"{name}.b")
    fill(url, name, "ad")
    assert sequences(everything()) == [2]
    assert sequences(last()) == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("subject", "expected"), [(">", [6]), ("NAME.a", [5]), ("NAME.c", []), ("NAME.d", [4])]
)
def test_message_written_while_planned(
    url: str,
    stream: str,
    monkeypatch: pytest.MonkeyPatch,
    subject: str,
    expected: list[int],
) -> None:
    fill(url, stream, "abad")

    async def after_a_write(*args: Any) -> int:
        await asyncio.to_thread(fill, url, stream, "ab")
        return await resolve_start(*args)

    monkeypatch.setattr(batch_planner, "resolve_start", after_a_write)
    filtered = subject.replace("NAME", stream)
    assert read(url, stream, deliverPolicy="last", filterSubjects=filtered) == expected


# -- what aged out -------------------------------------------------------------------------------


def test_messages_aged_out_before_read(
    url: str, stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(url, stream, "abc" * 20)
    reader = batch_reader(url, stream=stream)
    (task,) = tasks_of(reader)
    accepting = batch_reader(url, stream=stream, failOnDataLoss=False)
    api(url, f"STREAM.PURGE.{stream}", {"seq": 11})
    with pytest.raises(DataLossError, match=r"sequences 1 to 10 aged out"):
        list(rows_of_task(reader, task))
    with caplog.at_level(logging.WARNING):
        assert sequences(rows_of_task(accepting, task)) == list(range(11, 61))
    assert "sequences 1 to 10 aged out" in caplog.text
    # Planned afterwards, the stream begins where it does, unless its beginning was asked for.
    assert read(url, stream) == list(range(11, 61))
    with pytest.raises(DataLossError, match=r"sequences 5 to 10 aged out"):
        read(url, stream, startSequence=5)
    assert read(url, stream, startSequence=5, failOnDataLoss=False) == list(range(11, 61))
    with pytest.raises(DataLossError, match=r"sequences 5 to 7 aged out"):
        read(url, stream, startSequence=5, endSequence=7)
    with pytest.raises(DataLossError, match=r"sequences 10 to 10 aged out"):
        read(url, stream, startSequence=10)
    assert read(url, stream, startSequence=10, failOnDataLoss=False) == list(range(11, 61))
    assert read(url, stream, startSequence=11) == list(range(11, 61))


# -- in Spark -------------------------------------------------------------------------------------


def test_spark_reads(spark: SparkSession, url: str, stream: str) -> None:
    fill(url, stream, "abab")
    options = {"servers": url, "stream": stream, "startSequence": "2", "minPartitions": "2"}
    frame = spark.read.format("nats_stream").options(**options).load()
    rows = frame.select("subject", "sequence", "data").orderBy("sequence").collect()
    assert [(row.subject, row.sequence, bytes(row.data)) for row in rows] == [
        (f"{stream}.b", 2, b"1"),
        (f"{stream}.a", 3, b"2"),
        (f"{stream}.b", 4, b"3"),
    ]
    fill(url, stream, "c")
    # What Spark has planned for a load() once, it reads ever after.
    assert frame.count() == 3
    assert spark.read.format("nats_stream").options(**options).load().count() == 4
