"""Direct Get under network faults: responses are dropped, cut or late; each row is read once."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConnectError, MessageNotFoundError, ProtocolError
from nats_stream_source.jetstream.direct_get import request
from nats_stream_source.jetstream.direct_get.request import send_request
from tests.support.nats.buckets import publish
from tests.support.nats.cluster import Cluster, paused
from tests.support.nats.direct_get import (
    direct_get,
    outsider,
    pause_a_responder,
    seqs,
    some_unanswered,
)
from tests.support.nats.streams import create_stream, stream_state
from tests.support.nats.topology import (
    ADR19_API_PREFIX,
    ADR19_INBOX_PREFIX,
    adr19_server,
    hub_and_leaf,
    make_mirror,
)
from tests.support.proxy.fault_proxy import CutAt, Outcome, Proxy
from tests.support.proxy.verdicts import Counted, first
from tests.support.wait import wait_until

pytestmark = pytest.mark.usefixtures("short_deadlines")

COUNT = 40
WHOLE = list(range(1, COUNT + 1))


def fill(url: str, name: str = "S", **config: Any) -> None:
    create_stream(url, name, f"{name.lower()}.>", allow_direct=True, **config)
    publish(url, [(f"{name.lower()}.{n % 4}", b"v%d" % n, None) for n in WHOLE])


@pytest.fixture
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests wait for silence, and a server on this machine is never silent for so long."""
    monkeypatch.setattr(request, "IDLE_TIMEOUT", 0.2)


@pytest.fixture(scope="module")
def filled(shared_server: NatsServer) -> NatsServer:
    fill(shared_server.url)
    return shared_server


@pytest.fixture
def proxy(filled: NatsServer) -> Iterator[Proxy]:
    with Proxy(filled.port) as proxy:
        yield proxy


def is_answer(frame: bytes, seq: int) -> bool:
    return b"\r\nNats-Sequence: %d\r\n" % seq in frame and b"$JS.ACK" not in frame


def is_eob(frame: bytes) -> bool:
    return b"NATS/1.0 204 EOB" in frame


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "always"])
@pytest.mark.parametrize(
    "matches",
    [is_eob, lambda f: is_answer(f, 1), lambda f: is_answer(f, 17), lambda f: is_answer(f, 20)],
    ids=["EOB", "first", "in the middle", "last of a page"],
)
async def test_batch_frame_dropped(
    proxy: Proxy, matches: Callable[[bytes], bool], times: int
) -> None:
    proxy.verdict = Counted(matches, first(times))

    async with direct_get(proxy.url, "S") as get:
        assert await seqs(get.batch(batch=20)) == WHOLE
    assert len(proxy.dropped) == 1 if times == 1 else len(proxy.dropped) >= 2


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "always"])
@pytest.mark.parametrize("matches", [is_eob, lambda f: is_answer(f, 38)], ids=["EOB", "message"])
async def test_multi_subject_frame_dropped(
    proxy: Proxy, matches: Callable[[bytes], bool], times: int
) -> None:
    proxy.verdict = Counted(matches, first(times))

    async with direct_get(proxy.url, "S") as get:
        last = get.last_for(["s.>"])
        assert await seqs(last) == [37, 38, 39, 40]
    assert proxy.dropped
    assert last.up_to_seq == 40


async def test_connection_lost_between_pages(proxy: Proxy) -> None:
    async with direct_get(proxy.url, "S") as get:
        found = []
        async for page in get.pages(batch=10):
            found += page.stream_seq.tolist()
            if len(found) in (10, 30):
                proxy.cut()
        assert (found, get.jetstream.connection.reconnects) == (WHOLE, 2)


async def test_connection_lost_within_page(proxy: Proxy) -> None:
    """The page keeps the messages that had arrived; the next page begins after them."""

    def cut_once(frame: bytes) -> Outcome:
        return CutAt(20) if is_answer(frame, 26) and not proxy.dropped else True

    proxy.verdict = cut_once

    async with direct_get(proxy.url, "S") as get:
        found, reconnects = await seqs(get.batch(batch=1000)), get.jetstream.connection.reconnects
    assert found == WHOLE
    assert (reconnects, len(proxy.dropped)) == (1, 1)
    requests = b"".join(frame for frame in proxy.sent if b"$JS.API.DIRECT.GET.S" in frame)
    assert re.findall(rb'"seq": ?(\d+)', requests) == [b"1", b"26"]


