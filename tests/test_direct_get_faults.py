"""Direct Get in bad weather: answers dropped, cut off, late. Nothing is lost or comes twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from buckets import api, publish
from cluster import Cluster
from direct import direct, outsider, pause_a_responder, seqs, some_unanswered
from proxy import Proxy
from topology import (
    ADR19_API_PREFIX,
    ADR19_INBOX_PREFIX,
    adr19_server,
    hub_and_leaf,
    make_mirror,
    wait_until,
)

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConnectError, MessageNotFoundError, ProtocolError
from nats_stream_source.jetstream import direct_request
from nats_stream_source.jetstream.direct_get import DirectGet
from nats_stream_source.jetstream.direct_request import ask

pytestmark = pytest.mark.usefixtures("impatient")

COUNT = 40
WHOLE = list(range(1, COUNT + 1))


def fill(url: str, name: str = "S", **config: Any) -> None:
    wanted = {"name": name, "subjects": [f"{name.lower()}.>"], "allow_direct": True, **config}
    api(url, f"STREAM.CREATE.{name}", wanted)
    publish(url, [(f"{name.lower()}.{n % 4}", b"v%d" % n, None) for n in WHOLE])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests wait for silence, and a server on this machine is never silent for so long."""
    monkeypatch.setattr(direct_request, "SILENCE", 0.2)


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


class Dropping:
    """A verdict that drops the first ``times`` frames that match."""

    def __init__(self, matches: Callable[[bytes], bool], times: int) -> None:
        self.matches = matches
        self.left = times

    def __call__(self, frame: bytes) -> bool:
        if self.left and self.matches(frame):
            self.left -= 1
            return False
        return True


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "always"])
@pytest.mark.parametrize(
    "matches",
    [is_eob, lambda f: is_answer(f, 1), lambda f: is_answer(f, 17), lambda f: is_answer(f, 20)],
    ids=["EOB", "first", "in the middle", "last of a page"],
)
def test_a_frame_of_a_batch_is_dropped(
    proxy: Proxy, matches: Callable[[bytes], bool], times: int
) -> None:
    proxy.verdict = Dropping(matches, times)

    async def work(get: DirectGet) -> list[int]:
        return await seqs(get.batch(batch=20))

    assert direct(proxy.url, "S", work) == WHOLE
    assert len(proxy.dropped) == 1 if times == 1 else len(proxy.dropped) >= 2


@pytest.mark.parametrize("times", [1, 1000], ids=["once", "always"])
@pytest.mark.parametrize("matches", [is_eob, lambda f: is_answer(f, 38)], ids=["EOB", "message"])
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "what is there"])
def test_a_frame_of_a_multi_subject_answer_is_dropped(
    proxy: Proxy, matches: Callable[[bytes], bool], times: int, complete: bool
) -> None:
    proxy.verdict = Dropping(matches, times)

    async def work(get: DirectGet) -> list[int]:
        return await seqs(get.last_for(["s.>"], complete=complete))

    assert direct(proxy.url, "S", work) == [37, 38, 39, 40]
    assert proxy.dropped


def test_the_connection_is_lost_between_two_pages(proxy: Proxy) -> None:
    async def work(get: DirectGet) -> tuple[list[int], int]:
        found = []
        async for page in get.pages(batch=10):
            found += page.sequences.tolist()
            if len(found) in (10, 30):
                proxy.cut()
        return found, get.jetstream.connection.reconnects

    assert direct(proxy.url, "S", work) == (WHOLE, 2)


def test_the_connection_is_lost_within_a_page(proxy: Proxy) -> None:
    """What had arrived stays, and the next page begins after it."""
    lost = 0

    def verdict(frame: bytes) -> bool:
        nonlocal lost
        if is_answer(frame, 25) and not lost:
            lost += 1
            asyncio.get_running_loop().create_task(proxy._cut())
        return lost == 0 or not is_answer(frame, 26) or len(proxy.dropped) > 0

    proxy.verdict = verdict

    async def work(get: DirectGet) -> tuple[list[int], int]:
        return await seqs(get.batch(batch=1000)), get.jetstream.connection.reconnects

    found, reconnects = direct(proxy.url, "S", work)
    assert found == WHOLE
    assert (lost, reconnects, len(proxy.dropped)) == (1, 1, 1)


def test_the_connection_is_lost_for_good(proxy: Proxy) -> None:
    async def work(get: DirectGet) -> list[int]:
        found: list[int] = []

        async def read() -> None:
            async for page in get.pages(batch=10):
                found.extend(page.sequences.tolist())
                await get.jetstream.connection.close()

        with pytest.raises(ConnectError):
            await read()
        return found

    assert direct(proxy.url, "S", work) == WHOLE[:10]


def test_a_late_answer_of_another_request_is_not_mixed_in(proxy: Proxy) -> None:
    """The first request is given up; its answers are let through while the second one waits."""
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

    async def work(get: DirectGet) -> None:
        connection = get.jetstream.connection
        first = await ask(connection, "DIRECT.GET.S", {"seq": 3, "batch": 1}, silence=0.1)
        assert len(first.page) == 0
        assert len(held) == 2
        proxy.verdict = late
        second = await ask(connection, "DIRECT.GET.S", {"seq": 7, "batch": 2})
        assert not held
        assert second.page.sequences.tolist() == [7, 8]
        assert second.code == 204

    direct(proxy.url, "S", work)


