"""Where the planner starts and ends: initial positions, available now, lag, missing streams."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    MinLastSequenceError,
    UnsupportedStreamError,
)
from tests.integration.spark.planning.planners import ends, go_on, planning, read_all
from tests.support.nats.buckets import api, create_bucket, put, put_many, skip_before

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


async def test_available_now_ends_where_it_began_to_read(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(10)))

    async with planning(nats_server.url, "b") as planner:
        await planner.prepare_available_now()
        await asyncio.to_thread(put, nats_server.url, "b", "later", b"v")
        assert await ends(planner) == [10]


async def test_lag(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(50)))

    async with planning(nats_server.url, "b", maxRowsPerTrigger="10") as planner:
        end = await planner.latest_offset(await planner.initial_offset())
        newest = planner.report_latest_offset()
    assert newest is not None
    assert newest.consumer_seq - end.consumer_seq == 40


async def test_work_queue_is_refused(shared_server: NatsServer) -> None:
    create_bucket(shared_server.url, "work", retention="workqueue", allow_direct=False)
    async with planning(shared_server.url, "work") as planner:
        with pytest.raises(UnsupportedStreamError, match="'workqueue'"):
            await planner.initial_offset()


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
