"""Direct Get where mirrors may respond (ADR-31)."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.direct_get.request import send_request
from tests.support.nats.buckets import (
    api,
    consumers,
    create_bucket,
    publish,
    server_version,
)
from tests.support.nats.direct_get import direct_get, seqs
from tests.support.nats.streams import stream_state

pytestmark = pytest.mark.servers


async def test_partial_mirror_never_responds_for_stream(shared_server: NatsServer) -> None:
    url = shared_server.url
    create_bucket(url, "whole", history=5)
    publish(url, [(f"$KV.whole.{'ab'[n % 2]}.{n % 10}", b"v%d" % n, None) for n in range(100)])
    part = {
        "name": "PART",
        "mirror": {"name": "KV_whole", "filter_subject": "$KV.whole.a.>"},
        "allow_direct": True,
        "mirror_direct": True,
    }
    late = {
        "name": "LATE",
        "mirror": {"name": "KV_whole", "opt_start_seq": 71},
        "allow_direct": True,
        "mirror_direct": True,
    }
    for mirror, count in ((part, 25), (late, 30)):
        api(url, f"STREAM.CREATE.{mirror['name']}", mirror)
        for _ in range(500):
            if stream_state(url, mirror["name"])["messages"] == count:
                break
        assert stream_state(url, mirror["name"])["messages"] == count

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
