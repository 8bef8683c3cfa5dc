"""The ordered reader against a real server, with real trouble on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from buckets import (
    api,
    consumers,
    create_bucket,
    delete,
    delete_bucket,
    put,
    put_many,
    stream_info,
    stream_state,
)
from proxy import Proxy, is_delivery, is_status, with_header
from topology import wait_for_seq

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConnectError,
    ConsumerLostError,
    DataLossError,
    MinLastSequenceError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.connection import ConnectionSettings
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.range_request import RangeRequest
from nats_stream_source.wire.columns import ack_tokens
from nats_stream_source.wire.cursor import Rebuild, Step

pytestmark = pytest.mark.servers

Between = Callable[[OrderedReader], Coroutine[Any, Any, None]]


@asynccontextmanager
async def linked(url: str, **settings: Any) -> AsyncIterator[Link]:
    link = Link(ConnectionSettings(servers=(url,), **settings))
    try:
        yield link
    finally:
        await link.drop()


async def read(reader: OrderedReader, between: Between | None = None) -> list[int]:
    """The stream sequences of a range; ``between`` runs once, after the first batch."""
    rows: list[int] = []
    async for frames in reader.batches():
        rows += ack_tokens(frames).stream_seq.tolist()
        if between is not None:
            await between(reader)
            between = None
    return rows


def request_for(url: str, bucket: str, end: int, start: int = 0, **more: Any) -> RangeRequest:
    created = stream_info(url, bucket)["created"]
    more = {"heartbeat": 0.1, **more}
    return RangeRequest(f"KV_{bucket}", created, start, end, **more)


def read_range(
    url: str,
    request: RangeRequest,
    between: Between | None = None,
    **settings: Any,
) -> tuple[list[int], OrderedReader]:
    async def work() -> tuple[list[int], OrderedReader]:
        async with linked(url, **settings) as link:
            reader = OrderedReader(link, request)
            return await read(reader, between), reader

    return asyncio.run(work())


@pytest.fixture
def filled(nats_server: NatsServer) -> NatsServer:
    """A server with the bucket ``b``: 3,000 revisions of 1 KB, no history limit in the way."""
    create_bucket(nats_server.url, "b", history=64)
    put_many(nats_server.url, "b", ((f"k{i % 100}", b"%d" % i + b"x" * 1000) for i in range(3000)))
    return nats_server


ALL = list(range(1, 3001))

UNHEARD = 30.0
"""Seconds: a heartbeat for tests of other things, so that a server that is held up is not lost."""


def test_a_range_is_read_whole_and_leaves_nothing_behind(filled: NatsServer) -> None:
    rows, reader = read_range(filled.url, request_for(filled.url, "b", 3000, heartbeat=UNHEARD))
    assert rows == ALL
    assert reader.cursor.rebuilds == []
    assert consumers(filled.url, "b") == []


@pytest.mark.parametrize(("start", "end"), [(0, 1), (999, 1000), (2999, 3000), (10, 2500), (7, 7)])
def test_parts(filled: NatsServer, start: int, end: int) -> None:
    rows, _ = read_range(filled.url, request_for(filled.url, "b", end, start))
    assert rows == list(range(start + 1, end + 1))


def test_batches_are_bounded_by_rows_and_by_bytes(filled: NatsServer) -> None:
    async def sizes(**bounds: int) -> list[tuple[int, int]]:
        async with linked(filled.url) as link:
            reader = OrderedReader(link, request_for(filled.url, "b", 3000, **bounds))
            return [(len(frames), frames.nbytes) async for frames in reader.batches()]

    by_rows = asyncio.run(sizes(batch_rows=700))
    assert [rows for rows, _ in by_rows] == [700, 700, 700, 700, 200]
    by_bytes = asyncio.run(sizes(batch_bytes=100_000))
    assert sum(rows for rows, _ in by_bytes) == 3000
    assert all(50_000 < size <= 100_000 for _, size in by_bytes[:-1])
    alone = asyncio.run(sizes(batch_bytes=10))
    assert [rows for rows, _ in alone] == [1] * 3000


def test_one_message_larger_than_a_batch(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")
    put(nats_server.url, "b", "small", b"1")
    put(nats_server.url, "b", "large", b"x" * 900_000)
    request = request_for(nats_server.url, "b", 2, batch_bytes=1000)
    assert read_range(nats_server.url, request)[0] == [1, 2]


def test_only_the_filtered_subjects_and_the_end_by_heartbeat(filled: NatsServer) -> None:
    request = request_for(filled.url, "b", 3000, filters=("$KV.b.k7", "$KV.b.k42"))
    rows, reader = read_range(filled.url, request)
    assert rows == [s for s in ALL if (s - 1) % 100 in (7, 42)]
    assert reader.cursor.seen_through >= 3000


def test_last_per_subject(filled: NatsServer) -> None:
    request = request_for(filled.url, "b", 3000, last_per_subject=True, filters=("$KV.b.>",))
    assert read_range(filled.url, request)[0] == list(range(2901, 3001))


def test_a_range_whose_end_was_overwritten_ends(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=1)
    put_many(nats_server.url, "b", [("a", b"1"), ("b", b"1"), ("c", b"1")])
    put(nats_server.url, "b", "c", b"2")
    assert read_range(nats_server.url, request_for(nats_server.url, "b", 3))[0] == [1, 2]


def test_a_range_that_holds_nothing_any_more_ends(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", [("a", b"1"), ("b", b"1")])
    api(nats_server.url, "STREAM.PURGE.KV_b")
    assert read_range(nats_server.url, request_for(nats_server.url, "b", 2))[0] == []


# -- faults ---------------------------------------------------------------------------------------


class Drop:
    """Drops the messages with the given stream sequences, each once."""

    def __init__(self, *sequences: int) -> None:
        self.left = set(sequences)

    def __call__(self, frame: bytes) -> bool:
        if is_delivery(frame):
            seq = int(frame.split(b"\r\n", 1)[0].split(b".")[-4])
            if seq in self.left:
                self.left.discard(seq)
                return False
        return True


@pytest.mark.parametrize(
    "lost",
    [(1,), (1500,), (3000,), (1, 2, 3), tuple(range(100, 3000, 333)), tuple(range(2900, 3001))],
    ids=["first", "middle", "last", "first three", "here and there", "the last hundred"],
)
def test_lost_messages_are_read_again(filled: NatsServer, lost: tuple[int, ...]) -> None:
    with Proxy(filled.port, Drop(*lost)) as proxy:
        rows, reader = read_range(proxy.url, request_for(filled.url, "b", 3000))
        assert len(proxy.dropped) == len(lost)
    assert rows == ALL
    assert Rebuild.GAP in reader.cursor.rebuilds
    assert consumers(filled.url, "b") == []


def test_lost_messages_in_the_initial_values(filled: NatsServer) -> None:
    """A rebuilt last_per_subject list starts again; what was kept is skipped, not repeated.

    Some keys are hot: whoever went on by sequence would read their older revisions too, since all
    of these lie behind what was lost.
    """
    put_many(filled.url, "b", ((f"k{i % 5}", b"hot") for i in range(50)))
    with Proxy(filled.port, Drop(2950)) as proxy:
        how = {"last_per_subject": True, "filters": ("$KV.b.>",), "heartbeat": UNHEARD}
        rows, reader = read_range(proxy.url, request_for(filled.url, "b", 3050, **how))
        assert len(proxy.dropped) == 1
    assert rows == [*range(2906, 3001), *range(3046, 3051)]
    assert reader.cursor.rebuilds == [Rebuild.GAP]


def test_missed_heartbeats(filled: NatsServer) -> None:
    """From the 500th message on nothing comes through, until the reader asks anew."""
    silenced: set[bytes] = set()

    def verdict(frame: bytes) -> bool:
        sid = frame.split(b" ", 3)[2]
        if is_delivery(frame) and not silenced and b".500.500." in frame:
            silenced.add(sid)
        return not (sid in silenced and (is_delivery(frame) or is_status(frame, b"Idle")))

    with Proxy(filled.port, verdict) as proxy:
        rows, reader = read_range(proxy.url, request_for(filled.url, "b", 3000))
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


def test_consumer_deleted_in_the_middle(filled: NatsServer) -> None:
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
        rows, reader = read_range(proxy.url, request, delete_it)
    assert rows == ALL
    assert len(gone) == 1
    assert set(reader.cursor.rebuilds) == {Rebuild.MISSED_HEARTBEAT}
    assert consumers(filled.url, "b") == []


def test_connection_cut_in_the_middle(filled: NatsServer) -> None:
    held = Held()
    with Proxy(filled.port, held) as proxy:

        async def cut(reader: OrderedReader) -> None:
            proxy.cut()
            held.over = True

        request = request_for(filled.url, "b", 3000, batch_rows=10)
        rows, reader = read_range(proxy.url, request, cut)
    assert rows == ALL
    assert Rebuild.RECONNECTED in reader.cursor.rebuilds


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_server_restarted_in_the_middle(filled: NatsServer, how: str) -> None:
    held = Held()

    async def restart(reader: OrderedReader) -> None:
        if how == "kill":
            filled.kill()
            filled.start()
        else:
            filled.restart()
        held.over = True

    with Proxy(filled.port, held) as proxy:
        request = request_for(filled.url, "b", 3000, batch_rows=10)
        rows, reader = read_range(proxy.url, request, restart)
    assert rows == ALL
    assert Rebuild.RECONNECTED in reader.cursor.rebuilds


def test_a_server_that_stands_still_in_the_middle(filled: NatsServer) -> None:
    """No PONG: the connection is given up; the consumer that stayed behind is deleted later."""

    held = Held()

    async def freeze(reader: OrderedReader) -> None:
        filled.pause()
        held.over = True
        threading.Timer(4.0, filled.resume).start()  # longer than a PING is waited for

    with Proxy(filled.port, held) as proxy:
        request = request_for(filled.url, "b", 3000, batch_rows=10)
        rows, reader = read_range(proxy.url, request, freeze)
    assert rows == ALL
    assert Rebuild.RECONNECTED in reader.cursor.rebuilds
    assert consumers(filled.url, "b") == []


def test_a_reader_that_pauses_for_many_heartbeats(filled: NatsServer) -> None:
    """While the caller does not ask, nothing is judged: no rebuild."""

    async def work() -> tuple[list[int], OrderedReader]:
        async with linked(filled.url) as link:
            request = request_for(filled.url, "b", 3000, batch_rows=10, heartbeat=0.5)
            reader = OrderedReader(link, request)
            batches = reader.batches()
            rows = ack_tokens(await batches.__anext__()).stream_seq.tolist()
            blocked = asyncio.get_running_loop().time() + 2.0
            while asyncio.get_running_loop().time() < blocked:
                pass  # as Spark does: the event loop does not run at all
            async for frames in batches:
                rows += ack_tokens(frames).stream_seq.tolist()
            return rows, reader

    rows, reader = asyncio.run(work())
    assert rows == ALL
    assert reader.cursor.rebuilds == []


def test_swallowed_flow_control_is_answered_by_heartbeat(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=64)
    values = ((f"k{i % 400}", b"x" * 4000) for i in range(10_000))
    put_many(nats_server.url, "b", values)
    swallowed: list[bytes] = []

    def verdict(frame: bytes) -> bool:
        if is_status(frame, b"FlowControl") and len(swallowed) < 2:
            swallowed.append(frame)
            return False
        return True

    with Proxy(nats_server.port, verdict) as proxy:
        rows, reader = read_range(proxy.url, request_for(nats_server.url, "b", 10_000))
    assert len(swallowed) == 2
    assert rows == list(range(1, 10_001))
    assert Rebuild.STALLED not in reader.cursor.rebuilds


def test_flow_control_that_never_gets_through_is_given_up(tmp_path: Any) -> None:
    """ADR-19's own account configuration: answers to $JS.FC do not cross the import."""
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
        created = stream_info(owner, "b")["created"]
        rows, reader = read_range(
            server.url,
            RangeRequest("KV_b", created, 0, 3000, heartbeat=0.1),
            user="i",
            password="i",
            api_prefix="fromA",
            inbox_prefix="forI",
        )
    assert rows == ALL
    assert Rebuild.STALLED in reader.cursor.rebuilds


