"""Reads an object store, with read-after-write (ADR-53, "Object Store"); objects' meta messages.

An object's bytes are messages on a chunk subject with a random last token. The meta message is sent
after them. It contains that token and the number, size and SHA-256 digest of the chunks. It is a
JSON object on the object's own subject, which keeps one message only (roll-up). So an object is
created atomically, and the old object stays complete until the new one exists.

- **Reads return what was written.** The meta message is read from the stream leader, once it has
  reached ``min_last_seq``. The chunks are stored before their meta message. So they are the range
  before it, read by an ordered consumer that waits for a lagging replica and never ends early.
- **Returned objects are complete.** Number, size and digest are compared with the meta message; a
  difference is an error. An object that is replaced during the read is read again.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from nats_stream_source.connection.control_line import encoded_name
from nats_stream_source.errors import (
    BadObjectInfoError,
    BucketNotFoundError,
    ObjectDamagedError,
    ObjectIsLinkError,
    ObjectNotFoundError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage, missing_messages
from nats_stream_source.jetstream.leader import leader_message, wait_for_last_seq
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import validate_bucket
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.wire.consumer.deliveries import Deliveries

CHUNK_SIZE = 128 * 1024

_DIGEST = "SHA-256="

_READ_ATTEMPTS = 5  # reads of an object that is replaced during the read


def chunk_subject(bucket: str, nuid: str) -> str:
    """The subject of one object's chunks; ``>`` for the chunks of all objects."""
    return f"$O.{bucket}.C.{nuid}"


