"""Upload of an object's chunks: splits the data, computes the digest, and awaits every PubAck.

The chunks of an object are in the order of its bytes. A stream that has too many messages to store
rejects some of them (429) and may store those behind. The stored ones are deleted then, and all
from the rejected one on are sent again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from typing import Protocol

from nats_stream_source.errors import PublishError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.object_store.info import Digest
from nats_stream_source.jetstream.publish.pub_ack import PubAck, too_many_messages
from nats_stream_source.jetstream.publish.publisher import Publisher

_MAX_UNACKED_BYTES = 8 << 20  # bytes of chunks that await their PubAck


class Readable(Protocol):
    """A binary file."""

    def read(self, size: int, /) -> bytes:
        """Read at most ``size`` bytes; empty at the end."""


_Pending = deque[tuple[bytes, asyncio.Future[PubAck]]]

Data = bytes | bytearray | memoryview | Readable | AsyncIterable[bytes]


async def write_chunks(jetstream: JetStream, subject: str, data: Data, size: int) -> Digest:
    """Publish ``data`` on ``subject`` in chunks of ``size`` bytes, and wait for all PubAcks.

    Returns:
        The number, size and digest of the chunks.

    Raises: as :meth:`Publisher.send` and its futures. No chunk is awaiting its PubAck then.
    """
    publisher = jetstream.connection.service(Publisher)
    window = max(1, _MAX_UNACKED_BYTES // size)
    digest = Digest()
    pending = _Pending()
    try:
        async for chunk in _split_chunks(data, size):
            digest.add(chunk)
            pending.append((chunk, await publisher.send(subject, chunk)))
            if len(pending) >= window:
                await _confirm_first(jetstream, subject, pending)
        while pending:
            await _confirm_first(jetstream, subject, pending)
    finally:
        # After a failure, a chunk that is stored later would remain after the chunks were purged.
        await _outcomes(pending)
    return digest


async def _confirm_first(jetstream: JetStream, subject: str, pending: _Pending) -> None:
    """Wait for the PubAck of the first pending chunk; send the pending ones again after a 429."""
    try:
        await pending[0][1]
    except PublishError as error:
        if not too_many_messages(error):
            raise
    else:
        pending.popleft()
        return
    for outcome in await _outcomes(pending):
        if isinstance(outcome, PubAck):
            await jetstream.call(f"STREAM.MSG.DELETE.{outcome.stream}", {"seq": outcome.seq})
        elif not too_many_messages(outcome):
            raise outcome
    while pending:
        await jetstream.connection.service(Publisher).publish(subject, pending[0][0])
        pending.popleft()


async def _outcomes(pending: _Pending) -> list[PubAck | BaseException]:
    return await asyncio.gather(*(ack for _, ack in pending), return_exceptions=True)


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