# -- ends that are errors -------------------------------------------------------------------------


def test_a_consumer_that_is_always_lost(filled: NatsServer) -> None:
    with Proxy(filled.port, lambda f: not (is_delivery(f) and b".1500." in f)) as proxy:
        request = request_for(filled.url, "b", 3000, attempts=3)
        with pytest.raises(ConsumerLostError, match=r"after sequence 1499: 4 consumers.*gap"):
            read_range(proxy.url, request)
        assert len(proxy.dropped) >= 4
    assert consumers(filled.url, "b") == []


def test_large_values_at_the_end_of_a_range_still_come(nats_server: NatsServer) -> None:
    """The last window's guess is wrong there: the answer that was held back is given after all."""
    create_bucket(nats_server.url, "b", history=64)
    put_many(nats_server.url, "b", ((f"k{i % 500}", b"x" * 100) for i in range(30_000)))
    put_many(nats_server.url, "b", ((f"k{i}", b"x" * 900_000) for i in range(25)))
    held = []
    # A heartbeat would tell of the flow control that waits, and be answered first. Without one, the
    # server says nothing more until it has its answer.
    request = request_for(nats_server.url, "b", 30_025, heartbeat=UNHEARD)

    async def work() -> list[int]:
        async with linked(nats_server.url) as link:
            reader = OrderedReader(link, request)
            waited = reader.cursor.waited

            def noted() -> Step:
                held.append(reader.cursor.position)
                return waited()

            reader.cursor.waited = noted  # type: ignore[method-assign]
            return await read(reader)

    assert asyncio.run(work()) == list(range(1, 30_026))
    assert held


