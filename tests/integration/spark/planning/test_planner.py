"""Positions, ends and requests of the planner, minimums of rows, streams without a data loss."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import MinLastSequenceError
from nats_stream_source.rows.offsets import Position
from tests.integration.spark.planning.planners import Asked, go_on, planning, read_all
from tests.support.nats.buckets import (
    api,
    bucket_state,
    consumers,
    create_bucket,
    put,
    put_many,
    skip_before,
)
from tests.support.nats.topology import make_mirror

pytestmark = pytest.mark.servers

BEGINNINGS: dict[str, tuple[dict[str, str], int, int]] = {
    "default": ({}, 0, 20),
    "full history": ({"includeHistory": "true"}, 0, 20),
    "updates only": ({"updatesOnly": "true"}, 20, 20),
    "from a sequence": ({"startSequence": "15"}, 14, 20),
    "from a sequence to come": ({"startSequence": "31"}, 30, 30),
}


@pytest.mark.parametrize(("options", "origin", "through"), BEGINNINGS.values(), ids=BEGINNINGS)
async def test_beginnings(
    nats_server: NatsServer, options: dict[str, str], origin: int, through: int
) -> None:
    create_bucket(nats_server.url, "b", history=5)
    put_many(nats_server.url, "b", ((f"k{i % 4}", b"v") for i in range(20)))

    async with planning(nats_server.url, "b", **options) as planner:
        first = await planner.initial_offset()
        await asyncio.to_thread(put, nats_server.url, "b", "later", b"v")
        again = await planner.initial_offset()
    assert (first.origin, first.stream_seq, first.initial_through) == (origin, origin, through)
    assert again == first  # decided once


async def test_start_beyond_end_waits(ten: str) -> None:
    start = await read_all(ten, startSequence="15")
    assert (start.stream_seq, start.time) == (14, None)
    assert await go_on(ten, start, startSequence="15") == (start, [])
    put_many(ten, "b", ((f"m{i}", b"v") for i in range(6)))
    end, (split,) = await go_on(ten, start, startSequence="15")
    assert (split.range.start, split.range.end, end.stream_seq) == (14, 16, 16)


async def test_min_last_seq_beyond_new_stream(ten: str) -> None:
    """The error reports that the option is for the first start."""
    async with planning(ten, "b", minLastRevision="11", requestTimeout="0.3") as planner:
        with pytest.raises(MinLastSequenceError, match="'minLastRevision' is for the first start"):
            await planner.initial_offset()


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
async def test_start_option_overridden_by_checkpoint_is_logged(
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

    async with planning(ten, "b", **given(first)) as planner:
        start = await planner.initial_offset()
        offset = await planner.latest_offset(start)
        await planner.latest_offset(offset)
    assert not caplog.records  # neither the first start nor a later micro-batch
    async with planning(ten, "b", **given(then)) as planner:
        for _ in range(2):
            await planner.latest_offset(offset)
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
async def test_warning_only_for_settings_that_remove_keys(
    nats_server: NatsServer, config: dict[str, int], level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """nats-py allows TTLs in every bucket: each start of each query would warn."""
    if "allow_msg_ttl" in config:
        skip_before(nats_server.url, 11)
    create_bucket(nats_server.url, "b", **config)
    caplog.set_level("INFO")
    async with planning(nats_server.url, "b") as planner:
        await planner.initial_offset()
    (line,) = [one for one in caplog.records if "without a marker" in one.getMessage()]
    assert line.levelname == level


async def last_of(url: str, bucket: str, limit: int | None = None, **options: str) -> Position:
    if limit is not None:
        options["maxRowsPerTrigger"] = str(limit)
    async with planning(url, bucket, **options) as planner:
        start = await planner.initial_offset()
        while (end := await planner.latest_offset(start)) != start:
            start = end
        return start


@pytest.mark.parametrize("limit", [None, 7])
async def test_consumer_seq_counts_no_holes_among_initial_values(
    nats_server: NatsServer, limit: int | None
) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i % 20}", b"v") for i in range(1000)))
    assert (await last_of(nats_server.url, "b", limit)).consumer_seq == 20


async def test_consumer_seq_counts_what_came_later_though_it_was_superseded(
    nats_server: NatsServer,
) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i % 20}", b"v") for i in range(100)))

    async with planning(nats_server.url, "b") as planner:
        start = await planner.latest_offset(await planner.initial_offset())
        entries = [(f"k{i % 2}", b"v") for i in range(50)]
        await asyncio.to_thread(put_many, nats_server.url, "b", entries)
        assert (await planner.latest_offset(start)).consumer_seq == 70


@pytest.mark.parametrize(("keys", "count"), [("", 6), ("a.*", 3), ("a.*,b.1", 4), ("c", 0)])
async def test_consumer_seq_of_last_values_under_filters(
    nats_server: NatsServer, keys: str, count: int
) -> None:
    create_bucket(nats_server.url, "b", history=5)
    names = [f"{one}.{i}" for one in "ab" for i in range(3)]
    put_many(nats_server.url, "b", ((name, b"v") for name in names * 4))
    end = await last_of(nats_server.url, "b", **({"keys": keys} if keys else {}))
    assert (end.stream_seq, end.consumer_seq) == (24, count)


async def test_idle_query_sends_few_requests_and_creates_no_consumer(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_bucket(nats_server.url, "b")
    put(nats_server.url, "b", "a", b"v")
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async with planning(nats_server.url, "b", lambda: now, sleep) as planner:
        start = await planner.latest_offset(await planner.initial_offset())
        asked = Asked(monkeypatch)
        began = now
        while now < began + 60:
            now += 0.01  # Spark's own pause
            assert await planner.latest_offset(start) == start
        looks = len(asked.subjects)
        assert set(asked.subjects) == {"STREAM.INFO.KV_b"}
        await asyncio.to_thread(put, nats_server.url, "b", "later", b"v")
        assert await planner.latest_offset(start) != start
        assert looks < 600
    assert consumers(nats_server.url, "b") == []


async def test_match_of_one_of_many_filters_is_found_by_next_poll(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=-1)
    put_many(nats_server.url, "b", [("other", b"v")] * 1000)

    async def write(*keys: str) -> None:
        await asyncio.to_thread(put_many, nats_server.url, "b", [(key, b"v") for key in keys])

    keys = [f"k{i}" for i in range(40)]
    async with planning(nats_server.url, "b", keys=",".join(keys)) as planner:
        start = await planner.latest_offset(await planner.initial_offset())
        for key in keys[::13]:
            await write(*["other"] * 20)
            assert await planner.latest_offset(start) == start
            await write(key, *["other"] * 20)
            end = await planner.latest_offset(start)
            (split,) = await planner.splits(start, end)
            assert split.range.end > split.range.start + 20
            start = end


@pytest.mark.parametrize("how", ["terminate", "kill"])
@pytest.mark.parametrize("what", ["the last message deleted", "all purged"])
async def test_healthy_stream_is_not_rolled_back(
    nats_server: NatsServer, how: str, what: str
) -> None:
    """A killed server does not know the time of a last message that was deleted."""
    create_bucket(nats_server.url, "b", deny_delete=False)
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(10)))
    start = await read_all(nats_server.url)
    if what == "all purged":
        api(nats_server.url, "STREAM.PURGE.KV_b")
    else:
        api(nats_server.url, "STREAM.MSG.DELETE.KV_b", {"seq": 10})
    getattr(nats_server, how)()
    nats_server.start()
    assert bucket_state(nats_server.url, "b")["last_seq"] == 10
    assert await go_on(nats_server.url, start) == (start, [])
    put(nats_server.url, "b", "later", b"v")
    end, _ = await go_on(nats_server.url, start)
    assert (end.epoch, end.stream_seq) == (0, 11)


async def test_logged_first_batch_is_read_from_its_origin(ten: str) -> None:
    """Updates only: at the restart the stream has grown past the logged end."""
    async with planning(ten, "b", updatesOnly="true") as planner:
        start = await planner.initial_offset()
        await asyncio.to_thread(put, ten, "b", "k10", b"v")
        logged = await planner.latest_offset(start)
    assert (logged.origin, logged.stream_seq) == (10, 11)
    put_many(ten, "b", [("k11", b"v"), ("k12", b"v")])

    async with planning(ten, "b", updatesOnly="true") as planner:
        (split,) = await planner.splits(await planner.initial_offset(), logged)
    assert (split.range.start, split.range.end) == (10, 11)


async def test_mirror_keeps_subjects_of_upstream(ten: str) -> None:
    make_mirror(ten, "KV_copy", "KV_b")

    async with planning(ten, "copy") as planner:
        start = await planner.initial_offset()
        (split,) = await planner.splits(start, await planner.latest_offset(start))
    assert (split.range.prefix, split.range.filters) == ("$KV.b.", ("$KV.b.>",))


WAITS = {"minRowsPerTrigger": "10", "maxTriggerDelay": "60"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def fill(url: str, bucket: str, first: int, count: int) -> None:
    put_many(url, bucket, ((f"k{i}", b"x") for i in range(first, first + count)))


async def test_micro_batch_waits_for_rows_up_to_delay(shared_server: NatsServer) -> None:
    url, clock = shared_server.url, Clock()
    create_bucket(url, "waits")
    fill(url, "waits", 0, 3)
    async with planning(url, "waits", clock, clock.sleep, **WAITS) as planner:
        first = await planner.latest_offset(await planner.initial_offset())
        assert first.stream_seq == 3, "the first micro-batch does not wait"
        fill(url, "waits", 3, 9)
        assert await planner.latest_offset(first) == first
        waiting = planner.report_latest_offset()
        assert waiting is not None
        assert waiting.stream_seq == 12, "the lag shows what waits"
        fill(url, "waits", 12, 1)
        second = await planner.latest_offset(first)
        assert second.stream_seq == 13
        fill(url, "waits", 13, 1)
        # The stream does not change any more, and the delay passes.
        while (third := await planner.latest_offset(second)) == second:
            assert clock.now < 120
        assert clock.now >= 60
        assert third.stream_seq == 14
        (split,) = await planner.splits(second, third)
        assert (split.range.start, split.range.end) == (13, 14)


async def test_rows_behind_filter(shared_server: NatsServer) -> None:
    url, clock = shared_server.url, Clock()
    create_bucket(url, "filtered")
    put_many(url, "filtered", [("a.1", b"x"), ("b.1", b"x")])
    async with planning(url, "filtered", clock, clock.sleep, keys="a.*", **WAITS) as planner:
        first = await planner.latest_offset(await planner.initial_offset())
        put_many(url, "filtered", ((f"{'ab'[i % 2]}.{i}", b"x") for i in range(18)))
        assert await planner.latest_offset(first) == first, "nine match"
        put_many(url, "filtered", [("a.100", b"x")])
        clock.now += 1  # the poll is due
        assert (await planner.latest_offset(first)).stream_seq == 21


async def test_available_now_does_not_wait(shared_server: NatsServer) -> None:
    url, clock = shared_server.url, Clock()
    create_bucket(url, "now")
    fill(url, "now", 0, 3)
    async with planning(url, "now", clock, clock.sleep, **WAITS) as planner:
        first = await planner.latest_offset(await planner.initial_offset())
        fill(url, "now", 3, 2)
        await planner.prepare_available_now()
        assert (await planner.latest_offset(first)).stream_seq == 5
    async with planning(url, "now", clock, clock.sleep, **WAITS) as planner:
        await planner.latest_offset(await planner.initial_offset())
        # Trigger.Once
        assert (await planner.latest_offset(first, limited=False)).stream_seq == 5
