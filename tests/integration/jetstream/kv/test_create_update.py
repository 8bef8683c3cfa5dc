"""Conditional writes to a key-value bucket (ADR-8): create and update at a revision."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import KeyExistsError, WrongLastSequenceError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue
from tests.integration.jetstream.kv.stores import new_bucket
from tests.support.nats.buckets import create_bucket
from tests.support.proxy.fault_proxy import Proxy

pytestmark = pytest.mark.servers


async def test_update_needs_revision(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("cas", history=3)) as kv:
        first = await kv.update("a", b"1", 0)
        await kv.put("other", b"")
        assert await kv.update("a", b"2", first) == 3
        with pytest.raises(WrongLastSequenceError, match="wrong last sequence: 3") as caught:
            await kv.update("a", b"3", first)
        assert caught.value.last_seq == 3
        assert (caught.value.code, caught.value.err_code) == (400, 10071)
        for conditional in (kv.delete("a", revision=1), kv.purge("a", revision=1)):
            with pytest.raises(WrongLastSequenceError):
                await conditional
        assert (await kv.get("a")).value == b"2"
        assert await kv.delete("a", revision=3) == 4
        assert await kv.purge("a", revision=4) == 5


async def test_create(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("create", history=3)) as kv:
        assert await kv.create("a", b"1") == 1
        with pytest.raises(KeyExistsError, match="at revision 1") as caught:
            await kv.create("a", b"2")
        assert caught.value.last_seq == 1
        await kv.delete("a")
        assert await kv.create("a", b"3") == 3
        await kv.purge("a")
        assert await kv.create("a", b"4") == 5
        assert (await kv.get("a")).value == b"4"
        # The subject purged: 0 is right again.
        await kv.jetstream.call("STREAM.PURGE.KV_create", {"filter": "$KV.create.a"})
        assert await kv.create("a", b"5") == 6


@pytest.mark.parametrize("numbered", [True, False])
async def test_create_with_and_without_sequence_in_refusal(
    nats_server: NatsServer, numbered: bool
) -> None:
    """ADR-53: ``wrong last sequence: 5`` and ``wrong last sequence``."""
    create_bucket(nats_server.url, "b", history=3)
    refusals = []

    def verdict(frame: bytes) -> bool | bytes:
        if b"wrong last sequence: " not in frame:
            return True
        refusals.append(frame)
        if numbered:
            return frame
        line, rest = frame.split(b"\r\n", 1)
        head, size = line.rsplit(b" ", 1)
        payload = rest[: int(size)].replace(b"wrong last sequence: 2", b"wrong last sequence")
        return head + b" %d\r\n" % len(payload) + payload + b"\r\n"

    with Proxy(nats_server.port, verdict) as proxy:
        async with connect(proxy.url) as js:
            kv = await KeyValue.open(js, "b")
            await kv.put("a", b"1")
            await kv.delete("a")
            asked = len(proxy.seen)
            assert await kv.create("a", b"2") == 3
            # Where the refusal has the sequence, a Direct Get that has reached it is enough.
            leader = any(b"stream_msg_get_response" in frame for frame in proxy.seen[asked:])
            assert leader is not numbered
            with pytest.raises(KeyExistsError, match="revision 3"):
                await kv.create("a", b"3")
    assert len(refusals) == 2


async def test_creators_that_race(shared_server: NatsServer) -> None:
    async with new_bucket(shared_server.url, KeyValueConfig("race")) as kv:
        await kv.put("a", b"old")
        await kv.delete("a")
        outcomes = await asyncio.gather(
            *(kv.create("a", b"%d" % i) for i in range(20)), return_exceptions=True
        )
        (revision,) = [outcome for outcome in outcomes if isinstance(outcome, int)]
        assert all(isinstance(o, KeyExistsError) for o in outcomes if not isinstance(o, int))
        assert (await kv.get("a", min_last_revision=revision)).revision == revision