def test_a_consumer_that_nothing_is_heard_of(filled: NatsServer) -> None:
    """As where the inbox prefix is not imported: the advice is another one."""
    with Proxy(filled.port, lambda f: not (is_delivery(f) or is_status(f, b""))) as proxy:
        request = request_for(filled.url, "b", 3000, attempts=1)
        with pytest.raises(ConsumerLostError, match=r"\(missed heartbeat.*'inboxPrefix'") as lost:
            read_range(proxy.url, request)
        assert proxy.dropped
    assert "requestTimeout" not in str(lost.value)


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


def test_a_replica_that_stays_behind_fails_the_read(filled: NatsServer) -> None:
    """The leader has the end, what delivers has not: never a short batch (ADR-53)."""
    with Proxy(filled.port, lagging(after=2995, start=2990)) as proxy:
        request = request_for(filled.url, "b", 3000, 2990, catch_up=0.5)
        with pytest.raises(MinLastSequenceError, match="has reached 2995, not 3000") as caught:
            read_range(proxy.url, request)
        assert len([frame for frame in proxy.dropped if is_delivery(frame)]) == 5
    assert (caught.value.code, caught.value.err_code) == (412, 10180)
    assert consumers(filled.url, "b") == []


def test_a_replica_that_catches_up_is_waited_for(filled: NatsServer) -> None:
    with Proxy(filled.port, lagging(after=2995, start=2990)) as proxy:

        async def catch_up(reader: OrderedReader) -> None:
            proxy.verdict = lambda frame: True

        request = request_for(filled.url, "b", 3000, 2990, batch_rows=1)
        rows, _ = read_range(proxy.url, request, catch_up)
    assert rows == list(range(2991, 3001))


