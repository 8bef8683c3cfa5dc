"""Reads of the ordered reader that recover, wait for a replica, or end with an error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConnectError,
    ConsumerLostError,
    DataLossError,
    MinLastSequenceError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.wire.consumer.cursor import CursorAction, Rebuild
from tests.integration.jetstream.ordered.reads import (
    ALL,
    UNHEARD,
    linked,
    read,
    read_range,
    request_for,
)
from tests.support.nats.buckets import (
    api,
    bucket_info,
    consumers,
    create_bucket,
    delete_bucket,
    put_many,
)
from tests.support.nats.topology import make_mirror
from tests.support.proxy.fault_proxy import Proxy, is_delivery, is_status, with_header
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


async def test_consumer_lost_repeatedly(filled: NatsServer) -> None:
    with Proxy(filled.port, lambda f: not (is_delivery(f) and b".1500." in f)) as proxy:
        request = request_for(filled.url, "b", 3000, attempts=3)
        with pytest.raises(ConsumerLostError, match=r"after sequence 1499: 4 consumers.*gap"):
            await read_range(proxy.url, request)
        assert len(proxy.dropped) >= 4
    assert consumers(filled.url, "b") == []


async def test_large_values_at_end_of_range_are_delivered(nats_server: NatsServer) -> None:
    """The estimate of the last window is wrong: the response that was held back is sent."""
    create_bucket(nats_server.url, "b", history=64)
    put_many(nats_server.url, "b", ((f"k{i % 500}", b"x" * 100) for i in range(30_000)))
    put_many(nats_server.url, "b", ((f"k{i}", b"x" * 900_000) for i in range(25)))
    held = []
    # A heartbeat would tell of the flow control that waits, and be answered first. Without one, the
    # server says nothing more until it has its answer.
    request = request_for(nats_server.url, "b", 30_025, heartbeat=UNHEARD)

    async with linked(nats_server.url) as link:
        reader = OrderedReader(link, request)
        idle = reader.cursor.idle

        def noted() -> CursorAction:
            held.append(reader.cursor.position)
            return idle()

        reader.cursor.idle = noted
        assert await read(reader) == list(range(1, 30_026))
    assert held


async def test_consumer_silent(filled: NatsServer) -> None:
    """As where the inbox prefix is not imported: the advice is another one."""
    with Proxy(filled.port, lambda f: not (is_delivery(f) or is_status(f, b""))) as proxy:
        request = request_for(filled.url, "b", 3000, attempts=1)
        with pytest.raises(ConsumerLostError, match=r"\(missed heartbeat.*'inbox_prefix'") as lost:
            await read_range(proxy.url, request)
        assert proxy.dropped
    assert "request_timeout" not in str(lost.value)


def lagging(after: int, start: int) -> Callable[[bytes], bool | bytes]:
    """What a replica that has stopped at ``after`` lets through to a consumer from ``start``."""

    def verdict(frame: bytes) -> bool | bytes:
        if is_delivery(frame):
            return int(frame.split(b"\r\n", 1)[0].split(b".")[-4]) <= after
        if is_status(frame, b"Idle"):
            behind = with_header(frame, b"Nats-Last-Stream", b"%d" % after)
            return with_header(behind, b"Nats-Last-Consumer", b"%d" % (after - start))
        return True

    return verdict


async def test_replica_behind_fails_read(filled: NatsServer) -> None:
    """The leader has the end, the delivering replica has not: no batch is short (ADR-53)."""
    with Proxy(filled.port, lagging(after=2995, start=2990)) as proxy:
        request = request_for(filled.url, "b", 3000, 2990, catch_up_timeout=0.5)
        with pytest.raises(
            MinLastSequenceError, match=r"up to sequence 3000: .* has reached 2995 "
        ) as caught:
            await read_range(proxy.url, request)
        assert len([frame for frame in proxy.dropped if is_delivery(frame)]) == 5
    assert (caught.value.code, caught.value.err_code) == (412, 10180)
    assert consumers(filled.url, "b") == []


async def test_replica_catching_up_is_awaited(filled: NatsServer) -> None:
    with Proxy(filled.port, lagging(after=2995, start=2990)) as proxy:

        async def catch_up(reader: OrderedReader) -> None:
            proxy.verdict = lambda frame: True

        request = request_for(filled.url, "b", 3000, 2990, batch_rows=1)
        rows, _ = await read_range(proxy.url, request, catch_up)
    assert rows == list(range(2991, 3001))


async def test_stream_rolled_back_meanwhile(filled: NatsServer) -> None:
    """A plan beyond the leader's end: the stream has lost what was planned."""
    request = request_for(filled.url, "b", 3001, 2990, catch_up_timeout=0.5)
    with pytest.raises(
        DataLossError, match="rolled back during the read: its last sequence is 3000"
    ):
        await read_range(filled.url, request)
    assert consumers(filled.url, "b") == []


