"""``nats_stream`` without Spark: rows, start positions, filters, limits and splits, data loss."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    NoMatchingStreamError,
    OffsetError,
)
from nats_stream_source.jetstream.times import nanoseconds
from tests.integration.spark.reading.streams import both_ways, erase, fill, read
from tests.support.nats.buckets import api, publish
from tests.support.nats.streams import create_stream, stream_state
from tests.support.query_driver.driver import new_query, sequences

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def test_row_of_message(url: str, name: str) -> None:
    created = create_stream(url, name)["created"]
    publish(url, [(f"{name}.a.b", b"\x00\xff", None), (f"{name}.c", b"", {"A": "1"})])
    first, second = both_ways(url, stream=name)
    now = datetime.now(timezone.utc)
    assert first["timestamp"] <= second["timestamp"] <= now
    assert first == {
        "stream": name,
        "subject": f"{name}.a.b",
        "data": b"\x00\xff",
        "sequence": 1,
        "timestamp": first["timestamp"],
        "stream_created": EPOCH + timedelta(microseconds=nanoseconds(created) // 1000),
    }
    assert (second["subject"], second["data"], second["sequence"]) == (f"{name}.c", b"", 2)


BEGINNINGS: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    # options: sequences of all subjects, of the subjects 0 and 1
    "default": ({}, [3, 4, 6, 7, 8, 9], [3, 4, 6, 7]),
    "all": ({"deliverPolicy": "all"}, [3, 4, 6, 7, 8, 9], [3, 4, 6, 7]),
    "new": ({"deliverPolicy": "new"}, [9], []),
    "last": ({"deliverPolicy": "last"}, [8, 9], [7]),
    "last per subject": ({"deliverPolicy": "last_per_subject"}, [6, 7, 8, 9], [6, 7]),
    "a sequence": ({"startSequence": 7}, [7, 8, 9], [7]),
    "a sequence that is gone": ({"startSequence": 5}, [6, 7, 8, 9], [6, 7]),
    "the next sequence": ({"startSequence": 9}, [9], []),
    "a sequence to come": ({"startSequence": 10}, [], []),
    "the highest sequence": ({"startSequence": 2**63 - 1}, [], []),
    "named twice": ({"deliverPolicy": "by_start_sequence", "startSequence": 8}, [8, 9], []),
}


@pytest.mark.servers
@pytest.mark.parametrize("case", BEGINNINGS)
@pytest.mark.parametrize("storage", ["file", "memory"])
def test_beginnings(url: str, name: str, case: str, storage: str) -> None:
    """A stream with holes at its begin and in the middle, and one message that comes later."""
    create_stream(url, name, storage=storage)
    fill(url, name, 8)  # subjects 1, 2, 0, 1, 2, 0, 1, 2
    erase(url, name, 1, 2, 5)
    assert stream_state(url, name)["first_seq"] == 3
    options, expected, expected_of_some = BEGINNINGS[case]
    some = f"{name}.0,{name}.1"
    with (
        new_query(url, stream=name, **options) as all_of_it,
        new_query(url, stream=name, filterSubjects=some, **options) as filtered,
    ):
        found, of_some = all_of_it.read_new(), filtered.read_new()
        publish(url, [(f"{name}.2", b"later", None)])
        assert sequences(found + all_of_it.read_new()) == expected
        assert sequences(of_some + filtered.read_new()) == expected_of_some


def test_looked_up(url: str, name: str) -> None:
    create_stream(url, name, f"{name}.a.>", f"{name}.b")
    publish(url, [(f"{name}.a.1", b"", None), (f"{name}.b", b"", None)])
    assert sequences(read(url, None, subject=f"{name}.a.1")) == [1]
    assert sequences(read(url, None, subject=f"{name}.*")) == [2]
    assert sequences(read(url, None, subject=f"{name}.>")) == [1, 2]
    with pytest.raises(NoMatchingStreamError, match="no stream has it, expected one") as none:
        read(url, None, subject=f"{name}.c")
    assert "'stream'" in str(none.value)
    create_stream(url, f"{name}X", f"{name}.x")
    with pytest.raises(NoMatchingStreamError, match=f"2 streams have it .{name}, {name}X"):
        read(url, None, subject=f"{name}.>")


def test_query_stays_with_its_stream(url: str, name: str) -> None:
    """Another stream has the subject by now: the offset is of the first one."""
    create_stream(url, name)
    fill(url, name, 2)
    with new_query(url, subject=f"{name}.1") as query:
        query.read_new()
        offset = query.offset
    api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.2"]})
    create_stream(url, f"{name}B", f"{name}.1")
    with pytest.raises(
        OffsetError, match=f"of stream {name}, .* reads {name}B .*'stream' and 'subject'"
    ):
        read(url, None, offset=offset, subject=f"{name}.1")
    assert read(url, name, offset=offset, filterSubjects=f"{name}.1") == []


def test_stream_subjects_changed(url: str, name: str) -> None:
    """Messages of a former subject are read by a filter that matches it, and by no other."""
    create_stream(url, name, f"{name}.old.*")
    fill(url, name, 0)
    publish(url, ((f"{name}.old.{i % 2}", b"", None) for i in range(40)))
    api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.new.*"]})
    publish(url, ((f"{name}.new.{i % 2}", b"", None) for i in range(40)))
    for size in (10, 1000):
        given = {"maxRowsPerTrigger": size, "minPartitions": 2}
        new = read(url, name, filterSubjects=f"{name}.new.*", **given)
        assert sequences(new) == list(range(41, 81))
        old = read(url, name, filterSubjects=f"{name}.old.1", **given)
        assert sequences(old) == list(range(2, 41, 2))
    assert sequences(read(url, name)) == list(range(1, 81))
    api(url, f"STREAM.PURGE.{name}", {"filter": f"{name}.old.*"})
    with pytest.raises(
        ConfigurationError, match=r"expected a filter within S\d+\.new\.\*.*'filterSubjects'"
    ):
        read(url, name, filterSubjects=f"{name}.old.1")


def test_last_message_of_former_subject_expires(url: str, name: str) -> None:
    """Nothing is wrong with a query that has read it, nor with its restart."""
    create_stream(url, name, f"{name}.old")
    publish(url, [(f"{name}.old", b"", None)])
    api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.new"]})
    given = {"filterSubjects": f"{name}.old"}
    with new_query(url, stream=name, **given) as query:
        assert query.plan()
        api(url, f"STREAM.PURGE.{name}", {"filter": f"{name}.old"})
        publish(url, [(f"{name}.new", b"", None)])
        assert query.read().records == []
    api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.*"]})
    with new_query(url, stream=name, **given) as query:
        publish(url, [(f"{name}.old", b"", None)])
        assert sequences(query.read_new()) == [3]
        api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.new"]})
        api(url, f"STREAM.PURGE.{name}", {"filter": f"{name}.old"})
        publish(url, [(f"{name}.new", b"", None)])
        assert query.read_new() == []
        offset = query.offset
    assert read(url, name, offset=offset, **given) == []


@pytest.mark.parametrize("direct", [False, True])
def test_limits_in_stream_of_holes(url: str, name: str, direct: bool) -> None:
    """With Direct Get and, as streams have it by default, without."""
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


def test_limit_in_bytes(url: str, name: str) -> None:
    create_stream(url, name)
    publish(url, ((f"{name}.a", bytes(1000), None) for _ in range(100)))
    with new_query(url, stream=name, maxBytesPerTrigger="20k", maxRowsPerTrigger=40) as query:
        batches = [batch.records for batch in query.drain()]
    assert [seq for batch in batches for seq in sequences(batch)] == list(range(1, 101))
    assert 10 <= max(map(len, batches)) <= 21


@pytest.mark.parametrize("policy", ["new", "all"])
def test_messages_aged_out_before_first_row(url: str, name: str, policy: str) -> None:
    """What came after the query's beginning is not history, though nothing was read yet."""
    create_stream(url, name, max_msgs=4)
    fill(url, name, 3 if policy == "new" else 0)
    with new_query(url, stream=name, deliverPolicy=policy) as query:
        offset = query.offset
    fill(url, name, 10)
    with pytest.raises(DataLossError, match=f"{offset['stream_seq'] + 1} to"):
        read(url, name, offset=offset, deliverPolicy=policy)


