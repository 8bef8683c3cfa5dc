"""Direct Get without a server: which response of a single read counts, timestamps."""

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
from nats_stream_source.jetstream.direct_get.readers import SingleMessageReader, SingleRequest
from nats_stream_source.jetstream.direct_get.request import stored_messages
from nats_stream_source.jetstream.times import rfc3339
from nats_stream_source.wire.consumer.deliveries import Delivery, encode_deliveries
from nats_stream_source.wire.direct_get.replies import DirectGetResponse, DirectGetStatus

NOT_FOUND = DirectGetResponse(DirectGetStatus(404, "Message Not Found"))


class Reader(SingleMessageReader):
    """Nothing is found; the second Direct Get fails, and after it the leader denies the request."""

    def __init__(self, second: NatsSourceError) -> None:
        no_server: Any = None
        super().__init__(no_server, "S")
        self.second = second
        self.sent = 0
        self.repeated = asyncio.Event()

    async def _direct_get(self, request: SingleRequest) -> DirectGetResponse:
        self.sent += 1
        if self.sent == 1:
            return NOT_FOUND
        self.repeated.set()
        raise self.second

    async def _leader_message(self, request: SingleRequest) -> StoredMessage:
        await self.repeated.wait()
        await asyncio.sleep(0.01)
        raise PermissionDeniedError("denied")


@pytest.mark.parametrize("second", [ConnectError("lost"), PermissionDeniedError("denied")])
async def test_404_counts_although_later_direct_get_fails(
    second: NatsSourceError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_RETRY_PAUSE", 0)
    request = SingleRequest({"seq": 5}, None, True, None, None)
    with pytest.raises(MessageNotFoundError, match="the leader could not be queried: denied"):
        await asyncio.wait_for(Reader(second).read(request), 5)


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
