"""Data loss that the planner reports: re-created and rolled-back streams, aged-out messages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from tests.integration.spark.planning.planners import go_on, planning, read_all
from tests.support.nats.buckets import (
    api,
    create_bucket,
    delete_bucket,
    put,
    put_many,
    stream_state,
)
from tests.support.query_driver.one_stream import OneStreamPlanner

pytestmark = pytest.mark.servers

ACCEPT = {"failOnDataLoss": "false"}


async def test_replaced_stream(ten: str) -> None:
    start = await read_all(ten)
    delete_bucket(ten, "b")
    create_bucket(ten, "b")
    put(ten, "b", "new", b"v")
    with pytest.raises(DataLossError, match=r"deleted and re-created.*after revision 10 .*failOnD"):
        await go_on(ten, start)
    end, (split,) = await go_on(ten, start, **ACCEPT)
    assert (end.epoch, end.origin, end.stream_seq) == (1, 0, 1)
    assert end.created != start.created
    assert (split.start, split.end) == (0, 1)
    assert await go_on(ten, end) == (end, [])  # the new epoch is nothing to fail for


@pytest.mark.parametrize("grown", [0, 2, 3, 20])
async def test_set_back_stream(ten: str, grown: int) -> None:
    """As after a restore of an older backup: the same ``created``, fewer sequences."""
    start = await read_all(ten)
    put_many(ten, "b", ((f"m{i}", b"v") for i in range(grown)))
    # What the query had read beyond 10 is gone, other messages have these sequences now.
    read_until = "2100-01-01T00:00:00Z" if grown < 3 else start.time
    lost = replace(start, stream_seq=13, time=read_until)
    if grown == 0:
        with pytest.raises(DataLossError, match="was rolled back: last revision is 10,"):
            await go_on(ten, lost)
    if grown >= 3:
        with pytest.raises(DataLossError, match="revision 13 has another message"):
            await go_on(ten, lost)
    end, splits = await go_on(ten, lost, **ACCEPT)
    assert end.epoch == 1
    if grown >= 3:  # from the first message that is later than what was read
        assert (end.origin, end.stream_seq) == (10, 10 + grown)
        assert [(split.start, split.end) for split in splits] == [(10, 10 + grown)]
    else:
        assert (end.origin, splits) == (10 + grown, [])


async def test_set_back_to_before_anything_that_was_read(ten: str) -> None:
    start = replace(await read_all(ten), stream_seq=12, time="2001-01-01T00:00:00Z")
    end, (split,) = await go_on(ten, start, **ACCEPT)
    assert (end.epoch, end.origin, split.start, split.end) == (1, 0, 0, 10)


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
    assert stream_state(nats_server.url, "b")["last_seq"] == 10
    assert await go_on(nats_server.url, start) == (start, [])
    put(nats_server.url, "b", "later", b"v")
    end, _ = await go_on(nats_server.url, start)
    assert (end.epoch, end.stream_seq) == (0, 11)


async def test_aged_out_history_is_loss_only_where_history_was_asked_for(ten: str) -> None:
    start = await read_all(ten)
    put_many(ten, "b", ((f"k{i % 10}", b"v") for i in range(100)))
    assert stream_state(ten, "b")["first_seq"] == 101
    end, _ = await go_on(ten, start)
    assert end.stream_seq == 110
    history = {"includeHistory": "true"}
    with pytest.raises(DataLossError, match=r"first revision is 101.*revisions 11 to 100 aged out"):
        await go_on(ten, start, **history)
    end, (split,) = await go_on(ten, start, **history, **ACCEPT)
    assert (end.epoch, split.start, split.end, split.required_from) == (0, 10, 110, 101)


async def test_logged_range_of_replaced_stream(ten: str) -> None:
    """The first batch was logged, not finished; the stream was made anew before the restart."""
    end = await read_all(ten)
    delete_bucket(ten, "b")
    create_bucket(ten, "b")
    put(ten, "b", "new", b"v")

    async def restart(planner: OneStreamPlanner) -> Any:
        return await planner.splits(await planner.initial_offset(), end)

    async with planning(ten, "b") as planner:
        with pytest.raises(DataLossError, match="planned but not finished"):
            await restart(planner)
    async with planning(ten, "b", **ACCEPT) as planner:
        assert await restart(planner) == []


async def test_logged_range_of_rolled_back_stream(ten: str) -> None:
    """What is left of the planned range is read; what is gone is said to be."""
    logged = replace(await read_all(ten), stream_seq=14, time="2100-01-01T00:00:00Z")

    async def restart(planner: OneStreamPlanner) -> Any:
        start = replace(await planner.initial_offset(), stream_seq=6)
        splits = await planner.splits(start, logged)
        return splits, await planner.latest_offset(logged)

    async with planning(ten, "b") as planner:
        with pytest.raises(DataLossError, match="its messages after 10 are missing"):
            await restart(planner)
    async with planning(ten, "b", **ACCEPT) as planner:
        (split,), then = await restart(planner)
    assert (split.start, split.end) == (6, 10)
    assert (then.epoch, then.origin) == (1, 10)


async def test_set_back_to_an_empty_stream(ten: str) -> None:
    """A stream that never had a message has no sequence 0 to go on from, nor -1."""
    start = await read_all(ten)
    delete_bucket(ten, "b")
    created = create_bucket(ten, "b")["created"]
    end, splits = await go_on(ten, replace(start, created=created), **ACCEPT)
    assert (end.epoch, end.origin, end.stream_seq, splits) == (1, 0, 0, [])


async def test_aged_out_under_a_filter_is_only_a_warning(
    ten: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether any of the query's own keys lost a revision, nobody knows any more."""
    options = {"includeHistory": "true", "keys": "k0"}
    start = await read_all(ten, **options)
    put_many(ten, "b", ((f"k{i % 10}", b"v") for i in range(100)))
    end, _ = await go_on(ten, start, **options)
    assert end.epoch == 0
    assert "whether keys=k0 matched any of them is unknown" in caplog.text


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
    assert (split.start, split.end) == (10, 11)


async def test_mirror_keeps_subjects_of_upstream(ten: str) -> None:
    api(ten, "STREAM.CREATE.KV_copy", {"name": "KV_copy", "mirror": {"name": "KV_b"}})
    for _ in range(500):
        if stream_state(ten, "copy")["last_seq"] == 10:
            break

    async with planning(ten, "copy") as planner:
        start = await planner.initial_offset()
        (split,) = await planner.splits(start, await planner.latest_offset(start))
    assert (split.prefix, split.filters) == ("$KV.b.", ("$KV.b.>",))
