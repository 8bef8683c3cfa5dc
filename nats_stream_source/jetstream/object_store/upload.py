"""Upload of an object's chunks: splits the data, computes the digest, and awaits every PubAck."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from typing import Protocol

from nats_stream_source.connection.connection import Connection
from nats_stream_source.jetstream.object_store.info import Digest
from nats_stream_source.jetstream.publish.publisher import PubAck, Publisher

_MAX_UNACKED_BYTES = 8 << 20  # bytes of chunks that await their PubAck


class Readable(Protocol):
    """A binary file."""

    def read(self, size: int, /) -> bytes:
        """Read at most ``size`` bytes; empty at the end."""


Data = bytes | bytearray | memoryview | Readable | AsyncIterable[bytes]


async def write_chunks(connection: Connection, subject: str, data: Data, size: int) -> Digest:
    """Publish ``data`` on ``subject`` in chunks of ``size`` bytes, and wait for all PubAcks.

    Returns:
        The number, size and digest of the chunks.

    Raises: as :meth:`Publisher.send` and its futures. No chunk is awaiting its PubAck then.
    """
    publisher = connection.service(Publisher)
    window = max(1, _MAX_UNACKED_BYTES // size)
    digest = Digest()
    pending_acks: deque[asyncio.Future[PubAck]] = deque()
    try:
        async for chunk in _split_chunks(data, size):
            digest.add(chunk)
            pending_acks.append(await publisher.send(subject, chunk))
            if len(pending_acks) >= window:
                await pending_acks.popleft()
        while pending_acks:
            await pending_acks.popleft()
    finally:
        # After a failure, a chunk that is stored later would remain after the chunks were purged.
        await asyncio.gather(*pending_acks, return_exceptions=True)
    return digest


async def _split_chunks(data: Data, size: int) -> AsyncIterator[bytes]:
    """Split ``data`` into chunks of ``size`` bytes; the last one may be shorter."""
    if isinstance(data, bytes | bytearray | memoryview):
        view = memoryview(data).cast("B")
        for start in range(0, len(view), size):
            yield bytes(view[start : start + size])
        return
    remainder = bytearray()
    async for block in data if isinstance(data, AsyncIterable) else _read_file(data, size):
        remainder += block
        complete = len(remainder) - len(remainder) % size
        for start in range(0, complete, size):
            yield bytes(remainder[start : start + size])
        del remainder[:complete]
    if remainder:
        yield bytes(remainder)


async def _read_file(file: Readable, size: int) -> AsyncIterator[bytes]:
    while block := await asyncio.to_thread(file.read, size):
        yield block