async def test_mirror_without_end_lags(filled: NatsServer) -> None:
    """The upstream may have the message: the error reports lag, not data loss."""
    created = make_mirror(filled.url, "M", "KV_b")["created"]
    request = RangeRequest(
        "M", KnownStream(created), 2990, 3001, heartbeat=0.1, catch_up_timeout=0.5
    )
    with pytest.raises(MinLastSequenceError, match=r"up to sequence 3001: .* has reached 3000 "):
        await read_range(filled.url, request)


async def test_mirror_rolled_back_under_endless_reader(filled: NatsServer) -> None:
    """A mirror without its origin stays empty: the reader's position is not confirmed."""
    mirror = make_mirror(filled.url, "M", "KV_b")
    delete_bucket(filled.url, "b")

    async def recreate(reader: OrderedReader) -> None:
        api(filled.url, "STREAM.DELETE.M")
        api(filled.url, "STREAM.CREATE.M", mirror["config"])

    request = RangeRequest(
        "M", KnownStream(mirror["created"]), 2990, ENDLESS, heartbeat=0.1, eager=True
    )
    with pytest.raises(
        DataLossError, match="rolled back during the read: the mirror's last sequence is 0"
    ):
        await read_range(filled.url, request, recreate)


async def test_wait_ends_when_end_is_written(filled: NatsServer) -> None:
    async with linked(filled.url) as link:
        reader = OrderedReader(link, request_for(filled.url, "b", 3002, 2999, batch_rows=1))
        rows: list[int] = []
        async for frames in reader.batches():
            rows += frames.stream_seq.tolist()
            if len(rows) == 1:
                await asyncio.to_thread(put_many, filled.url, "b", [("x", b"1"), ("y", b"2")])
        assert rows == [3000, 3001, 3002]


async def test_stream_deleted_while_read(filled: NatsServer) -> None:
    async def drop(reader: OrderedReader) -> None:
        delete_bucket(filled.url, "b")

    # Reading from the end of a long wait: the range's last sequence does not exist yet.
    request = request_for(filled.url, "b", 3005, 2990, batch_rows=1)
    with pytest.raises(StreamNotFoundError):
        await read_range(filled.url, request, drop)


async def test_stream_replaced_while_read(filled: NatsServer) -> None:
    async def replace(reader: OrderedReader) -> None:
        delete_bucket(filled.url, "b")
        create_bucket(filled.url, "b")

    request = request_for(filled.url, "b", 3005, 2990, batch_rows=1)
    with pytest.raises(DataLossError, match="was deleted and re-created"):
        await read_range(filled.url, request, replace)


async def test_server_killed(filled: NatsServer) -> None:
    async def kill(reader: OrderedReader) -> None:
        filled.kill()

    request = request_for(filled.url, "b", 3005, 2990, batch_rows=1)
    with pytest.raises(ConnectError):
        await read_range(filled.url, request, kill, connect_timeout=1.0)