def test_a_stream_that_was_set_back_meanwhile(filled: NatsServer) -> None:
    """A plan beyond the leader's end: the stream has lost what was planned."""
    request = request_for(filled.url, "b", 3001, 2990, catch_up=0.5)
    with pytest.raises(DataLossError, match="set back to sequence 3000"):
        read_range(filled.url, request)
    assert consumers(filled.url, "b") == []


def test_a_mirror_that_has_not_got_the_end_yet_lags(filled: NatsServer) -> None:
    """Its upstream may have it: nothing is lost, and the error is the one that says so."""
    mirror = {"name": "M", "mirror": {"name": "KV_b"}}
    created = api(filled.url, "STREAM.CREATE.M", mirror)["created"]
    wait_for_seq(filled.url, "M", 3000)
    request = RangeRequest("M", created, 2990, 3001, heartbeat=0.1, catch_up=0.5)
    with pytest.raises(MinLastSequenceError, match="has reached 3000, not 3001"):
        read_range(filled.url, request)


def test_waiting_ends_when_the_end_is_written(filled: NatsServer) -> None:
    async def work() -> list[int]:
        async with linked(filled.url) as link:
            reader = OrderedReader(link, request_for(filled.url, "b", 3002, 2999, batch_rows=1))
            rows: list[int] = []
            async for frames in reader.batches():
                rows += ack_tokens(frames).stream_seq.tolist()
                if len(rows) == 1:
                    await asyncio.to_thread(put_many, filled.url, "b", [("x", b"1"), ("y", b"2")])
            return rows

    assert asyncio.run(work()) == [3000, 3001, 3002]


