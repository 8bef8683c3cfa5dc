"""Direct Get in batches: pages, their limits and their ends (ADR-31)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.aio.client import Client

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError, ServerTooOldError, StreamNotFoundError
from nats_stream_source.wire.columns import payloads
from tests.integration.jetstream.direct_get.streams import listed, make
from tests.support.nats.buckets import api, server_version, skip_before, with_client
from tests.support.nats.direct_get import direct_get, seqs
from tests.support.nats.streams import stream_state

pytestmark = pytest.mark.servers


async def test_batches(shared_server: NatsServer) -> None:
    url, name = shared_server.url, "BATCH"
    skip_before(url, 11)
    make(url, name, 50)
    api(url, f"STREAM.MSG.DELETE.{name}", {"seq": 7})
    api(url, f"STREAM.MSG.DELETE.{name}", {"seq": 50})
    whole = [n for n in range(1, 50) if n != 7]

    async with direct_get(url, name) as get:

        async def read(subject: str = ">", **options: Any) -> list[int]:
            return await seqs(get.batch(subject, **options))

        assert await read() == whole
        assert await read(batch=1) == whole
        assert await read(batch=8) == whole
        assert await read(f"{name}.>", batch=7) == whole
        assert await read(f"{name}.1", batch=5) == [n for n in whole if n % 4 == 1]
        assert await read(seq=40) == [n for n in whole if n >= 40]
        assert await read(seq=7, limit=3, batch=2) == [8, 9, 10]
        assert await read(limit=0) == []
        assert await read(limit=12, batch=6) == whole[:12]
        assert await read(seq=49) == [49]
        assert await read(seq=50) == []
        assert await read(seq=5000) == []
        assert await read(max_bytes=1) == whole  # one message a page
        assert await read(max_bytes=100) == whole


async def test_stream_empty(shared_server: NatsServer) -> None:
    make(shared_server.url, "EMPTY", 0)

    async with direct_get(shared_server.url, "EMPTY") as get:
        assert await seqs(get.batch()) == []
        assert await seqs(get.last_for(["EMPTY.a"])) == []


async def test_pages_have_requested_size_and_columns(shared_server: NatsServer) -> None:
    url = shared_server.url
    skip_before(url, 11)
    make(url, "PAGES", 20)

    async with direct_get(url, "PAGES") as get:
        pages = [page async for page in get.pages(batch=8)]
        assert [len(page) for page in pages] == [8, 8, 4]
        assert pages[1].stream_seq.tolist() == list(range(9, 17))
        assert payloads(pages[1]).to_pylist() == [b"v%d" % n for n in range(9, 17)]
        pages = [page async for page in get.pages(max_bytes=1, limit=3)]
        assert [page.stream_seq.tolist() for page in pages] == [[1], [2], [3]]


async def test_batch_contains_messages_of_its_start(shared_server: NatsServer) -> None:
    """Under steady writes it ends, and shows nothing of later."""
    url = shared_server.url
    skip_before(url, 11)
    make(url, "STEADY", 20)

    async with direct_get(url, "STEADY") as get:
        found = []
        async for message in get.batch(batch=5):
            found.append(message.seq)
            await get.jetstream.connection.client.request("STEADY.new", b"")
        assert found == list(range(1, 21))


async def test_direct_get_off_is_read_by_consumer(shared_server: NatsServer) -> None:
    url = shared_server.url
    make(url, "OFF", 30, allow_direct=False)

    async with direct_get(url, "OFF") as get:
        assert (await get.get(3)).data == b"v3"
        assert (await get.last("OFF.1")).seq == 29
        assert (await get.next("OFF.1", seq=2)).seq == 5
        whole = await listed(get.batch(batch=7))
        assert whole == [await get.jetstream.message("OFF", seq=n) for n in range(1, 31)]
        assert await seqs(get.batch("OFF.2", seq=9, limit=2)) == [10, 14]
        assert await seqs(get.last_for(["OFF.1", "OFF.*", "OFF.7"])) == [27, 28, 29, 30]
        assert await seqs(get.last_for(["OFF.*"], up_to_seq=4)) == [1, 2, 3, 4]
    assert api(url, "CONSUMER.NAMES.OFF").get("consumers") in (None, [])


async def test_server_without_batches(shared_server: NatsServer) -> None:
    """A consumer and the leader read; a start time cannot be read."""
    url = shared_server.url
    if server_version(url) >= (2, 11):
        pytest.skip("this server has batches")
    make(url, "OLD", 10)

    async with direct_get(url, "OLD") as get:
        assert await seqs(get.batch(seq=3)) == list(range(3, 11))
        assert await seqs(get.last_for(["OLD.1", "OLD.2"])) == [9, 10]
        assert await seqs(get.last_for(["OLD.*"], up_to_seq=7)) == [4, 5, 6, 7]
        fifth = (await get.get(5)).time
        for call in (
            seqs(get.batch(start_time=fifth)),
            seqs(get.last_for(["OLD.1"], up_to_time=fifth)),
        ):
            with pytest.raises(ServerTooOldError, match=r"2\.11"):
                await call


async def test_batches_concurrent_on_one_connection(shared_server: NatsServer) -> None:
    url = shared_server.url
    skip_before(url, 11)
    make(url, "SHARED", 100)

    async with direct_get(url, "SHARED") as get:
        singles = asyncio.gather(*(get.get(n) for n in range(1, 101)))
        batches = asyncio.gather(*(seqs(get.batch(batch=9, seq=n)) for n in range(1, 21)))
        assert [one.seq for one in await singles] == list(range(1, 101))
        assert await batches == [list(range(n, 101)) for n in range(1, 21)]
        # Nothing is left subscribed.
        assert len(get.jetstream.connection.client._subs) <= 1


def test_server_responses_are_as_documented(shared_server: NatsServer) -> None:
    """The header fields that all of this stands on."""
    url = shared_server.url
    make(url, "FIELDS", 6)

    def raw(request: dict[str, Any], replies: int) -> list[dict[str, str]]:
        async def work(client: Client) -> list[dict[str, str]]:
            inbox = client.new_inbox()
            sub = await client.subscribe(inbox)
            payload = json.dumps(request).encode()
            await client.publish("$JS.API.DIRECT.GET.FIELDS", payload, reply=inbox)
            return [dict((await sub.next_msg(5)).headers or {}) for _ in range(replies)]

        return with_client(url, work)

    (single,) = raw({"seq": 2}, 1)
    assert {"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp"} == set(single)
    if server_version(url) < (2, 11):
        (old,) = raw({"seq": 1, "batch": 2, "next_by_subj": "FIELDS.>"}, 1)
        assert "Nats-Num-Pending" not in old
        return
    first, second, end = raw({"seq": 1, "batch": 2, "next_by_subj": "FIELDS.>"}, 3)
    assert (first["Nats-Last-Sequence"], second["Nats-Last-Sequence"]) == ("0", "1")
    assert (end["Status"], end["Nats-Num-Pending"], end["Nats-Last-Sequence"]) == ("204", "4", "2")
    *_, last, end = raw({"multi_last": ["FIELDS.>"], "batch": 2}, 3)
    assert (last["Nats-Num-Pending"], end["Nats-UpTo-Sequence"]) == ("2", "6")


@pytest.mark.parametrize("delete", [True, False], ids=["made again", "deleted"])
async def test_stream_deleted_between_pages(shared_server: NatsServer, delete: bool) -> None:
    """What is read ends with an error, not as if it were whole."""
    url, name = shared_server.url, f"AWAY{delete}"
    skip_before(url, 11)

    async with direct_get(url, name, request_timeout=1.0) as get:
        for messages in (get.batch(batch=4), get.last_for([f"{name}.>"], batch=1)):
            make(url, name, 8)
            found = [await messages.__anext__()]
            api(url, f"STREAM.DELETE.{name}")
            if delete:
                make(url, name, 2)
                while stream_state(url, name)["last_seq"] > 2:  # the server kept the deleted one
                    api(url, f"STREAM.DELETE.{name}")
                    make(url, name, 2)
            with pytest.raises(DataLossError if delete else StreamNotFoundError):
                found += await listed(messages)
            assert len(found) < 8
            if delete:
                api(url, f"STREAM.DELETE.{name}")
