"""Positions, ends and requests of the planner, minimums of rows, streams without a data loss."""

from __future__ import annotations

from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import MinLastSequenceError
from tests.support.nats.buckets import (
    api,
    bucket_state,
    consumers,
    create_bucket,
    fill_bucket,
    put,
    put_many,
    skip_before,
)
from tests.support.nats.topology import make_mirror
from tests.support.query_driver.driver import Clock, new_query

pytestmark = pytest.mark.servers

BEGINNINGS: dict[str, tuple[dict[str, str], int, int]] = {
    "default": ({}, 0, 20),
    "full history": ({"includeHistory": "true"}, 0, 20),
    "updates only": ({"updatesOnly": "true"}, 20, 20),
    "from a sequence": ({"startSequence": "15"}, 14, 20),
    "from a sequence to come": ({"startSequence": "31"}, 30, 30),
}


@pytest.mark.parametrize(("options", "origin", "through"), BEGINNINGS.values(), ids=BEGINNINGS)
def test_beginnings(url: str, options: dict[str, str], origin: int, through: int) -> None:
    fill_bucket(url, "b", ((f"k{i % 4}", b"v") for i in range(20)), history=5)
    with new_query(url, bucket="b", **options) as query:
        first = query.initial_offset()
        put(url, "b", "later", b"v")
        assert query.initial_offset() == first  # decided once
    found = [first[name] for name in ("origin", "stream_seq", "initial_through")]
    assert found == [origin, origin, through]


def test_start_beyond_end_waits(ten: str) -> None:
    given: dict[str, Any] = {"bucket": "b", "startSequence": 15}
    with new_query(ten, **given) as query:
        assert not query.plan()
        start = query.offset
    assert (start["stream_seq"], start["time"]) == (14, None)
    with new_query(ten, offset=start, **given) as query:
        assert not query.plan()
        put_many(ten, "b", ((f"m{i}", b"v") for i in range(6)))
        assert query.plan()
        (split,) = query.splits
    assert (split.range.start, split.range.end) == (14, 16)


def test_min_last_seq_beyond_new_stream(ten: str) -> None:
    """The error reports that the option is for the first start."""
    refused = pytest.raises(MinLastSequenceError, match="'minLastRevision' is for the first start")
    with new_query(ten, bucket="b", minLastRevision=11, requestTimeout=0.3) as query, refused:
        query.initial_offset()


IGNORED = "start option ignored: the query resumes from its checkpoint"

FIRST_AND_THEN: dict[str, tuple[dict[str, str], dict[str, str], str | None]] = {
    "the same sequence": ({"startSequence": "5"}, {"startSequence": "5"}, None),
    "another sequence": ({"startSequence": "5"}, {"startSequence": "3"}, "startSequence"),
    "a sequence, and none": ({"startSequence": "5"}, {}, None),
    "none, and a sequence": ({}, {"startSequence": "5"}, "startSequence"),
    "still updates only": ({"updatesOnly": "true"}, {"updatesOnly": "true"}, None),
    "none, and updates only": ({}, {"updatesOnly": "true"}, "updatesOnly"),
    "updates, and history": ({"updatesOnly": "true"}, {"includeHistory": "true"}, "includeHistory"),
    "the same time": ({"startTime": "<5>"}, {"startTime": "<5>"}, None),
    "an earlier time": ({"startTime": "<5>"}, {"startTime": "<4>"}, "startTime"),
    "a later time": ({"startTime": "<5>"}, {"startTime": "<6>"}, "startTime"),
}


