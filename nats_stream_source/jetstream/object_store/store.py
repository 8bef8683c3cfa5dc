"""An object store: large values in chunks, with read-after-write (ADR-53, "Object Store").

Messages have the format of NATS's own clients (ADR-20), so objects of any of them can be read here
and objects written here can be read by them. Reads are in ``reader.py``. Writes:

- The chunks are published with many pending PubAcks, then the meta message. Then the chunks of the
  old object are removed. A write that fails before the meta message was sent leaves nothing behind.
- The meta message expects the sequence of the meta message that it replaces: of two concurrent
  writers, the later one then finds out which chunks to remove.
- **Account imports and domains** (ADR-19): writes are sent below the API prefix, like requests. The
  document names the first token ``$OBJ``, and servers map that token automatically in a domain. The
  subjects of object stores start with ``$O``, which must be mapped (:data:`MAPPING`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from nats.nuid import NUID

from nats_stream_source.connection.control_line import encoded_name
from nats_stream_source.connection.settings import DEFAULT_API_PREFIX
from nats_stream_source.errors import (
    AckLostError,
    AckTimeoutError,
    ApiError,
    BadObjectInfoError,
    BucketExistsError,
    ConfigurationError,
    NatsSourceError,
    NoStreamError,
    StreamNotFoundError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.object_store.reader import (
    CHUNK_SIZE,
    Digest,
    ObjectInfo,
    ObjectReader,
    all_meta_subject,
    chunk_subject,
    meta_subject,
)
from nats_stream_source.jetstream.publish.pub_ack import (
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    ROLLUP,
    PubAck,
    no_ack_error,
)
from nats_stream_source.jetstream.publish.publisher import Publisher
from nats_stream_source.jetstream.subjects import write_subject
from nats_stream_source.logs import field_logger

MAPPING = 'mappings: { "$JS.<domain>.API.$O.>": "$O.>" }'
"""Required in the configuration of a domain's servers or account for writes from outside."""

log = field_logger(__name__)

_MAX_UNACKED_BYTES = 8 << 20  # of chunks
_WRITE_ATTEMPTS = 20  # writes of a meta message while concurrent writers replace it
_RETRY_INTERVAL = 0.01  # seconds, multiplied by the number of attempts


class Readable(Protocol):
    """A binary file."""

    def read(self, size: int, /) -> bytes:
        """Read at most ``size`` bytes; empty at the end."""


Data = bytes | bytearray | memoryview | Readable | AsyncIterable[bytes]


