"""PubAcks are lost, doubled or late, or the connection is: messages are sent again, in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import AckTimeoutError, ConnectError
from tests.faults.writing.publishing import (
    FAST_INGEST,
    SUBJECTS,
    AtPubAck,
    Messages,
    PubAcks,
    PublisherKind,
    Sending,
    each_publisher,
    is_pub_ack,
    publish,
    publish_all,
    publishing,
    sendings,
    with_and_without_ids,
)
from tests.support.nats.streams import create_stream, stream_state
from tests.support.proxy.fault_proxy import After, CutAt, Outcome, Proxy, Twice
from tests.support.wait import wait_until_async

COUNT = 1000

LOST: dict[str, Container[int]] = {
    "first": {1},
    "middle": {500},
    "several": {3, 400, 401, 999},
    "last": {COUNT},
    "every second": range(1, COUNT + 1, 2),
    "all": range(1, COUNT + 1),
}


@with_and_without_ids
@pytest.mark.parametrize("which", LOST)
async def test_pub_acks_lost(shared_server: NatsServer, which: str, ids: bool) -> None:
    messages = Messages(f"LOST_{which}_{ids}".replace(" ", "_"), COUNT, ids=ids)
    create_stream(shared_server.url, messages.stream)
    lost = PubAcks(LOST[which])
    with Proxy(shared_server.port, lost) as proxy:
        publisher = await publish_all(proxy.url, messages, request_timeout=0.3)
        # Of those that were stored, only the ones whose first PubAck was lost are duplicates.
        assert publisher.duplicates == (lost.done if ids else 0)
        assert lost.done
        assert max(sendings(proxy).values()) == 2
    messages.check(shared_server.url)


async def test_pub_acks_lost_repeatedly(shared_server: NatsServer) -> None:
    """Each sending waits ``request_timeout`` for its PubAcks; then the publisher fails."""
    messages = Messages("NEVER", 10)
    create_stream(shared_server.url, messages.stream)
    with Proxy(shared_server.port, PubAcks({*range(3, 10_000)})) as proxy:
        async with publishing(
            proxy.url, messages.stream, request_timeout=1.0, retry_timeout=3
        ) as publisher:
            with pytest.raises(AckTimeoutError, match=r"a message on 'NEVER\.2': no PubAck"):
                await publish(publisher, messages)
            assert publisher.stored == 2
        assert 2 <= max(sendings(proxy).values()) <= 3


async def test_message_without_pub_ack(shared_server: NatsServer) -> None:
    """PubAcks of the messages that are sent again after it are not progress."""
    messages = Messages("ONE", 10)
    create_stream(shared_server.url, messages.stream)

    def lost(frame: bytes) -> bool:
        return not (is_pub_ack(frame) and frame.split(b" ", 2)[1].endswith(b"4"))

    with Proxy(shared_server.port, lost) as proxy:
        async with publishing(
            proxy.url, messages.stream, request_timeout=0.3, retry_timeout=1
        ) as publisher:
            with pytest.raises(AckTimeoutError, match=r"a message on 'ONE\.4': no PubAck"):
                await publish(publisher, messages)
            assert publisher.stored == 9
        assert sendings(proxy)[9] > 1


@pytest.mark.parametrize(
    ("numbers", "outcome"),
    [(range(COUNT + 1), Twice()), (range(1, COUNT - 50, 7), After(40))],
    ids=["twice", "reordered"],
)
async def test_pub_acks_repeated_or_reordered(
    shared_server: NatsServer, numbers: range, outcome: Outcome
) -> None:
    messages = Messages(f"ORDER_{len(numbers)}", COUNT)
    create_stream(shared_server.url, messages.stream)
    others = PubAcks(numbers, outcome)
    with Proxy(shared_server.port, others) as proxy:
        await publish_all(proxy.url, messages, max_in_flight=200)
        assert others.done > 100
    assert messages.check(shared_server.url) == list(range(COUNT))


# The message behind one without a PubAck is sent again, since it must be stored behind it again.
# In these tests it is lost then: the publisher must not be content with its first PubAck.


async def test_pub_ack_lost_behind_repeated_message(shared_server: NatsServer) -> None:
    messages = Messages("BEHIND", 10 * SUBJECTS)
    create_stream(shared_server.url, messages.stream)
    pub_ack = PubAcks({6})
    again = Sending(2, range(6, messages.count))
    with Proxy(shared_server.port, pub_ack, again) as proxy:
        await publish_all(proxy.url, messages, request_timeout=0.3)
        assert (pub_ack.done, again.done) == (1, messages.count - 6)
        assert sendings(proxy)[6] == 3
    messages.check(shared_server.url)


async def test_repeated_with_later_batches(shared_server: NatsServer) -> None:
    """The messages of all batches behind the one without a PubAck are sent again."""
    name = "BATCHES"
    create_stream(shared_server.url, name)
    lost = PubAcks({6})
    with Proxy(shared_server.port, lost) as proxy:
        async with publishing(proxy.url, name, request_timeout=0.3) as publisher:
            for first in range(0, 30, 10):
                await publisher.send(Messages(name, 10, first=first).columns())
            await publisher.flush()
        assert lost.done == 1
    messages = Messages(name, 30)
    assert messages.check(shared_server.url) == [*range(30), *range(5, 30)]


async def test_late_pub_acks(shared_server: NatsServer) -> None:
    """PubAcks of messages that were sent again meanwhile, which do not arrive the second time."""
    messages = Messages("LATE", 10 * SUBJECTS)
    create_stream(shared_server.url, messages.stream)
    late: list[bytes] = []
    again = Sending(2, range(1, messages.count))

    def verdict(frame: bytes) -> Outcome:
        if not is_pub_ack(frame):
            return True
        if len(late) < messages.count:
            late.append(frame)
            return False
        if b"".join(late):
            released, late[:] = b"".join(late), [b""] * messages.count
            return frame + released
        return True

    with Proxy(shared_server.port, verdict, again) as proxy:
        await publish_all(proxy.url, messages, request_timeout=0.3)
        assert again.done == messages.count - 1
        assert not b"".join(late)
        assert sendings(proxy)[1] == 3
    messages.check(shared_server.url)


MANY = 3000


@each_publisher
@with_and_without_ids
async def test_cut_before_acknowledgements(
    shared_server: NatsServer, kind: PublisherKind, ids: bool
) -> None:
    messages = Messages(f"ACKS_{kind.name}_{ids}", MANY, ids=ids)
    kind.create_stream(shared_server.url, messages.stream)
    cut = kind.acks({1, kind.middle, kind.middle + 1}, CutAt(20))
    with Proxy(shared_server.port, cut) as proxy:
        await kind.publish_all(proxy.url, messages)
        assert (cut.done, proxy.connections) == (3, 4)
    messages.check(shared_server.url)


@each_publisher
@with_and_without_ids
async def test_cut_within_message(
    shared_server: NatsServer, kind: PublisherKind, ids: bool
) -> None:
    messages = Messages(f"MESSAGE_{kind.name}_{ids}", MANY, ids=ids, size=100)
    kind.create_stream(shared_server.url, messages.stream)
    cut = Sending(1, {0, 700, 1500}, CutAt(60))
    with Proxy(shared_server.port, upward=cut) as proxy:
        await kind.publish_all(proxy.url, messages)
        assert (cut.done, proxy.connections) == (3, 4)
    messages.check(shared_server.url)


@each_publisher
@with_and_without_ids
async def test_killed_server(nats_server: NatsServer, kind: PublisherKind, ids: bool) -> None:
    """After its restart the server does not have the batch of fast ingest any more."""
    messages = Messages("ORDERS", MANY, ids=ids)
    kind.create_stream(nats_server.url, messages.stream)

    def restart() -> None:
        nats_server.kill()
        nats_server.start()

    killed = kind.at_ack(kind.middle, restart)
    with Proxy(nats_server.port, killed) as proxy:
        await kind.publish_all(proxy.url, messages)
        assert (killed.done, proxy.connections > 1) == (1, True)
        # A later response, on its way beside the lost one, can acknowledge all that were sent.
        assert kind is FAST_INGEST or max(sendings(proxy).values()) > 1
    messages.check(nats_server.url)


@each_publisher
@with_and_without_ids
async def test_paused_server(nats_server: NatsServer, kind: PublisherKind, ids: bool) -> None:
    """A half-open connection: the server pauses with messages that it has received."""
    messages = Messages("ORDERS", MANY, ids=ids)
    kind.create_stream(nats_server.url, messages.stream)
    paused = kind.at_ack(kind.middle, nats_server.pause)
    with Proxy(nats_server.port, paused) as proxy:
        async with publishing(
            proxy.url, messages.stream, request_timeout=0.5, **kind.settings
        ) as publisher:
            publishes = asyncio.create_task(publish(publisher, messages))
            await wait_until_async(lambda: proxy.connections > 1, "a reconnect")
            assert not publishes.done()
            nats_server.resume()
            await publishes
            assert publisher.stored == MANY
        assert paused.done == 1
    messages.check(nats_server.url)


async def test_server_remains_unavailable(nats_server: NatsServer) -> None:
    messages = Messages("ORDERS", MANY)
    create_stream(nats_server.url, messages.stream)
    with Proxy(nats_server.port, AtPubAck(500, nats_server.kill)) as proxy:
        async with publishing(proxy.url, messages.stream, retry_timeout=1) as publisher:
            with pytest.raises(ConnectError, match=r"was lost, and could not be restored within"):
                await publish(publisher, messages)


async def test_closed_connection(shared_server: NatsServer) -> None:
    messages = Messages("CLOSED", MANY)
    create_stream(shared_server.url, messages.stream)
    with Proxy(shared_server.port, PubAcks(range(100, 10_000))) as proxy:
        async with publishing(proxy.url, messages.stream) as publisher:
            publishes = asyncio.create_task(publish(publisher, messages))
            await wait_until_async(lambda: publisher.stored == 99, "99 PubAcks")
            await publisher._connection.close()
            with pytest.raises(ConnectError, match="is closed"):
                await publishes
            with pytest.raises(ConnectError, match="is closed"):
                await publisher.send(messages.columns())


async def test_slow_line(shared_server: NatsServer) -> None:
    """PubAcks that arrive slowly, over longer than ``request_timeout``, are not lost ones."""
    messages = Messages("SLOW", MANY)
    create_stream(shared_server.url, messages.stream)
    with Proxy(shared_server.port) as proxy:
        async with publishing(proxy.url, messages.stream, request_timeout=0.5) as publisher:
            proxy.rate = 150_000
            await publish(publisher, messages)
        assert sendings(proxy).total() == MANY
    assert messages.check(shared_server.url) == list(range(MANY))


async def test_blocked_event_loop(shared_server: NatsServer) -> None:
    """Between two record batches Spark computes: PubAcks wait, and messages are not sent again."""
    first = Messages("BLOCKED", MANY)
    create_stream(shared_server.url, first.stream)
    with Proxy(shared_server.port) as proxy:
        async with publishing(proxy.url, first.stream, request_timeout=0.2) as publisher:
            for messages in (first, Messages("BLOCKED", MANY, first=MANY)):
                await publisher.send(messages.columns())
                time.sleep(0.5)  # noqa: ASYNC251 (the loop shall stand still)
            await publisher.flush()
            assert publisher.stored == 2 * MANY
        assert sendings(proxy).total() == 2 * MANY
    assert stream_state(shared_server.url, "BLOCKED")["messages"] == 2 * MANY