def test_no_answer_to_a_single_read(proxy: Proxy) -> None:
    """The leader is asked when nobody answers a Direct Get."""
    proxy.verdict = Dropping(lambda frame: is_answer(frame, 5), 2)

    async def work(get: DirectGet) -> list[int]:
        return [(await get.get(5)).seq, (await get.next("s.1", seq=2)).seq]

    assert direct(proxy.url, "S", work) == [5, 5]
    assert len(proxy.dropped) == 2


@pytest.mark.parametrize(
    "block",
    [b"NATS/1.0\r\nNats-Stream: S\r\n\r\n", b"NATS/2.0 204\r\n\r\n", b"NATS/1.0\r\nx\r\n\r\n"],
)
def test_an_answer_that_is_none(proxy: Proxy, block: bytes) -> None:
    def verdict(frame: bytes) -> bool | bytes:
        if not is_answer(frame, 5):
            return True
        words = frame.split(b"\r\n")[0].split(b" ")[:3]
        return b" ".join([*words, b"%d" % len(block)] * 1 + [b"%d" % len(block)]) + (
            b"\r\n" + block + b"\r\n"
        )

    proxy.verdict = verdict

    async def work(get: DirectGet) -> None:
        with pytest.raises(ProtocolError):
            await get.get(5)
        with pytest.raises(ProtocolError):
            await seqs(get.batch())

    direct(proxy.url, "S", work)


def test_a_batch_that_its_reader_leaves(filled: NatsServer) -> None:
    """Neither a page that is given up nor a cancelled one leaves anything subscribed."""

    async def work(get: DirectGet) -> int:
        batch = get.batch(batch=5)
        async with contextlib.aclosing(batch) as messages:
            async for message in messages:
                if message.seq == 7:
                    break
        waiting = asyncio.ensure_future(
            ask(get.jetstream.connection, "DIRECT.GET.S.a", None, silence=60)
        )
        stuck = asyncio.ensure_future(
            ask(get.jetstream.connection, "DIRECT.GET.S", {"seq": 1, "batch": 1}, silence=60)
        )
        await asyncio.sleep(0)
        for task in (waiting, stuck):
            task.cancel()
        await asyncio.gather(waiting, stuck, return_exceptions=True)
        return len(get.jetstream.connection.client._subs)

    assert direct(filled.url, "S", work) == 1  # nats-py's own, for requests


def test_through_an_import_that_lets_one_message_through() -> None:
    """ADR-19's own configuration (DESIGN 3.15): correct, by way of an ordered consumer."""
    with adr19_server() as accounts:
        fill(accounts.exporter)

        async def work(get: DirectGet) -> None:
            connection = get.jetstream.connection
            cut = await ask(connection, "DIRECT.GET.S", {"seq": 1, "batch": 9}, silence=0.2)
            assert cut.cut_to_one
            assert (await get.get(3)).data == b"v3"
            assert (await get.last("s.1")).seq == 37
            assert (await get.next("s.2", seq=3)).seq == 6
            with pytest.raises(MessageNotFoundError):
                await get.get(COUNT + 1)
            assert await seqs(get.batch()) == WHOLE
            last = await seqs(get.last_for(["s.>"]))
            assert last == [37, 38, 39, 40]

        direct(
            accounts.importer,
            "S",
            work,
            api_prefix=ADR19_API_PREFIX,
            inbox_prefix=ADR19_INBOX_PREFIX,
        )


def test_a_follower_that_stands_still() -> None:
    """A paused replica answers nothing. Reads are answered all the same, and whole."""
    with Cluster(4) as cluster:
        fill(cluster.url, num_replicas=3)
        cluster.wait_current("S")
        asked, leader = outsider(cluster, "S"), cluster.leader_of("S")
        pause_a_responder(cluster, "S")
        publish(leader.url, [("s.new", b"", None)])

        async def work(get: DirectGet) -> None:
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

        direct(asked.url, "S", work, request_timeout=1.0)


def test_a_mirror_that_lags() -> None:
    """A mirror behind a slow line: what it has not got is never reported missing."""
    with hub_and_leaf() as pair:
        fill(pair.hub.url)
        make_mirror(
            pair.leaf.url,
            "FAR",
            "S",
            source_domain="hub",
            allow_direct=True,
            mirror_direct=True,
        )
        pair.line.hold()
        try:
            publish(pair.hub.url, [("s.new", b"", None)])

            async def work(get: DirectGet) -> None:
                for _ in range(5):
                    assert (await get.last("s.new")).seq == COUNT + 1
                assert await seqs(get.batch(batch=15)) == [*WHOLE, COUNT + 1]

            direct(pair.hub.url, "S", work)
        finally:
            pair.line.release()
        wait_until(
            "the mirror at the end",
            lambda: bool(api(pair.leaf.url, "STREAM.INFO.FAR")["state"]["last_seq"] == COUNT + 1),
        )
