"""Reads an object store, with read-after-write (ADR-53, "Object Store").

- **Reads return what was written.** The meta message is read from the stream leader, once it has
  reached ``min_last_seq``. The chunks are stored before their meta message. So they are the range
  before it, read by an ordered consumer that waits for a lagging replica and never ends early.
- **Returned objects are complete.** Number, size and digest are compared with the meta message; a
  difference is an error. An object that is replaced during the read is read again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager

from nats_stream_source.connection.control_line import encoded_name
from nats_stream_source.errors import (
    BucketNotFoundError,
    ObjectDamagedError,
    ObjectIsLinkError,
    ObjectNotFoundError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream, missing_messages
from nats_stream_source.jetstream.leader import leader_message, wait_for_last_seq
from nats_stream_source.jetstream.object_store.info import (
    Digest,
    ObjectInfo,
    all_meta_subject,
    chunk_subject,
    meta_subject,
    store_stream,
)
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import validate_bucket
from nats_stream_source.wire.consumer.deliveries import Deliveries

_READ_ATTEMPTS = 5  # reads of an object that is replaced during the read


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
        self.stream = store_stream(bucket)
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
