"""Direct Get where mirrors may respond (ADR-31); counts of messages, by it or by a consumer."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.direct_get.request import count_messages, send_request
from tests.integration.jetstream.direct_get.streams import partial_mirror
from tests.support.nats.buckets import (
    consumers,
    create_bucket,
    publish,
    put_many,
    server_version,
)
from tests.support.nats.direct_get import direct_get, seqs

pytestmark = pytest.mark.servers


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


async def test_stream_empty(shared_server: NatsServer) -> None:
    create_bucket(shared_server.url, "empty")
    assert await counts(shared_server.url, "empty", (1, ()), (1, ("$KV.empty.a",))) == [0, 0]
