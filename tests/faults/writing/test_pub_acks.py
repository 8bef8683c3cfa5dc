"""PubAcks are lost, doubled or late: messages are sent again, and keep their order."""

from __future__ import annotations

from collections.abc import Container

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import AckTimeoutError
from tests.faults.writing.publishing import (
    SUBJECTS,
    Messages,
    PubAcks,
    Sending,
    is_pub_ack,
    publish,
    publish_all,
    publishing,
    sendings,
    with_and_without_ids,
)
from tests.support.nats.streams import create_stream
from tests.support.proxy.fault_proxy import After, Outcome, Proxy, Twice

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


async def test_pub_acks_duplicated(shared_server: NatsServer) -> None:
    messages = Messages("TWICE", COUNT)
    create_stream(shared_server.url, messages.stream)
    twice = PubAcks(range(COUNT + 1), Twice())
    with Proxy(shared_server.port, twice) as proxy:
        await publish_all(proxy.url, messages, max_in_flight=100)
        assert twice.done == COUNT
    assert messages.check(shared_server.url) == list(range(COUNT))


async def test_pub_acks_reordered(shared_server: NatsServer) -> None:
    messages = Messages("ORDER", COUNT)
    create_stream(shared_server.url, messages.stream)
    after = PubAcks(range(1, COUNT - 50, 7), After(40))
    with Proxy(shared_server.port, after) as proxy:
        await publish_all(proxy.url, messages, max_in_flight=200)
        assert after.done > 100
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