@pytest.mark.parametrize(("first", "then", "ignored"), FIRST_AND_THEN.values(), ids=FIRST_AND_THEN)
def test_start_option_overridden_by_checkpoint_is_logged(
    ten: str,
    first: dict[str, str],
    then: dict[str, str],
    ignored: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = message_times(ten)

    def given(options: dict[str, str]) -> dict[str, str]:
        return {
            name: times[int(value.strip("<>"))] if value.startswith("<") else value
            for name, value in options.items()
        }

    with new_query(ten, bucket="b", **given(first)) as query:
        offset = query.latest_offset(query.initial_offset())
        query.latest_offset(offset)
    assert not caplog.records  # neither the first start nor a later micro-batch
    with new_query(ten, bucket="b", **given(then)) as query:
        for _ in range(2):
            query.latest_offset(offset)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (ignored is not None), lines
    if ignored:
        assert lines[0].startswith(IGNORED)
        assert f"option={ignored} " in lines[0]
        assert caplog.records[0].levelname == "WARNING"


def message_times(url: str) -> dict[int, str]:
    """The server's timestamp of each message of the bucket ``b``, by sequence."""
    return {
        seq: str(api(url, "STREAM.MSG.GET.KV_b", {"seq": seq})["message"]["time"])
        for seq in (4, 5, 6)
    }


@pytest.mark.parametrize(
    ("config", "level"), [({"allow_msg_ttl": True}, "INFO"), ({"max_age": 10**12}, "WARNING")]
)
def test_warning_only_for_settings_that_remove_keys(
    url: str, config: dict[str, int], level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """nats-py allows TTLs in every bucket: each start of each query would warn."""
    if "allow_msg_ttl" in config:
        skip_before(url, 11)
    create_bucket(url, "b", **config)
    caplog.set_level("INFO")
    with new_query(url, bucket="b") as query:
        query.initial_offset()
    (line,) = [one for one in caplog.records if "without a marker" in one.getMessage()]
    assert line.levelname == level


@pytest.mark.parametrize("limit", [None, 7])
def test_consumer_seq_counts_what_came_later_and_no_holes_among_initial_values(
    url: str, limit: int | None
) -> None:
    """What came later counts also where it was superseded before it was read."""
    fill_bucket(url, "b", ((f"k{i % 20}", b"v") for i in range(1000)))
    with new_query(url, bucket="b", maxRowsPerTrigger=limit) as query:
        query.drain()
        assert query.offset["consumer_seq"] == 20
        put_many(url, "b", [(f"k{i % 2}", b"v") for i in range(50)])
        if limit is None:
            assert query.latest_offset(query.offset)["consumer_seq"] == 70


@pytest.mark.parametrize(("keys", "count"), [(None, 6), ("a.*", 3), ("a.*,b.1", 4), ("c", 0)])
def test_consumer_seq_of_last_values_under_filters(url: str, keys: str | None, count: int) -> None:
    create_bucket(url, "b", history=5)
    names = [f"{one}.{i}" for one in "ab" for i in range(3)]
    put_many(url, "b", ((name, b"v") for name in names * 4))
    with new_query(url, bucket="b", keys=keys) as query:
        query.drain()
        assert (query.seq, query.offset["consumer_seq"]) == (24, count)
        assert [row["revision"] > 18 for row in query.records] == [True] * count


def test_idle_query_sends_few_requests_and_creates_no_consumer(url: str, asked: list[str]) -> None:
    fill_bucket(url, "b", [("a", b"v")])
    clock = Clock()
    with new_query(url, bucket="b", clock=clock) as query:
        start = query.latest_offset(query.initial_offset())
        asked.clear()
        began = clock.now
        while clock.now < began + 60:
            clock.now += 0.01  # Spark's own pause
            assert query.latest_offset(start) == start
        assert set(asked) == {"STREAM.INFO.KV_b"}
        assert len(asked) < 600
        put(url, "b", "later", b"v")
        assert query.latest_offset(start) != start
    assert consumers(url, "b") == []


def test_match_of_one_of_many_filters_is_found_by_next_poll(url: str) -> None:
    fill_bucket(url, "b", [("other", b"v")] * 1000, history=-1)
    others = [("other", b"v")] * 20
    keys = [f"k{i}" for i in range(40)]
    with new_query(url, bucket="b", keys=",".join(keys)) as query:
        query.drain()
        for key in keys[::13]:
            put_many(url, "b", others)
            assert not query.plan()
            put_many(url, "b", [(key, b"v"), *others])
            assert query.plan()
            (split,) = query.splits
            assert split.range.end > split.range.start + 20
            query.read()


@pytest.mark.parametrize("how", ["terminate", "kill"])
@pytest.mark.parametrize("what", ["the last message deleted", "all purged"])
def test_healthy_stream_is_not_rolled_back(nats_server: NatsServer, how: str, what: str) -> None:
    """A killed server does not know the time of a last message that was deleted."""
    url = nats_server.url
    fill_bucket(url, "b", ((f"k{i}", b"v") for i in range(10)), deny_delete=False)
    with new_query(url, bucket="b") as query:
        query.drain()
    if what == "all purged":
        api(url, "STREAM.PURGE.KV_b")
    else:
        api(url, "STREAM.MSG.DELETE.KV_b", {"seq": 10})
    getattr(nats_server, how)()
    nats_server.start()
    assert bucket_state(url, "b")["last_seq"] == 10
    with new_query(url, bucket="b", offset=query.offset) as restarted:
        assert not restarted.plan()
        put(url, "b", "later", b"v")
        restarted.drain()
        assert (restarted.offset["epoch"], restarted.seq) == (0, 11)


def test_logged_first_batch_is_read_from_its_origin(ten: str) -> None:
    """Updates only: at the restart the stream has grown past the logged end."""
    with new_query(ten, bucket="b", updatesOnly=True) as query:
        start = query.initial_offset()
        put(ten, "b", "k10", b"v")
        logged = query.latest_offset(start)
    assert (logged["origin"], logged["stream_seq"]) == (10, 11)
    put_many(ten, "b", [("k11", b"v"), ("k12", b"v")])
    with new_query(ten, bucket="b", updatesOnly=True) as query:
        query.plan_logged(logged)
        (split,) = query.splits
    assert (split.range.start, split.range.end) == (10, 11)


def test_mirror_keeps_subjects_of_upstream(ten: str) -> None:
    make_mirror(ten, "KV_copy", "KV_b")
    with new_query(ten, bucket="copy") as query:
        assert query.plan()
        (split,) = query.splits
    assert (split.range.prefix, split.range.filters) == ("$KV.b.", ("$KV.b.>",))


WAITS = {"minRowsPerTrigger": 10, "maxTriggerDelay": 60}


def fill(url: str, bucket: str, first: int, count: int) -> None:
    put_many(url, bucket, ((f"k{i}", b"x") for i in range(first, first + count)))


def test_micro_batch_waits_for_rows_up_to_delay(url: str) -> None:
    clock = Clock()
    create_bucket(url, "waits")
    fill(url, "waits", 0, 3)
    with new_query(url, bucket="waits", clock=clock, **WAITS) as query:
        first = query.latest_offset(query.initial_offset())
        assert first["stream_seq"] == 3, "the first micro-batch does not wait"
        fill(url, "waits", 3, 9)
        assert query.latest_offset(first) == first
        assert query.report_latest_offset()["stream_seq"] == 12, "the lag shows what waits"
        fill(url, "waits", 12, 1)
        second = query.latest_offset(first)
        assert second["stream_seq"] == 13
        fill(url, "waits", 13, 1)
        # The stream does not change any more, and the delay passes.
        while (third := query.latest_offset(second)) == second:
            assert clock.now < 120
        assert clock.now >= 60
        assert third["stream_seq"] == 14


def test_rows_behind_filter(url: str) -> None:
    clock = Clock()
    fill_bucket(url, "filtered", [("a.1", b"x"), ("b.1", b"x")])
    with new_query(url, bucket="filtered", clock=clock, keys="a.*", **WAITS) as query:
        first = query.latest_offset(query.initial_offset())
        put_many(url, "filtered", ((f"{'ab'[i % 2]}.{i}", b"x") for i in range(18)))
        assert query.latest_offset(first) == first, "nine match"
        put_many(url, "filtered", [("a.100", b"x")])
        clock.now += 1  # the poll is due
        assert query.latest_offset(first)["stream_seq"] == 21


def test_available_now_does_not_wait(url: str) -> None:
    clock = Clock()
    create_bucket(url, "now")
    fill(url, "now", 0, 3)
    with new_query(url, bucket="now", clock=clock, **WAITS) as query:
        first = query.latest_offset(query.initial_offset())
        fill(url, "now", 3, 2)
        query.prepare_available_now()
        assert query.latest_offset(first)["stream_seq"] == 5
    with new_query(url, bucket="now", clock=clock, **WAITS) as query:
        query.latest_offset(query.initial_offset())
        # Trigger.Once
        assert query.latest_offset(first, limited=False)["stream_seq"] == 5
