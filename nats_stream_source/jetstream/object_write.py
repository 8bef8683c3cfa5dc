"""The chunks of an object on their way to the stream: cut, digested, and each awaited."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from typing import Protocol

from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.object_info import Digest
from nats_stream_source.jetstream.publish import PubAck, Publisher

_UNDER_WAY = 8 << 20  # bytes of chunks whose PubAcks are awaited at once


class Readable(Protocol):
    """A binary file."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; none at the end."""


Data = bytes | bytearray | memoryview | Readable | AsyncIterable[bytes]


async def write_chunks(connection: Connection, subject: str, data: Data, size: int) -> Digest:
    """Publish ``data`` on ``subject`` in chunks of ``size`` bytes, and wait for all PubAcks.

    Returns:
        Their number, size and digest.

    Raises: as :meth:`Publisher.send` and its futures. Nothing is under way any more then.
    """
    publisher = connection.companion(Publisher)
    window = max(1, _UNDER_WAY // size)
    digest = Digest()
    under_way: deque[asyncio.Future[PubAck]] = deque()
    try:
        async for piece in _pieces(data, size):
            digest.add(piece)
            under_way.append(await publisher.send(subject, piece))
            if len(under_way) >= window:
                await under_way.popleft()
        while under_way:
            await under_way.popleft()
    finally:
        # After a failure: a chunk that is stored later would be there when all were removed.
        await asyncio.gather(*under_way, return_exceptions=True)
    return digest


async def _pieces(data: Data, size: int) -> AsyncIterator[bytes]:
    """``data`` in pieces of ``size`` bytes, the last one shorter."""
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), size):
            yield bytes(view[begin : begin + size])
        return
    rest = bytearray()
    async for part in data if isinstance(data, AsyncIterable) else _read_file(data, size):
        rest += part
        whole = len(rest) - len(rest) % size
        for begin in range(0, whole, size):
            yield bytes(rest[begin : begin + size])
        del rest[:whole]
    if rest:
        yield bytes(rest)


async def _read_file(file: Readable, size: int) -> AsyncIterator[bytes]:
    while part := await asyncio.to_thread(file.read, size):
        yield part
