"""Compare-and-set writes of many entries with lost PubAcks or concurrent writers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import WrongLastSequenceError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.batch_writer import KvBatchWriter
from nats_stream_source.jetstream.publish.batch_publisher import MessageColumns
from tests.faults.writing.publishing import (
    AtPubAck,
    PubAcks,
    is_pub_ack,
    open_bucket,
    puts,
    revisions,
    sendings,
    write,
)
from tests.support.nats.buckets import create_bucket, delete, purge, put, put_many
from tests.support.proxy.fault_proxy import CutAt, Outcome, Proxy

COUNT = 500


@asynccontextmanager
async def writing(
    url: str, name: str, *, request_timeout: float = 0.3, **settings: Any
) -> AsyncIterator[KvBatchWriter]:
    async with connect(url, request_timeout=request_timeout) as jetstream:
        bucket = await open_bucket(jetstream, name)
        async with KvBatchWriter(jetstream, bucket, retry_timeout=30, **settings) as writer:
            yield writer


FAULTS = {
    "first PubAck lost": lambda: PubAcks({1}),
    "all PubAcks lost": lambda: PubAcks(range(1, COUNT + 1)),
    "every second PubAck lost": lambda: PubAcks(range(1, COUNT, 2)),
    "connection cut": lambda: PubAcks({20, 200, 201}, CutAt(20)),
}


@pytest.mark.parametrize("skip", [False, True], ids=["fail", "skip"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_own_writes(shared_server: NatsServer, fault: str, skip: bool) -> None:
    """Writes without PubAcks that are repeated are the writer's own, and not conflicts."""
    name = f"own_{fault}_{skip}".replace(" ", "_")
    create_bucket(shared_server.url, name, history=5)
    done = FAULTS[fault]()
    with Proxy(shared_server.port, done) as proxy:
        async with writing(proxy.url, name, skip_conflicts=skip, max_in_flight=300) as writer:
            await write(writer, puts(name, range(COUNT), expected=0))
            assert (writer.stored, writer.skipped) == (COUNT, 0)
        assert done.done
        assert max(sendings(proxy).values()) > 1
    found = revisions(shared_server.url, name)
    assert [(key, value) for _, key, value in found] == [
        (f"k{number}", b"%d" % number) for number in range(COUNT)
    ]


@pytest.mark.parametrize("fault", FAULTS)
async def test_values_of_another_writer(shared_server: NatsServer, fault: str) -> None:
    """Of every third key, another writer has the value, which must stay."""
    name = f"other_{fault}".replace(" ", "_")
    url = shared_server.url
    create_bucket(url, name, history=5)
    others = range(0, COUNT, 3)
    put_many(url, name, ((f"k{number}", b"other") for number in others))
    done = FAULTS[fault]()
    with Proxy(shared_server.port, done) as proxy:
        async with writing(proxy.url, name, skip_conflicts=True) as writer:
            await write(writer, puts(name, range(COUNT), expected=0))
            assert (writer.stored, writer.skipped) == (COUNT - len(others), len(others))
        assert done.done
    found = revisions(url, name)
    assert len(found) == COUNT
    assert {key for _, key, value in found if value == b"other"} == {f"k{n}" for n in others}


async def test_first_conflict_is_error(shared_server: NatsServer) -> None:
    create_bucket(shared_server.url, "error", history=5)
    revision = put(shared_server.url, "error", "k7", b"other")
    with Proxy(shared_server.port, PubAcks({3, 7}, CutAt(20))) as proxy:
        async with writing(proxy.url, "error") as writer:
            with pytest.raises(
                WrongLastSequenceError,
                match=rf"key 'k7' of bucket 'error': .* revision {revision} \(PUT\), expected "
                r"revision 0 ",
            ):
                await write(writer, puts("error", range(20), expected=0))