def meta_subject(bucket: str, name: str) -> str:
    """The subject of an object's meta message. The name is encoded because any name is valid."""
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def all_meta_subject(bucket: str) -> str:
    """The subject of all meta messages."""
    return f"$O.{bucket}.M.>"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Meta data of an object, as in its meta message.

    Attributes:
        bucket, name: the store and the object's name.
        nuid: the last token of the subject of its chunks.
        size: bytes. ``chunks``: number of messages.
        digest: ``SHA-256=`` and the digest in Base64; empty for links and deleted objects.
        sequence: of the meta message, the highest of the object. Pass it as ``min_last_seq`` to
            read what was written (ADR-53, "Object Store").
        modified_ns: time at which the stream stored the meta message, nanoseconds since 1970, UTC;
            0 in the result of :meth:`ObjectStore.put`, because a PubAck does not contain it.
        deleted: the object was deleted; only its meta message exists.
        description, headers, metadata: set by the user.
        link: bucket and name of the target of a link; the name is empty for a whole bucket.
        chunk_size: bytes of each chunk except the last.
    """

    bucket: str
    name: str
    nuid: str = ""
    size: int = 0
    chunks: int = 0
    digest: str = ""
    sequence: int = 0
    modified_ns: int = 0
    deleted: bool = False
    description: str = ""
    headers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    link: tuple[str, str] | None = None
    chunk_size: int | None = None

    def encoded(self) -> bytes:
        """The payload of the meta message. Its time and sequence are set by the server."""
        options: dict[str, Any] = {}
        if self.link is not None:
            bucket, name = self.link
            options["link"] = {"bucket": bucket, "name": name} if name else {"bucket": bucket}
        if self.chunk_size is not None:
            options["max_chunk_size"] = self.chunk_size
        fields: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "headers": {name: list(values) for name, values in self.headers.items()},
            "metadata": dict(self.metadata),
            "options": options,
        }
        fields = {name: value for name, value in fields.items() if value or name == "name"}
        fields |= {"bucket": self.bucket, "nuid": self.nuid, "size": self.size}
        fields |= {"chunks": self.chunks, "digest": self.digest, "deleted": self.deleted}
        return json.dumps(fields).encode()

    @classmethod
    def parse(cls, data: bytes, sequence: int, modified_ns: int) -> ObjectInfo:
        """Parse the payload of a meta message; BadObjectInfoError if it is invalid."""
        try:
            raw = json.loads(data)
            options = raw.get("options") or {}
            link = options.get("link")
            return cls(
                bucket=_string(raw["bucket"]),
                name=_string(raw["name"]),
                nuid=_subject_token(raw.get("nuid")),
                size=_count(raw.get("size")),
                chunks=_count(raw.get("chunks")),
                digest=_string(raw.get("digest")),
                sequence=sequence,
                modified_ns=modified_ns,
                deleted=bool(raw.get("deleted")),
                description=_string(raw.get("description")),
                headers={
                    name: [value] if isinstance(value, str) else list(value)
                    for name, value in (raw.get("headers") or {}).items()
                },
                metadata=dict(raw.get("metadata") or {}),
                link=(_string(link["bucket"]), _string(link.get("name"))) if link else None,
                chunk_size=_count(options.get("max_chunk_size")) or None,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadObjectInfoError(
                f"could not parse the object meta message at sequence {sequence}: {error!r}; write "
                f"the object again"
            ) from None

    @classmethod
    def of(cls, message: StoredMessage) -> ObjectInfo:
        """Create from the stored meta message."""
        return cls.parse(message.data, message.seq, nanoseconds(message.time))


def _string(value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value or ""


def _subject_token(value: object) -> str:
    # Chunks are purged and read by this token: a wildcard would select the chunks of all objects.
    if {".", "*", ">", " "} & set(text := _string(value)):
        raise TypeError(f"{text!r} is not a subject token")
    return text


def _count(value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a non-negative integer")
    return value


class Digest:
    """Number, size and SHA-256 of the chunks that were written or read."""

    def __init__(self) -> None:
        self.chunks = 0
        self.size = 0
        self._sha256 = hashlib.sha256()

    def add(self, chunk: bytes) -> None:
        """Add the next chunk."""
        self.chunks += 1
        self.size += len(chunk)
        self._sha256.update(chunk)

    @property
    def text(self) -> str:
        """``SHA-256=`` and the digest in URL-safe Base64."""
        return _DIGEST + base64.urlsafe_b64encode(self._sha256.digest()).decode()

    def verify(self, info: ObjectInfo) -> None:
        """Compare with the meta message.

        Raises:
            ObjectDamagedError: number, size or digest differ.
            BadObjectInfoError: the meta message's digest is not a SHA-256 digest.
        """
        label = f"object {info.name!r} of store {info.bucket!r}"
        if (self.chunks, self.size) != (info.chunks, info.size):
            raise ObjectDamagedError(
                f"could not read {label}: observed {self.size} bytes in {self.chunks} chunks, "
                f"expected {info.size} in {info.chunks}, chunks were deleted or aged out; write "
                f"the object again"
            )
        algorithm, encoded = info.digest[: len(_DIGEST)], info.digest[len(_DIGEST) :]
        try:
            # Some clients omit the padding.
            expected = base64.urlsafe_b64decode(
                encoded.rstrip("=") + "=" * (-len(encoded.rstrip("=")) % 4)
            )
        except (binascii.Error, ValueError):
            expected = b""
        if algorithm.upper() != _DIGEST or len(expected) != self._sha256.digest_size:
            raise BadObjectInfoError(
                f"could not verify {label}: {info.digest!r} is not a SHA-256 digest; write the "
                f"object again"
            )
        if expected != self._sha256.digest():
            raise ObjectDamagedError(
                f"could not read {label}: its bytes do not have the digest {info.digest}; write "
                f"the object again"
            )


class ObjectReader:
    """Reads one object store over one connection.

    In addition to the errors that they list, all methods raise BucketNotFoundError;
    MinLastSequenceError (412, 10180) if the stream does not reach ``min_last_seq`` within
    ``request_timeout``; the errors of :class:`JetStream`. Reads of many messages raise the errors
    of :class:`OrderedReader`.
    """

    def __init__(self, jetstream: JetStream, bucket: str) -> None:
        self.jetstream = jetstream
        self.bucket = validate_bucket(bucket)
        self.stream = f"OBJ_{bucket}"
        self._connection = SharedConnection(jetstream.connection)

    async def info(
        self, name: str, *, min_last_seq: int | None = None, deleted: bool = False
    ) -> ObjectInfo:
        """An object's meta data.

        Args:
            name: the object's name.
            min_last_seq: the sequence that the stream must have reached (ADR-53).
            deleted: also return that of a deleted object.

        Raises:
            ObjectNotFoundError: the object does not exist, or was deleted.
        """
        try:
            with encoded_name("object", name):
                message = await leader_message(
                    self.jetstream,
                    self.stream,
                    min_last_seq=min_last_seq,
                    last_by_subj=meta_subject(self.bucket, name),
                )
        except StreamNotFoundError as error:
            raise self._bucket_not_found(error) from None
        info = ObjectInfo.of(message) if message is not None else None
        if info is None or (info.deleted and not deleted):
            state = "was deleted from" if info is not None else "is not in"
            raise ObjectNotFoundError(
                f"could not read object: {name!r} {state} store {self.bucket!r}"
            )
        return info

    async def get(self, name: str, *, min_last_seq: int | None = None) -> bytes:
        """An object's bytes; a link to an object is followed once.

        Raises:
            ObjectNotFoundError: the object does not exist, or was deleted.
            ObjectDamagedError: number, size or digest of its chunks differ from the meta message.
            ObjectIsLinkError: a link to a whole store, or to another link.
        """
        info = await self.info(name, min_last_seq=min_last_seq)
        if info.link is not None:
            return await self._get_link_target(info)
        for _ in range(_READ_ATTEMPTS):
            try:
                return b"".join([chunk async for chunk in self.chunks(info)])
            except ObjectDamagedError:
                # The chunks of an object are removed after it was replaced.
                newer = await self.info(name, min_last_seq=min_last_seq)
                if newer.sequence == info.sequence:
                    raise
                info = newer
        return b"".join([chunk async for chunk in self.chunks(info)])

    async def chunks(self, info: ObjectInfo) -> AsyncGenerator[bytes, None]:
        """An object's bytes chunk by chunk, for objects that do not fit into memory.

        Raises:
            ObjectDamagedError: at the end; the chunks yielded before must not be used.
            ObjectIsLinkError: the object is a link.
        """
        if info.link is not None:
            raise ObjectIsLinkError(
                f"could not read the chunks of object {info.name!r}: it is a link to {info.link}; "
                f"read the target"
            )
        digest = Digest()
        if info.chunks:
            subject = chunk_subject(self.bucket, info.nuid)
            stream = await self._stream_info(info.sequence)
            # The range ends at a delivered message. Otherwise only a heartbeat would show the end.
            last = await self.jetstream.message(self.stream, last_by_subj=subject)
            end = last.seq if last is not None else info.sequence
            async with self._batches(stream, subject, 0, end) as batches:
                async for frames in batches:
                    for index in range(len(frames)):
                        chunk = frames.payload(index)
                        digest.add(chunk)
                        yield chunk
        digest.verify(info)

    async def list(
        self, *, min_last_seq: int | None = None, deleted: bool = False
    ) -> tuple[ObjectInfo, ...]:
        """All objects, ordered by sequence.

        Every object that exists at the call and is not deleted meanwhile is included.

        Args:
            min_last_seq: the sequence that the stream must have reached (ADR-53).
            deleted: include deleted objects.
        """
        infos = await self._list_objects(await self._stream_info(min_last_seq))
        return tuple(info for info in infos if deleted or not info.deleted)

    async def watch(
        self, *, min_last_seq: int | None = None, updates_only: bool = False
    ) -> AsyncGenerator[ObjectInfo | None, None]:
        """Yield all current objects, None once, and then every change, without an end.

        Deleted objects are included. Close the generator with ``aclose()``.
        """
        stream = await self._stream_info(min_last_seq)
        sent_sequences: dict[str, int] = {}
        if not updates_only:
            for info in await self._list_objects(stream):
                sent_sequences[info.name] = info.sequence
                yield info
        yield None
        async with self._batches(
            stream, all_meta_subject(self.bucket), stream.last_seq, ENDLESS
        ) as batches:
            async for frames in batches:
                for info in _object_infos(frames):
                    if info.sequence > sent_sequences.get(info.name, 0):
                        yield info

    async def _list_objects(self, stream: StreamInfo) -> Sequence[ObjectInfo]:
        meta = all_meta_subject(self.bucket)
        received: list[ObjectInfo] = []
        if stream.last_seq:
            async with self._batches(stream, meta, 0, stream.last_seq) as batches:
                async for frames in batches:
                    received += _object_infos(frames)
        if (await self.jetstream.stream_info(self.stream)).last_seq > stream.last_seq:
            seen = {meta_subject(self.bucket, info.name) for info in received}
            received += _object_infos(
                await missing_messages(self.jetstream, self.stream, [meta], seen)
            )
        # By name: an object may have been replaced during the read.
        infos = {info.name: info for info in received}
        return sorted(infos.values(), key=lambda info: info.sequence)

    async def _get_link_target(self, link: ObjectInfo) -> bytes:
        assert link.link is not None
        bucket, name = link.link
        if not name:
            raise ObjectIsLinkError(
                f"could not read object {link.name!r}: it is a link to the whole store {bucket!r}; "
                f"open that store"
            )
        target_store = ObjectReader(self.jetstream, bucket)
        target = await target_store.info(name)
        if target.link is not None:
            raise ObjectIsLinkError(
                f"could not read object {link.name!r}: it is a link to another link, {name!r}; "
                f"only one link is followed"
            )
        return await target_store.get(name)

    async def _stream_info(self, min_last_seq: int | None) -> StreamInfo:
        try:
            return await wait_for_last_seq(self.jetstream, self.stream, min_last_seq or 0)
        except StreamNotFoundError as error:
            raise self._bucket_not_found(error) from None

    def _batches(
        self, stream: StreamInfo, subject: str, start: int, end: int
    ) -> AbstractAsyncContextManager[AsyncGenerator[Deliveries, None]]:
        known = KnownStream.of(stream)
        request = RangeRequest(self.stream, known, start, end, (subject,), eager=end == ENDLESS)
        return contextlib.aclosing(OrderedReader(self._connection, request).batches())

    def _bucket_not_found(self, error: StreamNotFoundError) -> BucketNotFoundError:
        return BucketNotFoundError(
            f"object store {self.bucket!r} does not exist: {error}; check 'bucket'",
            error.code,
            error.err_code,
            settings=("bucket",),
        )


def _object_infos(frames: Deliveries) -> list[ObjectInfo]:
    return [
        ObjectInfo.parse(frames.payload(i), int(frames.stream_seq[i]), int(frames.time[i]))
        for i in range(len(frames))
    ]