async def test_connection_lost_permanently(proxy: Proxy) -> None:
    async with direct_get(proxy.url, "S") as get:
        found: list[int] = []

        async def read() -> None:
            async for page in get.pages(batch=10):
                found.extend(page.stream_seq.tolist())
                await get.jetstream.connection.close()

        with pytest.raises(ConnectError):
            await read()
        assert found == WHOLE[:10]


async def test_late_response_is_not_mixed_in(proxy: Proxy) -> None:
    """The first request times out; its responses arrive while the second one waits."""
    held: list[bytes] = []

    def hold(frame: bytes) -> bool:
        if is_answer(frame, 3) or is_eob(frame):
            held.append(frame)
            return False
        return True

    def late(frame: bytes) -> bool | bytes:
        if is_answer(frame, 7) and held:
            before = b"".join(held)
            held.clear()
            return before + frame
        return True

    proxy.verdict = hold

    async with direct_get(proxy.url, "S") as get:
        connection = get.jetstream.connection
        first = await send_request(
            connection, "DIRECT.GET.S", {"seq": 3, "batch": 1}, idle_timeout=0.1
        )
        assert len(first.page) == 0
        assert len(held) == 2
        proxy.verdict = late
        second = await send_request(connection, "DIRECT.GET.S", {"seq": 7, "batch": 2})
        assert not held
        assert second.page.stream_seq.tolist() == [7, 8]
        assert second.code == 204


async def test_single_read_without_response(proxy: Proxy) -> None:
    """The leader receives the request when a Direct Get has no response."""
    proxy.verdict = Counted(lambda frame: is_answer(frame, 5), first(2))

    async with direct_get(proxy.url, "S") as get:
        assert [(await get.get(5)).seq, (await get.next("s.1", seq=2)).seq] == [5, 5]
    assert len(proxy.dropped) == 2


def is_of_leader(frame: bytes) -> bool:
    return b"io.nats.jetstream.api.v1.stream_msg_get_response" in frame


async def test_single_read_without_leader(proxy: Proxy) -> None:
    """The Direct Get is repeated: another server may handle it. The leader is not needed."""
    direct = Counted(lambda frame: is_answer(frame, 5), first(2))
    proxy.verdict = lambda frame: direct(frame) and not is_of_leader(frame)

    async with direct_get(proxy.url, "S", request_timeout=1.0) as get:
        assert (await get.get(5)).data == b"v5"
    assert direct.done == 2
    assert sum(map(is_of_leader, proxy.dropped)) == 1


async def test_single_read_without_upstream_of_mirror(proxy: Proxy) -> None:
    """The mirror has the message, and receives every other request or so."""
    fill(proxy.url, "UP")
    make_mirror(proxy.url, "DOWN", "UP", allow_direct=True, mirror_direct=True)
    wait_until(
        lambda: bool(stream_state(proxy.url, "DOWN")["last_seq"] == COUNT), "the mirror at the end"
    )
    proxy.verdict = lambda frame: not (b"\r\nNats-Stream: UP\r\n" in frame or is_of_leader(frame))

    async with direct_get(proxy.url, "UP", request_timeout=4.0) as get:
        found = await asyncio.gather(*(get.get(n) for n in range(1, 9)))
        assert [one.seq for one in found] == list(range(1, 9))
        found = await asyncio.gather(*(get.last(f"up.{n % 4}") for n in range(8)))
        assert {one.seq for one in found} == {37, 38, 39, 40}
    assert proxy.dropped


@pytest.mark.parametrize(
    "block",
    [b"NATS/1.0\r\nNats-Stream: S\r\n\r\n", b"NATS/2.0 204\r\n\r\n", b"NATS/1.0\r\nx\r\n\r\n"],
)
async def test_invalid_response_is_refused(proxy: Proxy, block: bytes) -> None:
    def verdict(frame: bytes) -> bool | bytes:
        if not is_answer(frame, 5):
            return True
        words = frame.split(b"\r\n")[0].split(b" ")[:3]
        return b" ".join([*words, b"%d" % len(block)] * 1 + [b"%d" % len(block)]) + (
            b"\r\n" + block + b"\r\n"
        )

    proxy.verdict = verdict

    async with direct_get(proxy.url, "S") as get:
        with pytest.raises(ProtocolError):
            await get.get(5)
        with pytest.raises(ProtocolError):
            await seqs(get.batch())


