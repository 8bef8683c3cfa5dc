"""Direct Get without a server: which response of a single read counts, filters, timestamps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nats_stream_source.errors import (
    ConnectError,
    MessageNotFoundError,
    NatsSourceError,
    PermissionDeniedError,
)
from nats_stream_source.jetstream.api import StoredMessage
from nats_stream_source.jetstream.direct_get import readers
from nats_stream_source.jetstream.direct_get.last_messages import _disjoint_filters
from nats_stream_source.jetstream.direct_get.readers import SingleMessageReader, SingleRequest
from nats_stream_source.jetstream.direct_get.request import stored_messages
from nats_stream_source.jetstream.times import rfc3339
from nats_stream_source.wire.consumer.deliveries import Delivery, encode_deliveries
from nats_stream_source.wire.direct_get.replies import DirectGetResponse, DirectGetStatus

SILENT = DirectGetResponse()
NOT_FOUND = DirectGetResponse(DirectGetStatus(404, "Message Not Found"))
MESSAGE = StoredMessage("s", 5, "2026-11-21T05:04:14Z", b"", b"")


class Reader(SingleMessageReader):
    """The second Direct Get fails or has no response; the leader responds after it was sent."""

    def __init__(
        self,
        first: DirectGetResponse,
        second: NatsSourceError | None,
        leader: NatsSourceError | None,
    ) -> None:
        no_server: Any = None
        super().__init__(no_server, "S")
        self.first, self.second, self.leader = first, second, leader
        self.sent = 0
        self.repeated = asyncio.Event()

    async def _direct_get(self, request: SingleRequest) -> DirectGetResponse:
        self.sent += 1
        if self.sent == 1:
            return self.first
        self.repeated.set()
        if self.second is not None:
            raise self.second
        await asyncio.sleep(60)
        return SILENT

    async def _leader_message(self, request: SingleRequest) -> StoredMessage:
        await self.repeated.wait()
        await asyncio.sleep(0.01)
        if self.leader is not None:
            raise self.leader
        return MESSAGE


async def read(reader: Reader) -> StoredMessage:
    request = SingleRequest({"seq": 5}, None, True, None, None)
    return await asyncio.wait_for(reader.read(request), 5)


@pytest.mark.parametrize("first", [SILENT, NOT_FOUND], ids=["silent", "404"])
async def test_leader_response_counts_while_direct_get_waits(
    first: DirectGetResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_RETRY_PAUSE", 0)
    assert await read(Reader(first, None, None)) == MESSAGE


@pytest.mark.parametrize("second", [ConnectError("lost"), PermissionDeniedError("denied")])
async def test_404_counts_although_later_direct_get_fails(
    second: NatsSourceError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_RETRY_PAUSE", 0)
    with pytest.raises(MessageNotFoundError, match="the leader could not be queried: denied"):
        await read(Reader(NOT_FOUND, second, PermissionDeniedError("denied")))


@pytest.mark.parametrize(
    ("patterns", "literals", "filters"),
    [
        (set(), {"a", "b"}, ("a", "b")),
        ({"a.*"}, {"a.x", "b"}, ("a.*", "b")),
        ({"a.*", "a.>", "b.*"}, {"a.x.y", "b.x"}, ("a.>", "b.*")),
        ({"a.*", "*.b"}, {"c"}, ()),
        ({">"}, set(), ()),
        ({">", "a.*"}, {"b"}, ()),
    ],
)
def test_filters_of_consumer_do_not_overlap(
    patterns: set[str], literals: set[str], filters: tuple[str, ...]
) -> None:
    assert _disjoint_filters(patterns, literals) == filters


def test_timestamps_of_page_are_those_of_single_messages() -> None:
    times = [
        0,
        1,
        10**8,
        10**9,
        600 * 10**9,
        864_000 * 10**9,
        1_795_237_454_100_000_000,
        9 * 10**18,
    ]
    page = encode_deliveries("S", [Delivery("s", 1, time, b"", b"") for time in times])
    assert [message.time for message in stored_messages(page)] == list(map(rfc3339, times))