class ObjectStore(ObjectReader):
    """Reads and writes one object store over one connection.

    All methods raise the errors of :class:`ObjectReader`, in addition to those that they list.
    """

    def __init__(self, jetstream: JetStream, bucket: str) -> None:
        super().__init__(jetstream, bucket)
        self._nuid = NUID()
        self._acknowledges = False  # known at the first write

    @classmethod
    async def create(cls, jetstream: JetStream, bucket: str, **config: Any) -> ObjectStore:
        """Create a store; ``config`` adds stream configuration (``num_replicas``, …).

        Raises:
            BucketExistsError: the store exists with another configuration.
        """
        store = cls(jetstream, bucket)
        stream_config = {
            "name": store.stream,
            "subjects": [chunk_subject(bucket, ">"), all_meta_subject(bucket)],
            "discard": "new",
            "allow_rollup_hdrs": True,
            "allow_direct": True,
            **config,
        }
        try:
            await jetstream.call(f"STREAM.CREATE.{store.stream}", stream_config)
        except ApiError as error:
            if error.err_code != BucketExistsError.err_code:
                raise
            raise BucketExistsError(
                f"could not create object store {bucket!r}: it exists with another configuration "
                f"({error}); open it or change the configuration"
            ) from None
        return store

    async def put(
        self,
        name: str,
        data: Data,
        *,
        description: str = "",
        headers: Mapping[str, Sequence[str]] | None = None,
        metadata: Mapping[str, str] | None = None,
        chunk_size: int = CHUNK_SIZE,
    ) -> ObjectInfo:
        """Write an object; replace the one with the same name.

        Args:
            name: the object's name.
            data: bytes, a binary file (read in a thread) or an async iterable of bytes.
            description: a text, stored in the meta message.
            headers: headers of the object, stored in the meta message.
            metadata: further names and values, stored in the meta message.
            chunk_size: bytes of a message; at most the server's ``max_payload``.

        Returns:
            The object's meta data. ``sequence`` is that of the meta message: readers that pass it
                as ``min_last_seq`` read this object or a later one.

        Raises:
            ConfigurationError: an argument is invalid, or the stream has ``no_ack``.
            MessageTooLargeError, StreamFullError, PublishError: rejected; nothing is left behind.
            AckLostError, AckTimeoutError: unknown whether the object was written. If not, chunks
                that no meta message refers to remain.
        """
        if not name or chunk_size < 1:
            raise ConfigurationError(
                f"could not write object: name is {name!r} and chunk_size is {chunk_size}, "
                f"expected a name and chunk_size >= 1; change them"
            )
        info = ObjectInfo(
            bucket=self.bucket,
            name=name,
            nuid=self._nuid.next().decode(),
            description=description,
            headers=headers or {},
            metadata=metadata or {},
            chunk_size=chunk_size,
        )
        await self._verify_acknowledges()
        old = await self._current_meta(name)
        sent = False
        try:
            subject = self._write_subject(chunk_subject(self.bucket, info.nuid))
            digest = await self._write_chunks(subject, data, chunk_size)
            info = replace(info, size=digest.size, chunks=digest.chunks, digest=digest.text)
            sent = True
            ack, old = await self._replace_meta(info, old)
        except BaseException as error:
            # If the meta message may be stored, its chunks must stay.
            unknown = isinstance(error, AckLostError | AckTimeoutError | asyncio.CancelledError)
            if not (sent and unknown):
                await self._purge_chunks(info)
            if isinstance(error, NoStreamError):
                raise self._import_error(error) from None
            raise
        if not old.deleted:
            await self._purge_chunks(old)
        return replace(info, sequence=ack.seq)

    async def delete(self, name: str) -> ObjectInfo:
        """Delete an object: write a meta message that marks it as deleted, then remove its chunks.

        Deleting a deleted object is not an error.

        Returns:
            The current meta data, with the sequence of that meta message.

        Raises:
            ObjectNotFoundError: the object never existed.
            ConfigurationError: the stream has ``no_ack``.
        """
        await self._verify_acknowledges()
        found = await self.info(name, deleted=True)
        if found.deleted:
            return found
        info = replace(found, deleted=True, size=0, chunks=0, digest="")
        try:
            ack, old = await self._replace_meta(info, found)
        except NoStreamError as error:
            raise self._import_error(error) from None
        await self._purge_chunks(old)
        return replace(info, sequence=ack.seq, modified_ns=0)

    async def _verify_acknowledges(self) -> None:
        """Raise ConfigurationError if the stream stores messages without PubAcks."""
        if not self._acknowledges:
            if (await self._stream_info(None)).no_ack:
                raise no_ack_error(f"object store {self.bucket!r}")
            self._acknowledges = True

    async def _write_chunks(self, subject: str, data: Data, size: int) -> Digest:
        """Publish ``data`` in chunks of ``size`` bytes, and wait for all PubAcks."""
        publisher = self.jetstream.connection.service(Publisher)
        digest = Digest()
        pending: deque[asyncio.Future[PubAck]] = deque()
        try:
            async for chunk in _split_chunks(data, size):
                digest.add(chunk)
                pending.append(await publisher.send(subject, chunk))
                if len(pending) * size >= _MAX_UNACKED_BYTES:
                    await pending.popleft()
            while pending:
                await pending.popleft()
        finally:
            # After a failure, a chunk that is stored later would remain after the purge.
            await asyncio.gather(*pending, return_exceptions=True)
        return digest

    async def _current_meta(self, name: str) -> ObjectInfo:
        """The object's meta data; without chunks if it is missing or invalid."""
        try:
            with encoded_name("object", name):
                message = await self.jetstream.message(
                    self.stream, last_by_subj=meta_subject(self.bucket, name)
                )
        except StreamNotFoundError as error:
            raise self._bucket_not_found(error) from None
        if message is None:
            return ObjectInfo(self.bucket, name, deleted=True)
        try:
            return ObjectInfo.of(message)
        except BadObjectInfoError as error:
            log.warning(
                "replacing invalid object, its chunks stay",
                store=self.bucket,
                object=name,
                error=error,
            )
            return ObjectInfo(self.bucket, name, sequence=message.seq, deleted=True)

    async def _replace_meta(self, info: ObjectInfo, old: ObjectInfo) -> tuple[PubAck, ObjectInfo]:
        """Write the meta message; return its PubAck and the meta message that it replaced."""
        # Not `retry`: each attempt expects another sequence, and the last one expects none.
        for attempt in range(_WRITE_ATTEMPTS):
            try:
                return await self._write_meta(info, old.sequence), old
            except WrongLastSequenceError:
                await asyncio.sleep(attempt * _RETRY_INTERVAL)
                old = await self._current_meta(info.name)
        return await self._write_meta(info, None), old  # too many concurrent writers

    async def _write_meta(self, info: ObjectInfo, expected: int | None) -> PubAck:
        publisher = self.jetstream.connection.service(Publisher)
        subject = self._write_subject(meta_subject(self.bucket, info.name))
        headers = {ROLLUP: "sub"}
        if expected is not None:
            headers[EXPECTED_LAST_SUBJECT_SEQUENCE] = str(expected)
        with encoded_name("object", info.name):
            return await publisher.publish(subject, info.encoded(), headers=headers)

    async def _purge_chunks(self, info: ObjectInfo) -> None:
        """Remove an object's chunks. If that fails, they use space but are never read."""
        if not info.nuid:
            return  # a link
        request = {"filter": chunk_subject(self.bucket, info.nuid)}
        try:
            await self.jetstream.call(f"STREAM.PURGE.{self.stream}", request)
        except NatsSourceError as error:
            log.warning("could not remove chunks", store=self.bucket, object=info.name, error=error)

    def _import_error(self, error: NoStreamError) -> NoStreamError:
        if self.jetstream.connection.settings.api_prefix == DEFAULT_API_PREFIX:
            return error
        return NoStreamError(
            f"could not write to object store {self.bucket!r}: {error}; the store exists, but "
            f"writes to '$O.>' are not mapped below 'api_prefix': add an account import of "
            f"'$O.>' to '<prefix>.$O.>', or in a domain {MAPPING}",
            error.code,
            error.err_code,
            settings=("api_prefix",),
        )

    def _write_subject(self, subject: str) -> str:
        return write_subject(subject, self.jetstream.connection.settings.api_prefix)


async def _split_chunks(data: Data, size: int) -> AsyncIterator[bytes]:
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