@pytest.mark.parametrize("kept", [-1, 2])
def test_data_loss_after_last_per_subject(url: str, name: str, kept: int) -> None:
    """Every later message counts, unless the stream itself drops what is superseded."""
    create_stream(url, name, max_msgs_per_subject=kept)
    fill(url, name, 6, subjects=2)
    with new_query(url, stream=name, deliverPolicy="last_per_subject") as query:
        assert sequences(query.read_new()) == [5, 6]
        assert query.splits[0].range.last_per_subject
        fill(url, name, 8, subjects=2)
        api(url, f"STREAM.PURGE.{name}", {"seq": 11})
        if kept == -1:
            with pytest.raises(DataLossError, match="7 to 10 aged out"):
                query.read_new()
        else:
            assert sequences(query.read_new()) == [11, 12, 13, 14]


def test_filter_covering_stream_detects_loss(
    url: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a narrower one, the stream does not show whether it was a loss."""
    create_stream(url, name)
    for subject in (f"{name}.>", f"{name}.1"):
        fill(url, name, 6)
        with new_query(url, subject=subject) as query:
            query.read_new()
            fill(url, name, 6)
            api(url, f"STREAM.PURGE.{name}", {"seq": stream_state(url, name)["last_seq"]})
            if subject.endswith(">"):
                with pytest.raises(DataLossError, match="aged out"):
                    query.read_new()
            else:
                with caplog.at_level(logging.WARNING):
                    assert query.read_new() == []
                assert f"whether subject={subject} matched any of them is unknown" in caplog.text


def test_stream_recreated_while_waiting(url: str, name: str) -> None:
    """A query that waits for a sequence to come does not wait in another stream."""
    create_stream(url, name)
    with new_query(url, stream=name, startSequence=5) as query:
        assert query.read_new() == []
        fill(url, name, 3)
        assert query.read_new() == []
        api(url, f"STREAM.DELETE.{name}")
        create_stream(url, name)
        fill(url, name, 7)
        with pytest.raises(DataLossError, match="deleted and re-created"):
            query.read_new()