def test_stream_deleted_in_the_middle(filled: NatsServer) -> None:
    async def drop(reader: OrderedReader) -> None:
        delete_bucket(filled.url, "b")

    # Reading from the end of a long wait: the range's last sequence does not exist yet.
    request = request_for(filled.url, "b", 3005, 2990, batch_rows=1)
    with pytest.raises(StreamNotFoundError):
        read_range(filled.url, request, drop)


def test_stream_replaced_in_the_middle(filled: NatsServer) -> None:
    async def replace(reader: OrderedReader) -> None:
        delete_bucket(filled.url, "b")
        create_bucket(filled.url, "b")

    request = request_for(filled.url, "b", 3005, 2990, batch_rows=1)
    with pytest.raises(DataLossError, match="deleted and made again"):
        read_range(filled.url, request, replace)


def test_server_gone_for_good(filled: NatsServer) -> None:
    async def kill(reader: OrderedReader) -> None:
        filled.kill()

    request = request_for(filled.url, "b", 3005, 2990, batch_rows=1)
    with pytest.raises(ConnectError):
        read_range(filled.url, request, kill, connect_timeout=1.0)


def test_a_reader_that_is_left_early_leaves_nothing_behind(filled: NatsServer) -> None:
    async def work() -> None:
        async with linked(filled.url) as link:
            reader = OrderedReader(link, request_for(filled.url, "b", 3000, batch_rows=10))
            batches = reader.batches()
            await batches.__anext__()
            assert len(consumers(filled.url, "b")) == 1
            await batches.aclose()
            assert consumers(filled.url, "b") == []
            # The connection is clean: the next reader gets its own rows only.
            again = OrderedReader(link, request_for(filled.url, "b", 20, 10))
            assert await read(again) == list(range(11, 21))

    asyncio.run(work())


def test_markers_and_headers_come_through(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=5)
    put(nats_server.url, "b", "a", b"1", {"Status": "404", "X": "y"})
    delete(nats_server.url, "b", "a")
    put(nats_server.url, "b", "a", b"\r\nMSG x 1 5\r\nhello\r\n")

    async def payloads() -> list[tuple[bytes, bytes]]:
        async with linked(nats_server.url) as link:
            reader = OrderedReader(link, request_for(nats_server.url, "b", 3))
            return [
                (frames.header(i), frames.payload(i))
                async for frames in reader.batches()
                for i in range(len(frames))
            ]

    found = asyncio.run(payloads())
    assert b"Status: 404" in found[0][0]
    assert found[0][1] == b"1"
    assert b"KV-Operation: DEL" in found[1][0]
    assert found[2] == (b"", b"\r\nMSG x 1 5\r\nhello\r\n")
    assert stream_state(nats_server.url, "b")["last_seq"] == 3
