"""The ordered reader recovers from lost initial values, consumers and flow control, and pauses.

``tests/faults/network`` and ``tests/faults/server`` have lost frames, connections and servers.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.wire.consumer.cursor import Rebuild
from tests.integration.jetstream.ordered.reads import ALL, UNHEARD, linked, read_range, request_for
from tests.support.nats.buckets import api, bucket_info, consumers, create_bucket, put_many
from tests.support.proxy.fault_proxy import Proxy, is_delivery, is_status
from tests.support.proxy.verdicts import Sequences

pytestmark = pytest.mark.servers


async def test_lost_messages_in_initial_values(filled: NatsServer) -> None:
    """A rebuilt last_per_subject list starts again; what was kept is skipped, not repeated.

    Some keys are hot: a reader that resumed by sequence would read their older revisions too, since
    all of these lie behind what was lost.
    """
    put_many(filled.url, "b", ((f"k{i % 5}", b"hot") for i in range(50)))
    with Proxy(filled.port, Sequences([2950])) as proxy:
        how = {"last_per_subject": True, "filters": ("$KV.b.>",), "heartbeat": UNHEARD}
        rows, reader = await read_range(proxy.url, request_for(filled.url, "b", 3050, **how))
        assert len(proxy.dropped) == 1
    assert rows == [*range(2906, 3001), *range(3046, 3051)]
    assert reader.cursor.rebuilds == [Rebuild.GAP]


async def test_missed_heartbeats(filled: NatsServer) -> None:
    """From the 500th message on nothing comes through, until the reader creates a new consumer."""
    silenced: set[bytes] = set()

    def verdict(frame: bytes) -> bool:
        sid = frame.split(b" ", 3)[2]
        if is_delivery(frame) and not silenced and b".500.500." in frame:
            silenced.add(sid)
        return not (sid in silenced and (is_delivery(frame) or is_status(frame, b"Idle")))

    with Proxy(filled.port, verdict) as proxy:
        rows, reader = await read_range(proxy.url, request_for(filled.url, "b", 3000))
        assert any(is_status(frame, b"Idle") for frame in proxy.dropped)
    assert rows == ALL
    assert set(reader.cursor.rebuilds) == {Rebuild.MISSED_HEARTBEAT}


class Held:
    """Lets the first 2,500 messages through, and neither more nor a word of it until ``over``.

    So what happens after the first batch happens in the middle, however fast the reader is.
    """

    def __init__(self) -> None:
        self.over = False

    def __call__(self, frame: bytes) -> bool:
        if self.over or not (is_delivery(frame) or is_status(frame, b"Idle")):
            return True
        return is_delivery(frame) and int(frame.split(b"\r\n", 1)[0].split(b".")[-4]) <= 2500


async def test_consumer_deleted_while_read(filled: NatsServer) -> None:
    """What is left then only a new one delivers."""
    gone: list[str] = []
    held = Held()

    async def delete_it(reader: OrderedReader) -> None:
        for name in consumers(filled.url, "b"):
            api(filled.url, f"CONSUMER.DELETE.KV_b.{name}")
            gone.append(name)
        held.over = True

    with Proxy(filled.port, held) as proxy:
        request = request_for(filled.url, "b", 3000, batch_rows=10)
        rows, reader = await read_range(proxy.url, request, delete_it)
    assert rows == ALL
    assert len(gone) == 1
    assert set(reader.cursor.rebuilds) == {Rebuild.MISSED_HEARTBEAT}
    assert consumers(filled.url, "b") == []


async def test_server_paused_while_read(filled: NatsServer) -> None:
    """No PONG: the connection is given up; the consumer that stayed behind is deleted later."""
    held = Held()

    async def freeze(reader: OrderedReader) -> None:
        filled.pause()
        held.over = True
        threading.Timer(4.0, filled.resume).start()  # longer than a PING is waited for

    with Proxy(filled.port, held) as proxy:
        request = request_for(filled.url, "b", 3000, batch_rows=10)
        rows, reader = await read_range(proxy.url, request, freeze)
    assert rows == ALL
    assert Rebuild.RECONNECTED in reader.cursor.rebuilds
    assert consumers(filled.url, "b") == []


async def test_reader_pauses_for_many_heartbeats(filled: NatsServer) -> None:
    """While the caller requests no batch, no heartbeat is missed: no rebuild."""
    async with linked(filled.url) as link:
        request = request_for(filled.url, "b", 3000, batch_rows=10, heartbeat=0.5)
        reader = OrderedReader(link, request)
        batches = reader.batches()
        rows = (await batches.__anext__()).stream_seq.tolist()
        blocked = asyncio.get_running_loop().time() + 2.0
        while asyncio.get_running_loop().time() < blocked:
            pass  # as Spark does: the event loop does not run at all
        async for frames in batches:
            rows += frames.stream_seq.tolist()
    assert rows == ALL
    assert reader.cursor.rebuilds == []


async def test_flow_control_that_never_gets_through_is_given_up(tmp_path: Any) -> None:
    """ADR-19's own account configuration: responses to $JS.FC do not cross the import."""
    config = tmp_path / "accounts.conf"
    config.write_text(
        """
        accounts: {
          A: { users: [{user: a, password: a}], jetstream: enabled,
               exports: [{service: '$JS.API.>'}, {service: '$KV.>'}, {stream: 'forI.>'}] },
          I: { users: [{user: i, password: i}],
               imports: [{service: {account: A, subject: '$JS.API.>'}, to: 'fromA.>'},
                         {service: {account: A, subject: '$KV.>'}, to: 'fromA.$KV.>'},
                         {stream: {subject: 'forI.>', account: A}}] }
        }
        """
    )
    with NatsServer(config=config) as server:
        owner = server.url.replace("//", "//a:a@")
        create_bucket(owner, "b", history=64)
        put_many(owner, "b", ((f"k{i % 100}", b"x" * 4000) for i in range(3000)))
        created = bucket_info(owner, "b")["created"]
        rows, reader = await read_range(
            server.url,
            RangeRequest("KV_b", KnownStream(created), 0, 3000, heartbeat=0.1),
            user="i",
            password="i",
            api_prefix="fromA",
            inbox_prefix="forI",
        )
    assert rows == ALL
    assert Rebuild.STALLED in reader.cursor.rebuilds