@pytest.mark.parametrize("mark", [delete, purge])
@pytest.mark.parametrize("fault", FAULTS)
async def test_create_deleted_keys(shared_server: NatsServer, fault: str, mark: Any) -> None:
    name = f"{mark.__name__}_{fault}".replace(" ", "_")
    url = shared_server.url
    create_bucket(url, name, history=5)
    marked = range(0, COUNT, 50)
    for number in marked:
        put(url, name, f"k{number}", b"old")
        mark(url, name, f"k{number}")
    before = len(revisions(url, name))
    done = FAULTS[fault]()
    with Proxy(shared_server.port, done) as proxy:
        async with writing(proxy.url, name) as writer:
            await write(writer, puts(name, range(COUNT), expected=0))
            assert (writer.stored, writer.skipped) == (COUNT, 0)
        assert done.done
    found = revisions(url, name)
    assert len(found) == before + COUNT
    assert {key: value for _, key, value in found} == {
        f"k{number}": b"%d" % number for number in range(COUNT)
    }


async def test_overwritten_after_its_pub_ack(shared_server: NatsServer) -> None:
    """A message with a PubAck is overwritten by another writer; sending it again is refused.

    It is sent again because the one before it lost its PubAck.
    """
    create_bucket(shared_server.url, "overwritten", history=5)
    overwrites: list[int] = []

    def overwrite() -> None:
        overwrites.append(put(shared_server.url, "overwritten", "k9", b"other"))

    at = AtPubAck(5, lambda: None)

    def verdict(frame: bytes) -> Outcome:
        if at(frame) is False:
            return False
        if is_pub_ack(frame) and not overwrites and frame.split(b" ", 2)[1].endswith(b".19"):
            overwrite()
        return True

    with Proxy(shared_server.port, verdict) as proxy:
        async with writing(proxy.url, "overwritten") as writer:
            await write(writer, puts("overwritten", range(20), expected=0))
            assert (writer.stored, writer.skipped) == (20, 0)
        assert at.done == 1
        assert sendings(proxy)[9] == 2
    found = revisions(shared_server.url, "overwritten")
    assert len(found) == 21
    assert found[-1] == (overwrites[0], "k9", b"other")


DELETION = MessageColumns(
    pa.array(["$KV.again.k0"]),
    pa.array([b""], pa.binary()),
    pa.array([b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n"], pa.binary()),
)


async def test_create_after_deletion_whose_pub_ack_is_lost(shared_server: NatsServer) -> None:
    """The deletion is sent again, and so is the creation that was stored after the first one."""
    create_bucket(shared_server.url, "again", history=10)
    put(shared_server.url, "again", "k0", b"old")
    lost = PubAcks({1})
    with Proxy(shared_server.port, lost) as proxy:
        async with writing(proxy.url, "again", request_timeout=1) as writer:
            await writer.send(DELETION)
            await writer.send(puts("again", [0], expected=0))
            numbers = itertools.count(1)
            while creations(proxy) < 2:  # the first one is rejected because of the marker
                await writer.send(puts("again", [next(numbers)]))
                await asyncio.sleep(0.01)
            await writer.flush()
            assert (writer.stored, writer.skipped) == (1 + next(numbers), 0)
        assert lost.done == 1
    found = revisions(shared_server.url, "again")
    assert [value for _, key, value in found if key == "k0"] == [b"old", b"DEL", b"0", b"DEL", b"0"]


def creations(proxy: Proxy) -> int:
    return sum(b"$KV.again.k0 " in frame and b"Msg-Id" in frame for frame in proxy.sent)


async def test_pending_message_of_key(shared_server: NatsServer) -> None:
    """A replicated stream rejects with 10164 while another message on the key is not stored yet.

    The proxy sends that response in place of the message.
    """
    create_bucket(shared_server.url, "pending", history=5)
    rejected: list[bytes] = []

    def reject(frame: bytes) -> Outcome:
        if not frame.startswith(b"HPUB $KV.pending.k3 ") or len(rejected) == 2:
            return True
        rejected.append(frame)
        reply = frame.split(b" ", 3)[2]
        error = (
            b'{"error":{"code":400,"err_code":10164,"description":"wrong last sequence"},'
            b'"stream":"KV_pending","seq":0}'
        )
        return b"PUB %s %d\r\n%s\r\n" % (reply, len(error), error)

    with Proxy(shared_server.port, upward=reject) as proxy:
        async with writing(proxy.url, "pending") as writer:
            await write(writer, puts("pending", range(10), expected=0))
            assert (writer.stored, writer.skipped) == (10, 0)
    assert len(rejected) == 2
    assert len(revisions(shared_server.url, "pending")) == 10
