"""``nats_stream`` against real servers, without Spark: what is read, of which kinds of streams."""

from __future__ import annotations

import itertools
import logging
from datetime import datetime, timedelta, timezone
from typing import Any

import buckets
import pytest
from buckets import api, publish
from topology import hub_and_leaf, make_mirror, wait_for_seq, wait_until
from without_spark import Row, sequences, stream_query

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    NoMatchingStreamError,
    OffsetError,
    StreamNotFoundError,
    UnsupportedStreamError,
)
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.source import small_range

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

_names = (f"S{i}" for i in itertools.count())


@pytest.fixture
def name() -> str:
    return next(_names)


def create(url: str, name: str, **config: Any) -> dict[str, Any]:
    wanted = {"name": name, "subjects": [f"{name}.>"], **config}
    return api(url, f"STREAM.CREATE.{name}", wanted)


def fill(url: str, name: str, count: int, subjects: int = 3) -> None:
    publish(url, ((f"{name}.{i % subjects}", b"%d" % i, None) for i in range(1, count + 1)))


def erase(url: str, name: str, *found: int) -> None:
    for seq in found:
        api(url, f"STREAM.MSG.DELETE.{name}", {"seq": seq})


def state(url: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = api(url, f"STREAM.INFO.{name}")["state"]
    return found


def read(url: str, stream: str | None, **options: Any) -> list[Row]:
    with stream_query(url, stream, **options) as query:
        return query.rows()


@pytest.fixture(params=["small ranges", "consumers"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a range is read."""
    if request.param == "consumers":
        monkeypatch.setattr(small_range, "MOST_SEQUENCES", 0)
    return str(request.param)


# -- rows -----------------------------------------------------------------------------------------


def test_a_row(shared_server: NatsServer, name: str, way: str) -> None:
    url = shared_server.url
    created = create(url, name)["created"]
    publish(url, [(f"{name}.a.b", b"\x00\xff", None), (f"{name}.c", b"", {"A": "1"})])
    first, second = read(url, name)
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


def test_headers_only(shared_server: NatsServer, name: str, way: str) -> None:
    url = shared_server.url
    create(url, name)
    publish(url, [(f"{name}.a", b"12345", None), (f"{name}.b", b"", {"A": "1"})])
    found = read(url, name, headersOnly=True, includeHeaders=True)
    assert [row["data"] for row in found] == [None, None]
    assert [dict(row["headers"]) for row in found] == [
        {"Nats-Msg-Size": ["5"]},
        {"A": ["1"], "Nats-Msg-Size": ["0"]},
    ]


SUBJECTS = [b"x.a", "x.ü.日".encode(), b"x.\xff\xfe", b"x.>", b"x.*", b"x.a>b", b"x.\x01", b"y"]
# Not 0x7F: under a wildcard, nats-server 2.15.1 loses subjects with that byte.


@pytest.mark.parametrize("pattern", [None, "{}.x.>", "{}.x.*", "{}.x.ü.日", "{}.x.a"])
def test_unusual_subjects(shared_server: NatsServer, name: str, pattern: str | None) -> None:
    """Whatever the server takes can be read, and both ways of reading give the same."""
    url = shared_server.url
    create(url, name)
    _publish_raw(shared_server, name.encode(), SUBJECTS)
    wait_for_seq(url, name, 1)
    wait_until("all that the server takes", lambda: _settled(url, name))
    filters = None if pattern is None else pattern.format(name)
    found = read(url, name, filterSubjects=filters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_range, "MOST_SEQUENCES", 0)
        assert read(url, name, filterSubjects=filters) == found
    assert found or pattern
    if pattern is None:
        assert f"{name}.x.\ufffd\ufffd" in [row["subject"] for row in found]


def _publish_raw(server: NatsServer, prefix: bytes, subjects: list[bytes]) -> None:
    async def work(client: Any) -> None:
        for subject in subjects:
            client._transport.write(b"PUB %s.%s 1\r\nv\r\n" % (prefix, subject))
        await client.flush()

    buckets.with_client(server.url, work)


def _settled(url: str, name: str) -> bool:
    """Whether the stream has what was published before this: a last message says so."""
    publish(url, [(f"{name}.end", b"", None)])
    return bool(state(url, name)["messages"] > 1)


# -- where it begins ------------------------------------------------------------------------------

BEGINNINGS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "default": ({}, [3, 4, 6, 7, 8, 9]),
    "all": ({"deliverPolicy": "all"}, [3, 4, 6, 7, 8, 9]),
    "new": ({"deliverPolicy": "new"}, [9]),
    "last": ({"deliverPolicy": "last"}, [8, 9]),
    "last per subject": ({"deliverPolicy": "last_per_subject"}, [6, 7, 8, 9]),
    "a sequence": ({"startSequence": 7}, [7, 8, 9]),
    "a sequence that is gone": ({"startSequence": 5}, [6, 7, 8, 9]),
    "the next sequence": ({"startSequence": 9}, [9]),
    "a sequence to come": ({"startSequence": 10}, []),
    "named twice": ({"deliverPolicy": "by_start_sequence", "startSequence": 8}, [8, 9]),
}
FILTERED: dict[str, list[int]] = {
    "default": [3, 4, 6, 7],
    "all": [3, 4, 6, 7],
    "new": [],
    "last": [7],
    "last per subject": [6, 7],
    "a sequence": [7],
    "a sequence that is gone": [6, 7],
    "the next sequence": [],
    "a sequence to come": [],
    "named twice": [],
}


@pytest.mark.servers
@pytest.mark.parametrize("case", BEGINNINGS)
@pytest.mark.parametrize("storage", ["file", "memory"])
def test_beginnings(shared_server: NatsServer, name: str, case: str, storage: str) -> None:
    """A stream with holes at its begin and in the middle, and one message that comes later."""
    url = shared_server.url
    create(url, name, storage=storage)
    fill(url, name, 8)  # subjects 1, 2, 0, 1, 2, 0, 1, 2
    erase(url, name, 1, 2, 5)
    assert state(url, name)["first_seq"] == 3
    options, expected = BEGINNINGS[case]
    some = f"{name}.0,{name}.1"
    with (
        stream_query(url, name, **options) as all_of_it,
        stream_query(url, name, filterSubjects=some, **options) as filtered,
    ):
        found, of_some = all_of_it.rows(), filtered.rows()
        publish(url, [(f"{name}.2", b"later", None)])
        assert sequences(found + all_of_it.rows()) == expected
        assert sequences(of_some + filtered.rows()) == FILTERED[case]


def test_from_a_time(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create(url, name)
    fill(url, name, 6)
    times = [api(url, f"STREAM.MSG.GET.{name}", {"seq": i})["message"]["time"] for i in range(1, 7)]
    assert sequences(read(url, name, startTime=times[3])) == [4, 5, 6]
    assert sequences(read(url, name, startTime="2020-01-01T00:00:00+01:00")) == [1, 2, 3, 4, 5, 6]
    erase(url, name, 4)
    assert sequences(read(url, name, startTime=times[3])) == [5, 6]


def test_min_last_sequence(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create(url, name)
    fill(url, name, 3)
    assert sequences(read(url, name, minLastSequence=3)) == [1, 2, 3]
    with pytest.raises(Exception, match="412") as raised:
        read(url, name, minLastSequence=4, requestTimeout=1)
    assert type(raised.value).__name__ == "MinLastSequenceError"


# -- limits and splits ----------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True])
def test_limits_in_a_stream_of_holes(shared_server: NatsServer, name: str, direct: bool) -> None:
    """With Direct Get and, as streams have it by default, without."""
    url = shared_server.url
    create(url, name, allow_direct=direct)
    fill(url, name, 300, subjects=4)
    erase(url, name, *(seq for seq in range(1, 301) if seq % 5))
    kept = list(range(5, 301, 5))
    with stream_query(url, name, maxRowsPerTrigger=25) as query:
        batches = query.batches()
        assert [seq for batch in batches for seq in sequences(batch)] == kept
        assert max(map(len, batches)) <= 25
        assert len(batches) <= 4
    with stream_query(
        url, name, maxRowsPerTrigger=10, filterSubjects=f"{name}.1", minPartitions=2
    ) as query:
        batches = query.batches()
        assert [seq for batch in batches for seq in sequences(batch)] == [
            seq for seq in kept if seq % 4 == 1
        ]
        assert max(map(len, batches)) <= 10


def test_the_limit_in_bytes(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create(url, name)
    publish(url, ((f"{name}.a", bytes(1000), None) for _ in range(100)))
    with stream_query(url, name, maxBytesPerTrigger="20k") as query:
        batches = query.batches()
    assert [seq for batch in batches for seq in sequences(batch)] == list(range(1, 101))
    assert 10 <= max(map(len, batches)) <= 21


def test_splits(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create(url, name)
    fill(url, name, 400)
    with stream_query(url, name, minPartitions=4) as query:
        assert sequences(query.read(query.end())) == list(range(1, 401))
        assert [plan.end - plan.start for plan in query.plans] == [100] * 4


# -- the stream that has a subject ----------------------------------------------------------------


def test_looked_up(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create(url, name, subjects=[f"{name}.a.>", f"{name}.b"])
    publish(url, [(f"{name}.a.1", b"", None), (f"{name}.b", b"", None)])
    assert sequences(read(url, None, subject=f"{name}.a.1")) == [1]
    assert sequences(read(url, None, subject=f"{name}.*")) == [2]
    assert sequences(read(url, None, subject=f"{name}.>")) == [1, 2]
    with pytest.raises(NoMatchingStreamError, match="none has") as none:
        read(url, None, subject=f"{name}.c")
    assert "'stream'" in str(none.value)
    create(url, f"{name}X", subjects=[f"{name}.x"])
    with pytest.raises(NoMatchingStreamError, match=f"several streams have it: {name}, {name}X"):
        read(url, None, subject=f"{name}.>")


def test_it_stays_with_its_stream(shared_server: NatsServer, name: str) -> None:
    """Another stream has the subject by now: the offset is of the first one."""
    url = shared_server.url
    create(url, name)
    fill(url, name, 2)
    with stream_query(url, None, subject=f"{name}.1") as query:
        query.rows()
        offset = query.offset
    api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.2"]})
    create(url, f"{name}B", subjects=[f"{name}.1"])
    with (
        pytest.raises(OffsetError, match=f"of stream {name}, the query reads {name}B"),
        stream_query(url, None, offset, subject=f"{name}.1") as query,
    ):
        query.rows()
    with stream_query(url, name, offset, filterSubjects=f"{name}.1") as query:
        assert query.rows() == []


# -- filters and the stream's own subjects --------------------------------------------------------


def test_filters(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create(url, name)
    publish(url, [(f"{name}.{one}", b"", None) for one in ("a", "a.b", "c.d", "a", "e.f.g")])
    for filters, expected in {
        f"{name}.a": [1, 4],
        f"{name}.*": [1, 4],
        f"{name}.*.*, {name}.a": [1, 2, 3, 4],
        f"{name}.>": [1, 2, 3, 4, 5],
        ">": [1, 2, 3, 4, 5],
        f"{name}.never": [],
    }.items():
        assert sequences(read(url, name, filterSubjects=filters)) == expected, filters


def test_a_stream_whose_subjects_were_changed(shared_server: NatsServer, name: str) -> None:
    """What it has from before is read by a filter, and is nothing that another filter matches."""
    url = shared_server.url
    create(url, name, subjects=[f"{name}.old.*"])
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
    with pytest.raises(ConfigurationError, match=r"it takes S\d+\.new\.\*.*'filterSubjects'"):
        read(url, name, filterSubjects=f"{name}.old.1")


def test_the_last_message_of_a_former_subject_expires(shared_server: NatsServer, name: str) -> None:
    """Nothing is wrong with a query that has read it, nor with its restart."""
    url = shared_server.url
    create(url, name, subjects=[f"{name}.old"])
    publish(url, [(f"{name}.old", b"", None)])
    api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.new"]})
    given = {"filterSubjects": f"{name}.old"}
    with stream_query(url, name, **given) as query:
        end = query.end()
        api(url, f"STREAM.PURGE.{name}", {"filter": f"{name}.old"})
        publish(url, [(f"{name}.new", b"", None)])
        assert query.read(end) == []
    api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.*"]})
    with stream_query(url, name, **given) as query:
        publish(url, [(f"{name}.old", b"", None)])
        assert sequences(query.rows()) == [3]
        api(url, f"STREAM.UPDATE.{name}", {"name": name, "subjects": [f"{name}.new"]})
        api(url, f"STREAM.PURGE.{name}", {"filter": f"{name}.old"})
        publish(url, [(f"{name}.new", b"", None)])
        assert query.rows() == []
        offset = query.offset
    with stream_query(url, name, offset, **given) as query:
        assert query.rows() == []


def test_a_filter_that_the_stream_does_not_have(shared_server: NatsServer, name: str) -> None:
    url = shared_server.url
    create(url, name)
    with pytest.raises(ConfigurationError, match=r"no subject that 'elsewhere\.\*' matches"):
        read(url, name, filterSubjects=f"{name}.a,elsewhere.*")


# -- kinds of streams -----------------------------------------------------------------------------


@pytest.mark.servers
@pytest.mark.parametrize("retention", ["workqueue", "interest"])
def test_messages_that_go_away_when_they_are_read(
    shared_server: NatsServer, name: str, retention: str
) -> None:
    """Refused, and nothing consumed; a mirror of it is read."""
    url = shared_server.url
    create(url, name, retention=retention)
    if retention == "interest":
        config = {"name": "keep", "durable_name": "keep", "ack_policy": "explicit"}
        request = {"stream_name": name, "config": config}
        api(url, f"CONSUMER.CREATE.{name}.keep", request)
    fill(url, name, 4)
    with pytest.raises(UnsupportedStreamError, match=f"retention '{retention}'.* A mirror of it"):
        read(url, name)
    assert state(url, name)["messages"] == 4
    if retention == "workqueue":
        make_mirror(url, f"{name}M", name)
        assert sequences(read(url, f"{name}M", filterSubjects=f"{name}.1")) == [1, 4]


def test_a_mirror(shared_server: NatsServer, name: str) -> None:
    """Its sequences are those of its origin, also where it has a part only."""
    url = shared_server.url
    create(url, name)
    fill(url, name, 9)
    make_mirror(url, f"{name}M", name)
    api(
        url,
        f"STREAM.CREATE.{name}P",
        {
            "name": f"{name}P",
            "mirror": {"name": name, "opt_start_seq": 4, "filter_subject": f"{name}.1"},
        },
    )
    wait_until("the part", lambda: state(url, f"{name}P")["messages"] == 2)
    with stream_query(url, f"{name}M", maxRowsPerTrigger=4) as query:
        assert sequences(query.rows()) == list(range(1, 10))
        publish(url, [(f"{name}.x", b"", None)])
        wait_for_seq(url, f"{name}M", 10)
        assert sequences(query.rows()) == [10]
    assert sequences(read(url, f"{name}P")) == [4, 7]


def test_sources_and_transforms(shared_server: NatsServer, name: str) -> None:
    """Subjects of elsewhere: a filter for them is none that the stream does not have."""
    url = shared_server.url
    create(url, name)
    fill(url, name, 6)
    sources = [
        {
            "name": name,
            "subject_transforms": [{"src": f"{name}.*", "dest": "moved.{{wildcard(1)}}"}],
        }
    ]
    create(url, f"{name}A", sources=sources)
    transform = {"src": f"{name}B.*", "dest": "changed.{{wildcard(1)}}"}
    create(url, f"{name}B", subjects=[f"{name}B.*"], subject_transform=transform)
    publish(url, [(f"{name}A.own", b"", None), (f"{name}B.x", b"", None)])
    wait_until("the sourced messages", lambda: state(url, f"{name}A")["messages"] == 7)
    found = {row["subject"] for row in read(url, f"{name}A")}
    assert found == {"moved.0", "moved.1", "moved.2", f"{name}A.own"}
    assert len(read(url, f"{name}A", filterSubjects="moved.1")) == 2
    assert len(read(url, f"{name}A", filterSubjects=f"{name}A.>")) == 1
    (row,) = read(url, f"{name}B", filterSubjects="changed.*")
    assert row["subject"] == "changed.x"


def test_a_stream_of_another_domain() -> None:
    with hub_and_leaf() as two:
        create(two.hub.url, "FAR")
        fill(two.hub.url, "FAR", 50)
        assert sequences(read(two.leaf.url, "FAR", domain="hub")) == list(range(1, 51))
        assert len(read(two.leaf.url, None, subject="FAR.1", domain="hub")) == 17
        with pytest.raises(StreamNotFoundError, match="'stream', 'servers' and 'domain'"):
            read(two.leaf.url, "FAR")


def test_a_bucket_read_as_a_stream(shared_server: NatsServer, name: str) -> None:
    """Markers are messages like others; each key's last message is what a bucket has."""
    url = shared_server.url
    buckets.create_bucket(url, name, history=1)
    buckets.put_many(url, name, [("a", b"1"), ("b", b"1"), ("a", b"2")])
    buckets.delete(url, name, "b")
    found = read(url, f"KV_{name}", deliverPolicy="last_per_subject", includeHeaders=True)
    assert [(row["sequence"], row["data"], row["headers"]) for row in found] == [
        (3, b"2", None),
        (4, b"", [("KV-Operation", ["DEL"])]),
    ]


# -- data loss ------------------------------------------------------------------------------------

LIMITS: dict[str, dict[str, Any]] = {
    "max_msgs": {"max_msgs": 4},
    "max_bytes": {"max_bytes": 1000},
    "max_age": {"max_age": 300_000_000},
}


@pytest.mark.parametrize("limit", LIMITS)
def test_aged_out(
    shared_server: NatsServer, name: str, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = shared_server.url
    create(url, name, **LIMITS[limit])
    body = bytes(150)
    publish(url, [(f"{name}.a", body, None)] * 3)
    with stream_query(url, name, deliverPolicy="all") as query:
        query.rows()
        offset = query.offset
    publish(url, [(f"{name}.a", body, None)] * 9)
    wait_until("messages to go", lambda: state(url, name)["first_seq"] > offset.stream_seq + 1)
    wait_until("all of max_age", lambda: limit != "max_age" or not state(url, name)["messages"])
    publish(url, [(f"{name}.a", b"last", None)])
    begins = state(url, name)["first_seq"]
    with (
        pytest.raises(
            DataLossError, match=rf"sequences {offset.stream_seq + 1} to {begins - 1} went"
        ),
        stream_query(url, name, offset) as query,
    ):
        query.rows()
    with (
        caplog.at_level(logging.WARNING),
        stream_query(url, name, offset, failOnDataLoss=False) as query,
    ):
        found = sequences(query.rows())
    assert found[-1] == 13
    assert found == list(range(found[0], 14))
    assert "went away before they were read" in caplog.text


@pytest.mark.parametrize("policy", ["new", "all"])
def test_aged_out_before_the_first_row(shared_server: NatsServer, name: str, policy: str) -> None:
    """What came after the query's beginning is not history, though nothing was read yet."""
    url = shared_server.url
    create(url, name, max_msgs=4)
    fill(url, name, 3 if policy == "new" else 0)
    with stream_query(url, name, deliverPolicy=policy) as query:
        offset = query.offset
    fill(url, name, 10)
    with (
        pytest.raises(DataLossError, match=f"{offset.stream_seq + 1} to"),
        stream_query(url, name, offset, deliverPolicy=policy) as query,
    ):
        query.rows()


def test_history_may_go_before_it_is_read(shared_server: NatsServer, name: str) -> None:
    """Where a stream stands at its limit, its first messages go while a query begins."""
    url = shared_server.url
    create(url, name, max_msgs=10)
    fill(url, name, 20)
    with stream_query(url, name) as query:
        assert query.offset.initial_through == 20
        fill(url, name, 5)
        assert sequences(query.rows()) == list(range(16, 26))


def test_a_start_that_is_gone(shared_server: NatsServer, name: str) -> None:
    """Who names a sequence wants it."""
    url = shared_server.url
    create(url, name, max_msgs=4)
    fill(url, name, 10)
    with pytest.raises(DataLossError, match="sequences 3 to 6 went away"):
        read(url, name, startSequence=3)
    assert sequences(read(url, name, startSequence=3, failOnDataLoss=False)) == [7, 8, 9, 10]


@pytest.mark.parametrize("kept", [-1, 2])
def test_after_the_last_of_each_subject(shared_server: NatsServer, name: str, kept: int) -> None:
    """Every later message counts, unless the stream itself drops what is superseded."""
    url = shared_server.url
    create(url, name, max_msgs_per_subject=kept)
    fill(url, name, 6, subjects=2)
    with stream_query(url, name, deliverPolicy="last_per_subject") as query:
        assert sequences(query.rows()) == [5, 6]
        assert query.plans[0].last_per_subject
        fill(url, name, 8, subjects=2)
        api(url, f"STREAM.PURGE.{name}", {"seq": 11})
        if kept == -1:
            with pytest.raises(DataLossError, match="7 to 10 went away"):
                query.rows()
        else:
            assert sequences(query.rows()) == [11, 12, 13, 14]


def test_a_filter_that_covers_the_stream_knows_a_loss(
    shared_server: NatsServer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a narrower one, nobody can say whether it was a loss."""
    url = shared_server.url
    create(url, name)
    for subject in (f"{name}.>", f"{name}.1"):
        fill(url, name, 6)
        with stream_query(url, None, subject=subject) as query:
            query.rows()
            fill(url, name, 6)
            api(url, f"STREAM.PURGE.{name}", {"seq": state(url, name)["last_seq"]})
            if subject.endswith(">"):
                with pytest.raises(DataLossError, match="went away"):
                    query.rows()
            else:
                with caplog.at_level(logging.WARNING):
                    assert query.rows() == []
                assert f"if there were any of subject={subject}" in caplog.text


def test_made_again_and_waiting(shared_server: NatsServer, name: str) -> None:
    """A query that waits for a sequence to come does not wait in another stream."""
    url = shared_server.url
    create(url, name)
    with stream_query(url, name, startSequence=5) as query:
        assert query.rows() == []
        fill(url, name, 3)
        assert query.rows() == []
        api(url, f"STREAM.DELETE.{name}")
        create(url, name)
        fill(url, name, 7)
        with pytest.raises(DataLossError, match="deleted and made again"):
            query.rows()
