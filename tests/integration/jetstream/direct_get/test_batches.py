"""Direct Get of many messages (ADR-31): pages, last messages of subjects, mirrors, and counts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.aio.client import Client

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    DataLossError,
    ServerTooOldError,
    StreamNotFoundError,
    TooManySubjectsError,
)
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.direct_get.request import count_messages, send_request
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.wire.columns import payloads
from tests.support.nats.buckets import (
    api,
    consumers,
    create_bucket,
    publish,
    put_many,
    server_version,
    skip_before,
    with_client,
)
from tests.support.nats.cluster import Cluster
from tests.support.nats.direct_get import direct_get, listed, make, new_direct_get, seqs
from tests.support.nats.streams import stream_state
from tests.support.wait import wait_until

pytestmark = pytest.mark.servers


@pytest.fixture
def url(shared_server: NatsServer) -> str:
    """A server that has batches."""
    skip_before(shared_server.url, 11)
    return shared_server.url


async def test_batches(url: str) -> None:
    name = "BATCH"
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
    async with new_direct_get(shared_server.url, "EMPTY", 0) as get:
        assert await seqs(get.batch()) == []
        assert await seqs(get.last_for(["EMPTY.a"])) == []


async def test_pages_have_requested_size_and_columns(url: str) -> None:
    async with new_direct_get(url, "PAGES", 20) as get:
        pages = [page async for page in get.pages(batch=8)]
        assert [len(page) for page in pages] == [8, 8, 4]
        assert pages[1].stream_seq.tolist() == list(range(9, 17))
        assert payloads(pages[1]).to_pylist() == [b"v%d" % n for n in range(9, 17)]
        pages = [page async for page in get.pages(max_bytes=1, limit=3)]
        assert [page.stream_seq.tolist() for page in pages] == [[1], [2], [3]]


async def test_batch_contains_messages_of_its_start(url: str) -> None:
    """Under steady writes it ends, and shows nothing of later."""
    async with new_direct_get(url, "STEADY", 20) as get:
        found = []
        async for message in get.batch(batch=5):
            found.append(message.seq)
            await get.jetstream.connection.client.request("STEADY.new", b"")
        assert found == list(range(1, 21))


async def test_direct_get_off_is_read_by_consumer(shared_server: NatsServer) -> None:
    url = shared_server.url
    async with new_direct_get(url, "OFF", 30, allow_direct=False) as get:
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
    async with new_direct_get(url, "OLD", 10) as get:
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


async def test_batches_concurrent_on_one_connection(url: str) -> None:
    async with new_direct_get(url, "SHARED", 100) as get:
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
async def test_stream_deleted_between_pages(url: str, delete: bool) -> None:
    """What is read ends with an error, not as if it were whole."""
    name = f"AWAY{delete}"

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


async def test_last_for(url: str) -> None:
    name = "MULTI"
    async with new_direct_get(url, name, 20) as get:

        async def read(*subjects: str, **options: Any) -> list[int]:
            subjects = tuple(f"{name}.{one}" for one in subjects)
            return await seqs(get.last_for(subjects, **options))

        assert await read("1", "2") == [17, 18]
        assert await read("*") == [17, 18, 19, 20]
        assert await read("*", "1", ">") == [17, 18, 19, 20]
        assert await read("9") == []
        assert await read("1", "9") == [17]
        assert await read("*", batch=1) == [17, 18, 19, 20]
        assert await read("*", batch=3) == [17, 18, 19, 20]
        assert await read("*", max_bytes=1) == [17, 18, 19, 20]
        assert await read("*", up_to_seq=6) == [3, 4, 5, 6]
        assert await read("*", up_to_seq=6, batch=2) == [3, 4, 5, 6]
        assert await read("*", up_to_seq=2) == [1, 2]
        assert await read("2", up_to_seq=1) == []
        assert await read("*", up_to_seq=5000) == [17, 18, 19, 20]
        sixth = (await get.get(6)).time
        assert await read("*", up_to_time=nanoseconds(sixth) + 1, batch=3) == [3, 4, 5, 6]
        assert await read("*", up_to_time=sixth) == [2, 3, 4, 5]  # before, not at: so servers do
        assert await read("*", up_to_time="2001-01-01T00:00:00Z") == []
        assert await read("*", up_to_time="2099-01-01T00:00:00Z") == [17, 18, 19, 20]
        assert await seqs(get.last_for(f"{name}.1")) == [17]


async def test_pages_of_one_point_in_time(url: str) -> None:
    """What is written between two pages does not show in the later one."""
    name = "POINT"
    async with new_direct_get(url, name, 8) as get:
        found = []
        async for message in get.last_for([f"{name}.>"], batch=1):
            found.append(message.data)
            for n in range(4):
                await get.jetstream.connection.client.request(f"{name}.{n}", b"new")
        assert found == [b"v5", b"v6", b"v7", b"v8"]


@pytest.mark.parametrize("allow_direct", [True, False], ids=["direct", "leader"])
async def test_point_in_time_is_reported(url: str, allow_direct: bool) -> None:
    name = f"AT{allow_direct}"
    async with new_direct_get(url, name, 20, allow_direct=allow_direct) as get:

        async def point(subject: str = f"{name}.>", **options: Any) -> int | None:
            last = get.last_for([subject], **options)
            await seqs(last)
            return last.up_to_seq

        assert await point() == 20
        assert await point(up_to_seq=6) == 6
        assert await point(up_to_seq=5000) == 20
        assert await point(f"{name}.none") == 20
        assert await point(f"{name}.none", up_to_seq=6) == 6
        assert await point(up_to_time=(await get.get(7)).time) == 6
        assert await point(up_to_time="2099-01-01T00:00:00Z") == 20


async def test_key_overwritten_between_pages_is_not_lost(url: str) -> None:
    """A bucket with history 1 does not keep the value of the point in time: the newer one comes."""
    create_bucket(url, "pages", history=1)
    publish(url, [(f"$KV.pages.{key}", b"old", None) for key in "abcd"])

    async with direct_get(url, "KV_pages") as get:
        found = {}
        async for message in get.last_for(["$KV.pages.>"], batch=1):
            if not found:
                await get.jetstream.connection.client.request("$KV.pages.c", b"new")
            found[message.subject[-1]] = message.data
        assert found == {"a": b"old", "b": b"old", "c": b"new", "d": b"old"}


async def test_replicated_stream() -> None:
    """A past point and the pages after the first one are proven by the message at the point."""
    with Cluster(3) as cluster:
        skip_before(cluster.url, 11)
        make(cluster.url, "REPLICATED", 20, num_replicas=3)
        cluster.wait_current("REPLICATED")

        async with direct_get(cluster.url, "REPLICATED") as get:
            for options, found in (
                ({}, [17, 18, 19, 20]),
                ({"up_to_seq": 6}, [3, 4, 5, 6]),
                ({"up_to_seq": 6, "max_bytes": 1}, [3, 4, 5, 6]),
                ({"batch": 2}, [17, 18, 19, 20]),
                ({"max_bytes": 1}, [17, 18, 19, 20]),
            ):
                assert await seqs(get.last_for(["REPLICATED.>"], **options)) == found
            last = get.last_for(["REPLICATED.1", "REPLICATED.none"], up_to_seq=10)
            assert (await seqs(last), last.up_to_seq) == ([9], 10)
            assert await seqs(get.last_for(["REPLICATED.none"])) == []


async def test_subjects_at_most_1024(url: str) -> None:
    make(url, "WIDE", 0)
    publish(url, [(f"WIDE.{n}", b"", None) for n in range(1024)])

    async with direct_get(url, "WIDE") as get:
        assert len(await seqs(get.last_for(["WIDE.>"]))) == 1024
    publish(url, [("WIDE.more", b"", None)])

    async with direct_get(url, "WIDE") as get:
        with pytest.raises(TooManySubjectsError, match="narrower subjects") as caught:
            await seqs(get.last_for(["WIDE.>"]))
        assert caught.value.code == 413
        literals = [f"WIDE.{n}" for n in range(1024)]
        assert len(await seqs(get.last_for(literals))) == 1024
        with pytest.raises(TooManySubjectsError, match=r"'WIDE\.0', 'WIDE\.1'") as caught:
            await seqs(get.last_for([*literals, "WIDE.more"]))
        assert caught.value.code == 413


def partial_mirror(url: str, name: str, messages: int, **part: Any) -> None:
    """A mirror of a part of the bucket ``whole``, which responds for it once it has the part."""
    mirrored = {"name": "KV_whole", **part}
    config = {"name": name, "mirror": mirrored, "allow_direct": True, "mirror_direct": True}
    api(url, f"STREAM.CREATE.{name}", config)
    wait_until(lambda: bool(stream_state(url, name)["messages"] == messages), "the mirror's part")


async def test_partial_mirror_never_responds_for_stream(shared_server: NatsServer) -> None:
    url = shared_server.url
    create_bucket(url, "whole", history=5)
    publish(url, [(f"$KV.whole.{'ab'[n % 2]}.{n % 10}", b"v%d" % n, None) for n in range(100)])
    partial_mirror(url, "PART", 25, filter_subject="$KV.whole.a.>")
    partial_mirror(url, "LATE", 30, opt_start_seq=71)

    async with direct_get(url, "KV_whole") as get:
        asked = [
            await send_request(get.jetstream.connection, "DIRECT.GET.KV_whole", {"seq": 99})
            for _ in range(100)
        ]
        assert {reply.page.reply(0) for reply in asked if reply.page} == {
            b"KV_whole",
            b"PART",
            b"LATE",
        }

    async with direct_get(url, "KV_whole") as get:
        assert {
            (
                (await get.get(52)).seq,
                (await get.last("$KV.whole.b.1")).seq,
                (await get.last("$KV.whole.>")).seq,
                (await get.last("$KV.whole.*.3")).seq,
                (await get.next("$KV.whole.>", seq=60)).seq,
                (await get.next("$KV.whole.b.*", seq=61)).seq,
            )
            for _ in range(100)
        } == {(52, 92, 100, 94, 60, 62)}
    assert set(await counts(url, "whole", *[(1, ())] * 40)) == {50}
    assert set(await counts(url, "whole", *[(90, ("$KV.whole.b.>",))] * 40)) == {6}
    if server_version(url) < (2, 11):
        return

    async with direct_get(url, "KV_whole") as get:
        for n in range(30):
            assert await seqs(get.batch(batch=40)) == list(range(51, 101))
            assert await seqs(get.batch("$KV.whole.b.>", seq=90)) == list(range(90, 101, 2))
            if n < 10:
                assert await seqs(get.last_for(["$KV.whole.>"])) == list(range(91, 101))
                point = await seqs(get.last_for(["$KV.whole.>"], up_to_seq=70, batch=4))
                assert point == list(range(61, 71))
    assert consumers(url, "whole") == []


async def counts(url: str, bucket: str, *asked: tuple[int, tuple[str, ...]]) -> list[int]:
    async with connect(url) as jetstream:
        return [
            (await count_messages(jetstream, f"KV_{bucket}", seq, f)).messages for seq, f in asked
        ]


@pytest.mark.parametrize("allow_direct", [True, False], ids=["direct", "by consumer"])
async def test_counts(shared_server: NatsServer, allow_direct: bool) -> None:
    bucket = f"counts{allow_direct}"
    url = shared_server.url
    create_bucket(url, bucket, history=1, allow_direct=allow_direct)
    put_many(url, bucket, ((f"k{i % 10}.x", b"v") for i in range(100)))
    one, two = f"$KV.{bucket}.k3.x", f"$KV.{bucket}.k9.*"
    asked: list[tuple[tuple[int, tuple[str, ...]], int]] = [
        ((1, ()), 10),
        ((91, ()), 10),
        ((96, ()), 5),
        ((100, ()), 1),
        ((101, ()), 0),
        ((5000, ()), 0),
        ((1, (one,)), 1),
        ((95, (one,)), 0),
        ((1, (one, two)), 2),
        ((95, (one, two)), 1),
        ((101, (one, two)), 0),
    ]
    assert await counts(url, bucket, *(question for question, _ in asked)) == [n for _, n in asked]
    assert consumers(url, bucket) == []


async def test_count_of_empty_stream(shared_server: NatsServer) -> None:
    create_bucket(shared_server.url, "empty")
    assert await counts(shared_server.url, "empty", (1, ()), (1, ("$KV.empty.a",))) == [0, 0]
