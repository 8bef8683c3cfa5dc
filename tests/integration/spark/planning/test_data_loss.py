"""What the planner does not report as data loss; ``spark/data_loss`` has what it reports."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.embedded import NatsServer
from tests.integration.spark.planning.planners import go_on, planning, read_all
from tests.support.nats.buckets import (
    api,
    bucket_state,
    create_bucket,
    put,
    put_many,
)
from tests.support.nats.topology import make_mirror

pytestmark = pytest.mark.servers


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


async def test_expiry_under_filter_is_only_warning(
    ten: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream does not show whether one of the query's own keys lost a revision."""
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
    assert (split.range.start, split.range.end) == (10, 11)


async def test_mirror_keeps_subjects_of_upstream(ten: str) -> None:
    make_mirror(ten, "KV_copy", "KV_b")

    async with planning(ten, "copy") as planner:
        start = await planner.initial_offset()
        (split,) = await planner.splits(start, await planner.latest_offset(start))
    assert (split.prefix, split.range.filters) == ("$KV.b.", ("$KV.b.>",))