async def test_batch_left_by_reader(filled: NatsServer) -> None:
    """Neither a page that is given up nor a cancelled one leaves anything subscribed."""
    async with direct_get(filled.url, "S") as get:
        batch = get.batch(batch=5)
        async with contextlib.aclosing(batch) as messages:
            async for message in messages:
                if message.seq == 7:
                    break
        waiting = asyncio.ensure_future(
            send_request(get.jetstream.connection, "DIRECT.GET.S.a", None, idle_timeout=60)
        )
        stuck = asyncio.ensure_future(
            send_request(
                get.jetstream.connection, "DIRECT.GET.S", {"seq": 1, "batch": 1}, idle_timeout=60
            )
        )
        await asyncio.sleep(0)
        for task in (waiting, stuck):
            task.cancel()
        await asyncio.gather(waiting, stuck, return_exceptions=True)
        assert len(get.jetstream.connection.client._subs) == 1  # nats-py's own, for requests


async def test_import_with_single_response() -> None:
    """ADR-19's own configuration: correct, by way of an ordered consumer.

    See docs/internals/measurements.md, Servers 15.
    """
    with adr19_server() as accounts:
        fill(accounts.exporter)

        async with direct_get(
            accounts.importer, "S", api_prefix=ADR19_API_PREFIX, inbox_prefix=ADR19_INBOX_PREFIX
        ) as get:
            connection = get.jetstream.connection
            cut = await send_request(
                connection, "DIRECT.GET.S", {"seq": 1, "batch": 9}, idle_timeout=0.2
            )
            assert cut.stopped_after_first
            assert (await get.get(3)).data == b"v3"
            assert (await get.last("s.1")).seq == 37
            assert (await get.next("s.2", seq=3)).seq == 6
            with pytest.raises(MessageNotFoundError):
                await get.get(COUNT + 1)
            assert await seqs(get.batch()) == WHOLE
            last = await seqs(get.last_for(["s.>"]))
            assert last == [37, 38, 39, 40]


async def test_follower_paused() -> None:
    """A paused replica sends no response. Reads are complete nevertheless."""
    with Cluster(4) as cluster:
        fill(cluster.url, num_replicas=3)
        cluster.wait_current("S")
        asked, leader = outsider(cluster, "S"), cluster.leader_of("S")
        await pause_a_responder(cluster, "S")
        publish(leader.url, [("s.new", b"", None)])

        async with direct_get(asked.url, "S", request_timeout=1.0) as get:
            found = await asyncio.gather(*(get.last("s.new") for _ in range(20)))
            assert {one.seq for one in found} == {COUNT + 1}
            assert {
                one.seq for one in await asyncio.gather(*(get.next(seq=9) for _ in range(5)))
            } == {9}
            batches = await asyncio.gather(*(seqs(get.batch(batch=15)) for _ in range(5)))
            assert batches == [[*WHOLE, COUNT + 1]] * 5
            last = await asyncio.gather(*(seqs(get.last_for(["s.>"])) for _ in range(5)))
            assert last == [[37, 38, 39, 40, 41]] * 5
            assert await some_unanswered(get)  # the fault is still there


@pytest.mark.faults
async def test_leader_paused() -> None:
    """Single reads do not need it: the other replicas have the messages."""
    with Cluster(3) as cluster:
        fill(cluster.url, num_replicas=3)
        cluster.wait_current("S")
        follower = cluster.followers_of("S")[0]
        with paused([cluster.leader_of("S")]):
            async with direct_get(follower.url, "S") as get:
                assert await some_unanswered(get)
                found = await asyncio.gather(*(get.get(9) for _ in range(30)))
                assert {one.seq for one in found} == {9}


async def test_mirror_lags() -> None:
    """A mirror behind a slow line: a message that it lacks is never reported as missing."""
    with hub_and_leaf() as pair:
        fill(pair.hub.url)
        make_mirror(
            pair.leaf.url, "FAR", "S", source_domain="hub", allow_direct=True, mirror_direct=True
        )
        pair.line.hold()
        try:
            publish(pair.hub.url, [("s.new", b"", None)])

            async with direct_get(pair.hub.url, "S") as get:
                for _ in range(5):
                    assert (await get.last("s.new")).seq == COUNT + 1
                assert await seqs(get.batch(batch=15)) == [*WHOLE, COUNT + 1]
        finally:
            pair.line.release()
        wait_until(
            lambda: bool(stream_state(pair.leaf.url, "FAR")["last_seq"] == COUNT + 1),
            "the mirror at the end",
        )
