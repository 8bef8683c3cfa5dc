"""Fast ingest: the server acknowledges many messages together, and may end a batch early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Container
from functools import partial
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    AckLostError,
    AckTimeoutError,
    FastIngestNotSupportedError,
    PublishError,
    StreamFullError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.publish.batch_publisher import FastIngestPublisher
from tests.faults.writing.publishing import (
    FAST_INGEST,
    FLOW,
    AtResponse,
    Messages,
    Responses,
    Sending,
    is_response,
    number_of,
    publish,
    publishing,
    responses,
    sendings,
    stored,
)
from tests.support.nats.buckets import api
from tests.support.nats.streams import stream_state
from tests.support.proxy.fault_proxy import After, Delay, Outcome, Proxy, Twice, subject_of
from tests.support.proxy.verdicts import Counted
from tests.support.wait import wait_until_async

fast_publishing = partial(publishing, kind=FastIngestPublisher)
COUNT = 3000
MIDDLE = 4
"""The number of a response in the middle of the batch: the first ones have 0, 500 and 1,000."""


# -- messages that the server does not receive -----------------------------------------------------

LOST_MESSAGES: dict[str, Container[int]] = {
    "first": {0},
    "second": {1},
    "middle": {700, 701, 1400},
    "last": {COUNT - 1},
    "all of a flow": range(500, 1000),
}


@pytest.mark.parametrize("which", LOST_MESSAGES)
async def test_gap(shared_server: NatsServer, which: str) -> None:
    """The server ends the batch; what it has stored is not sent again."""
    messages = Messages(f"GAP_{which}".replace(" ", "_"), COUNT)
    FAST_INGEST.create_stream(shared_server.url, messages.stream)
    lost = Sending(1, LOST_MESSAGES[which])
    with Proxy(shared_server.port, upward=lost) as proxy:
        await FAST_INGEST.publish_all(proxy.url, messages, request_timeout=0.5)
        assert lost.done
        ended = responses(proxy, "gap") or responses(proxy, "error")
        assert ended, "the server has noticed"
    assert messages.check(shared_server.url) == list(range(COUNT))


async def test_batch_abandoned(tmp_path: Path) -> None:
    """The server abandons a batch without messages; the publisher begins another one."""
    config = tmp_path / "server.conf"
    config.write_text('jetstream { limits { batch { timeout: "50ms" } } }')
    messages = Messages("ABANDONED", COUNT)
    late = Sending(1, {800}, Delay(0.5))
    with NatsServer(config=config) as server, Proxy(server.port, upward=late) as proxy:
        FAST_INGEST.create_stream(server.url, messages.stream)
        await FAST_INGEST.publish_all(proxy.url, messages)
        assert late.done == 1
        assert {one["error"]["err_code"] for one in responses(proxy, "error")} == {10208}
        messages.check(server.url)


async def test_batch_ends_repeatedly(shared_server: NatsServer) -> None:
    """One message never arrives: the publisher fails, and the messages before it are stored."""
    messages = Messages("ALWAYS", 20)
    FAST_INGEST.create_stream(shared_server.url, messages.stream)

    def lose(frame: bytes) -> Outcome:
        return number_of(frame) != 9

    with Proxy(shared_server.port, upward=lose) as proxy:
        async with fast_publishing(
            proxy.url, messages.stream, request_timeout=0.3, retry_timeout=1
        ) as publisher:
            with pytest.raises(AckLostError, match=r"'ALWAYS\.\d': stream 'ALWAYS' has ended"):
                await publish(publisher, messages)
            assert publisher.stored == 9
        assert sendings(proxy)[9] > 1
    assert [number for _, number in stored(shared_server.url, "ALWAYS")] == list(range(9))


# -- responses -------------------------------------------------------------------------------------

LOST_RESPONSES: dict[str, Container[int]] = {
    "of the start": {1},
    "first": {2},
    "middle": {MIDDLE},
    "last": {7},
    "every second": range(1, 100, 2),
}


@pytest.mark.parametrize("which", LOST_RESPONSES)
async def test_lost_responses(shared_server: NatsServer, which: str) -> None:
    """The publisher requests them again: nothing is sent again if the batch has not ended."""
    messages = Messages(f"LOST_{which}".replace(" ", "_"), COUNT)
    FAST_INGEST.create_stream(shared_server.url, messages.stream)
    lost = Responses(LOST_RESPONSES[which])
    with Proxy(shared_server.port, lost) as proxy:
        await FAST_INGEST.publish_all(proxy.url, messages, request_timeout=0.3)
        assert lost.done
        if which in ("of the start", "first", "middle"):
            assert sendings(proxy).total() == COUNT
    messages.check(shared_server.url)


async def test_responses_missing(shared_server: NatsServer) -> None:
    messages = Messages("NEVER", 10)
    FAST_INGEST.create_stream(shared_server.url, messages.stream)
    with Proxy(shared_server.port, Responses(range(1, 10_000))) as proxy:
        async with fast_publishing(
            proxy.url, messages.stream, request_timeout=0.3, retry_timeout=1
        ) as publisher:
            with pytest.raises(AckTimeoutError, match=r"a message on 'NEVER\.0': no PubAck"):
                await publish(publisher, messages)
            assert publisher.stored == 0


@pytest.mark.parametrize("outcome", [Twice(), After(2)], ids=["twice", "in another order"])
async def test_repeated_and_late_responses(shared_server: NatsServer, outcome: Outcome) -> None:
    messages = Messages(type(outcome).__name__, 20 * FLOW)
    FAST_INGEST.create_stream(shared_server.url, messages.stream)
    fault = Responses(range(1, 18, 3), outcome)
    with Proxy(shared_server.port, fault) as proxy:
        await FAST_INGEST.publish_all(proxy.url, messages)
        assert fault.done == 6
        assert sendings(proxy).total() == messages.count
    assert messages.check(shared_server.url) == list(messages.numbers)


async def test_acknowledgements_of_ended_batch(shared_server: NatsServer) -> None:
    """They do not complete messages that were sent again, which are lost in this test."""
    messages = Messages("ENDED", COUNT)
    FAST_INGEST.create_stream(shared_server.url, messages.stream)
    late: list[bytes] = []
    again = Sending(2, range(1, COUNT))

    def verdict(frame: bytes) -> Outcome:
        if not is_response(frame):
            return True
        if len(late) < 6:  # up to the one for 2,500 messages; the last one begins to be missing
            late.append(frame)
            return len(late) < 4
        if b"".join(late[3:]):
            released, late[3:] = b"".join(late[3:]), [b""] * 3
            return frame + released
        return True

    with Proxy(shared_server.port, verdict, again) as proxy:
        await FAST_INGEST.publish_all(proxy.url, messages, request_timeout=0.3)
        assert len(late) == 6
    messages.check(shared_server.url)


async def test_acknowledgement_after_rejection(shared_server: NatsServer) -> None:
    """It does not complete the message that the server has rejected for the moment.

    A server counts a message that its disk has refused among those of a later acknowledgement.
    """
    messages = Messages("REJECTED", COUNT)
    FAST_INGEST.create_stream(shared_server.url, messages.stream)
    forged: list[bytes] = []

    def verdict(frame: bytes) -> Outcome:
        subject = subject_of(frame) if is_response(frame) else ""
        if forged or not subject.endswith(".fail.500.1.$FI"):
            return True
        sid = frame.split(b" ")[2]
        error = {"code": 503, "err_code": 10008, "description": "system temporarily unavailable"}
        payload = json.dumps({"error": error, "stream": "REJECTED", "seq": 0}).encode()
        reply = subject.replace(".fail.500.", ".fail.251.").encode()
        forged.append(b"MSG %s %s %d\r\n%s\r\n" % (reply, sid, len(payload), payload))
        return forged[0] + frame

    with Proxy(shared_server.port, verdict) as proxy:
        await FAST_INGEST.publish_all(proxy.url, messages)
        assert len(forged) == 1
        counts = sendings(proxy)
        assert (counts[249], counts[250]) == (1, 2)
    messages.check(shared_server.url)


async def test_end_of_batch_before_later_messages(shared_server: NatsServer) -> None:
    """The number of an end is that of a message of the next chunk; its response is not."""
    messages = Messages("CHUNKS", 20)
    FAST_INGEST.create_stream(shared_server.url, messages.stream)
    commit = Sending(1, {9})
    pings = Counted(lambda frame: b".4.$FI 0\r\n" in frame)
    with Proxy(shared_server.port, upward=lambda one: commit(one) and pings(one)) as proxy:
        async with fast_publishing(proxy.url, "CHUNKS", request_timeout=0.3) as publisher:
            for first in (0, 10):
                await publisher.send(Messages("CHUNKS", 10, first=first).columns())
            await publisher.flush()
            assert publisher.stored == messages.count
        assert commit.done == 1
        assert pings.done
        ends = [one for one in proxy.seen if is_response(one) and b".11.3.$FI" in one]
        assert any(b'"count":9' in one for one in ends)
    messages.check(shared_server.url)


# -- the stream ------------------------------------------------------------------------------------


async def test_purged(shared_server: NatsServer) -> None:
    messages = Messages("PURGED", COUNT)
    url = shared_server.url
    FAST_INGEST.create_stream(url, messages.stream)
    purged: list[int] = []
    purge = AtResponse(MIDDLE, lambda: purged.append(api(url, "STREAM.PURGE.PURGED")["purged"]))
    with Proxy(shared_server.port, purge) as proxy:
        await FAST_INGEST.publish_all(proxy.url, messages, request_timeout=0.3)
    assert purged[0] >= 2 * FLOW
    numbers = [number for _, number in stored(url, messages.stream)]
    assert set(numbers) == set(range(min(numbers), COUNT))


async def test_deleted(shared_server: NatsServer) -> None:
    url = shared_server.url
    messages = Messages("DELETED", COUNT)
    FAST_INGEST.create_stream(url, messages.stream)
    deleted = AtResponse(MIDDLE, lambda: api(url, "STREAM.DELETE.DELETED"))
    with Proxy(shared_server.port, deleted) as proxy:
        async with fast_publishing(proxy.url, messages.stream, request_timeout=1) as publisher:
            with pytest.raises(StreamNotFoundError, match="stream not found"):
                await publish(publisher, messages)
        assert deleted.done == 1


async def test_setting_taken_back(shared_server: NatsServer) -> None:
    """The error names the setting, and what was acknowledged before stays."""
    url = shared_server.url
    messages = Messages("BACK", COUNT)
    FAST_INGEST.create_stream(url, messages.stream)
    config = {"name": "BACK", "subjects": ["BACK.>"], "allow_batched": False}
    taken = AtResponse(MIDDLE, lambda: api(url, "STREAM.UPDATE.BACK", config))
    with Proxy(shared_server.port, taken) as proxy:
        async with fast_publishing(proxy.url, messages.stream, request_timeout=1) as publisher:
            with pytest.raises(FastIngestNotSupportedError, match="set allow_batched"):
                await publish(publisher, messages)
            assert publisher.stored >= 2 * FLOW
        assert taken.done == 1
    assert stream_state(url, "BACK")["messages"] >= publisher.stored


async def test_full(shared_server: NatsServer) -> None:
    url = shared_server.url
    messages = Messages("FULL", COUNT)
    FAST_INGEST.create_stream(url, messages.stream, max_msgs=700, discard="new")
    async with fast_publishing(url, messages.stream) as publisher:
        with pytest.raises(StreamFullError, match=r"'FULL\.0': maximum messages exceeded"):
            await publish(publisher, messages)
        assert publisher.stored <= 700
    assert stream_state(url, "FULL")["messages"] == 700


async def test_too_many_batches(tmp_path: Path) -> None:
    """Of other publishers: it waits for one of them to end, up to ``retry_timeout``."""
    config = tmp_path / "server.conf"
    config.write_text("jetstream { limits { batch { max_inflight_per_stream: 1 } } }")
    messages = Messages("MANY", 100)
    with NatsServer(config=config) as server:
        FAST_INGEST.create_stream(server.url, messages.stream)
        with Proxy(server.port, upward=Sending(1, {3}, Delay(1.0))) as slow:
            async with (
                fast_publishing(slow.url, messages.stream) as first,
                fast_publishing(server.url, messages.stream, retry_timeout=0.1) as second,
                fast_publishing(server.url, messages.stream) as third,
            ):
                publishes = asyncio.create_task(publish(first, messages))
                await wait_until_async(
                    lambda: stream_state(server.url, "MANY")["messages"] > 0, "an open batch"
                )
                with pytest.raises(PublishError, match="too many inflight"):
                    await publish(second, messages)
                await publish(third, messages)
                await publishes
                assert [one.stored for one in (first, second, third)] == [100, 0, 100]
