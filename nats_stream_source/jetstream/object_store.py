"""An object store: large values in chunks, with read-after-write (ADR-53, "Object Store").

What is on the wire is what NATS's own clients have (ADR-20; see ``object_info``), so any of them
may write what is read here, and the other way round. What is done here:

- **Reads see what was written.** The meta message comes from the stream's leader, once that has
  reached ``min_last_seq``. The chunks lie before their meta message, so they are the range before
  it, read by an ordered consumer that waits where a replica lags and never ends short.
- **What is returned is whole.** Number, size and digest are compared with the meta message; a
  difference is an error. An object that is replaced while it is read is read anew.
- **Writes.** Chunks with many PubAcks under way, then the meta message, then the old object's
  chunks are removed. A write that fails before the meta message was sent leaves nothing behind.
  The meta message says which one it takes the place of: of two writers at once the later one then
  knows whose chunks are to be removed.
- **Account imports and domains** (ADR-19): writes go below the API prefix as requests do. The
  document calls the first token ``$OBJ``, and that is what servers map by themselves in a domain;
  the subjects of object stores begin with ``$O``, which has to be mapped (:data:`MAPPING`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nats.nuid import NUID

from nats_stream_source.errors import (
    AckLostError,
    AckTimeoutError,
    ApiError,
    BadObjectInfoError,
    BucketExistsError,
    BucketNotFoundError,
    ConfigurationError,
    NatsSourceError,
    NoStreamError,
    ObjectDamagedError,
    ObjectIsLinkError,
    ObjectNotFoundError,
    StreamNotFoundError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.link import SharedLink
from nats_stream_source.jetstream.object_info import (
    CHUNK_SIZE,
    Digest,
    ObjectInfo,
    all_meta,
    chunk_subject,
    meta_subject,
    store_stream,
)
from nats_stream_source.jetstream.object_write import Data, write_chunks
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.pub_ack import (
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    ROLLUP,
    PubAck,
)
from nats_stream_source.jetstream.publish import Publisher
from nats_stream_source.jetstream.range_request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.read_after_write import leader_message, reached
from nats_stream_source.jetstream.subjects import (
    DEFAULT_API_PREFIX,
    check_bucket,
    is_literal,
    write_subject,
)
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.acks import ack_tokens
from nats_stream_source.wire.frames import Frames

MAPPING = 'mappings: { "$JS.<domain>.API.$O.>": "$O.>" }'
"""What the configuration of a domain's servers, or their account, needs for writes from outside."""

log = field_logger(__name__)

_REPLACED = 5  # how often an object that is replaced while it is read is read anew
_WRITERS = 20  # how often a writer tries anew when another one was faster
_PAUSE = 0.01  # seconds, more each time


class _Present(NamedTuple):
    """The meta message that an object has now: its sequence (0: none) and what it says."""

    seq: int
    info: ObjectInfo | None


class ObjectStore:
    """One object store over one connection.

    All methods raise, besides what they name: BucketNotFoundError; MinLastSequenceError (412,
    10180) when the stream does not reach ``min_last_seq`` within ``request_timeout``; the errors of
    :class:`JetStream`. Reads of many messages raise what ``ordered.OrderedReader`` does.
    """

    def __init__(self, jetstream: JetStream, bucket: str) -> None:
        self.jetstream = jetstream
        self.bucket = check_bucket(bucket)
        self.stream = store_stream(bucket)
        self._link = SharedLink(jetstream.connection)
        self._nuid = NUID()

    def __repr__(self) -> str:
        return f"<ObjectStore {self.bucket}>"

    @classmethod
    async def create(cls, jetstream: JetStream, bucket: str, **config: Any) -> ObjectStore:
        """Create a store; ``config`` is more of the stream's configuration (``num_replicas``, …).

        Raises:
            BucketExistsError: there is one with another configuration.
        """
        store = cls(jetstream, bucket)
        wanted = {
            "name": store.stream,
            "subjects": [chunk_subject(bucket, ">"), all_meta(bucket)],
            "discard": "new",
            "allow_rollup_hdrs": True,
            "allow_direct": True,
            **config,
        }
        try:
            await jetstream.call(f"STREAM.CREATE.{store.stream}", wanted)
        except ApiError as error:
            if error.err_code != BucketExistsError.err_code:
                raise
            raise BucketExistsError(
                f"the object store {bucket!r} exists with another configuration ({error})"
            ) from None
        return store

    # -- reading --------------------------------------------------------------------------------

    async def info(
        self, name: str, *, min_last_seq: int | None = None, deleted: bool = False
    ) -> ObjectInfo:
        """An object's meta data.

        Args:
            min_last_seq: the least sequence that the stream must have reached (ADR-53).
            deleted: return that of a deleted object, too.

        Raises:
            ObjectNotFoundError: there is none, or it was deleted.
        """
        try:
            message = await leader_message(
                self.jetstream,
                self.stream,
                min_last_seq=min_last_seq,
                last_by_subj=meta_subject(self.bucket, name),
            )
        except StreamNotFoundError as error:
            raise self._no_bucket(error) from None
        found = ObjectInfo.of(message) if message is not None else None
        if found is None or (found.deleted and not deleted):
            state = "was deleted from" if found is not None else "is not in"
            raise ObjectNotFoundError(f"object {name!r} {state} the store {self.bucket!r}")
        return found

    async def get(self, name: str, *, min_last_seq: int | None = None) -> bytes:
        """An object's bytes; a link to one object is followed, once.

        Raises:
            ObjectNotFoundError: there is none, or it was deleted.
            ObjectDamagedError: number, size or digest of its chunks are not as written.
            ObjectIsLinkError: a link to a whole store, or to another link.
        """
        found = await self.info(name, min_last_seq=min_last_seq)
        if found.link is not None:
            return await self._follow(found)
        for _ in range(_REPLACED):
            try:
                return b"".join([chunk async for chunk in self.chunks(found)])
            except ObjectDamagedError:
                # The old chunks are removed once a new object is there.
                newer = await self.info(name, min_last_seq=min_last_seq)
                if newer.sequence == found.sequence:
                    raise
                found = newer
        return b"".join([chunk async for chunk in self.chunks(found)])

    async def chunks(self, info: ObjectInfo) -> AsyncGenerator[bytes, None]:
        """An object's bytes, piece by piece, for what is too large to hold.

        Raises:
            ObjectDamagedError: at the end: what came before must not be used.
            ObjectIsLinkError: it is a link.
        """
        if info.link is not None:
            raise ObjectIsLinkError(f"object {info.name!r} is a link to {info.link}")
        digest = Digest()
        if info.chunks:
            subject = chunk_subject(self.bucket, info.nuid)
            stream = await self._stream_info(info.sequence)
            # The range ends at a message that comes, not at one for which a heartbeat must tell.
            last = await self.jetstream.message(self.stream, last_by_subj=subject)
            request = RangeRequest(
                stream=self.stream,
                created=stream.created,
                start=0,
                end=last.seq if last is not None else info.sequence,
                filters=(subject,),
            )
            async with contextlib.aclosing(self._read(request)) as batches:
                async for frames in batches:
                    for index in range(len(frames)):
                        chunk = frames.payload(index)
                        digest.add(chunk)
                        yield chunk
        digest.check(info)

    async def list(
        self, *, min_last_seq: int | None = None, deleted: bool = False
    ) -> tuple[ObjectInfo, ...]:
        """All objects, in the order of their sequences.

        Every object that is there when this is called, and not deleted meanwhile, is in it.

        Args:
            min_last_seq: the least sequence that the stream must have reached (ADR-53).
            deleted: include deleted ones.
        """
        found = await self._list(await self._stream_info(min_last_seq))
        return tuple(one for one in found if deleted or not one.deleted)

    async def watch(
        self, *, min_last_seq: int | None = None, updates_only: bool = False
    ) -> AsyncGenerator[ObjectInfo | None, None]:
        """All objects as they are, None once, and from there on every change; without an end.

        Deleted ones are included. Close it with ``aclose()``.
        """
        stream = await self._stream_info(min_last_seq)
        shown: dict[str, int] = {}
        if not updates_only:
            for info in await self._list(stream):
                shown[info.name] = info.sequence
                yield info
        yield None
        request = RangeRequest(
            stream=self.stream,
            created=stream.created,
            start=stream.last_seq,
            end=ENDLESS,
            filters=(all_meta(self.bucket),),
            eager=True,
        )
        async with contextlib.aclosing(self._read(request)) as batches:
            async for frames in batches:
                for info in _infos(frames):
                    if info.sequence > shown.get(info.name, 0):
                        yield info

    async def _list(self, stream: StreamInfo) -> Sequence[ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        request = RangeRequest(
            stream=self.stream,
            created=stream.created,
            start=0,
            end=stream.last_seq,
            filters=(all_meta(self.bucket),),
        )
        if stream.last_seq:
            async with contextlib.aclosing(self._read(request)) as batches:
                async for frames in batches:
                    found |= {meta_subject(self.bucket, one.name): one for one in _infos(frames)}
        if (await self.jetstream.stream_info(self.stream)).last_seq > stream.last_seq:
            # An object that was replaced before its turn came is beyond the range now.
            present = await self.jetstream.subjects(self.stream, all_meta(self.bucket))
            for subject in sorted(filter(is_literal, present - found.keys())):
                message = await self.jetstream.message(self.stream, last_by_subj=subject)
                if message is not None:
                    found[subject] = ObjectInfo.of(message)
        return sorted(found.values(), key=lambda one: one.sequence)

    async def _follow(self, link: ObjectInfo) -> bytes:
        assert link.link is not None
        bucket, name = link.link
        if not name:
            raise ObjectIsLinkError(f"object {link.name!r} is a link to the whole store {bucket!r}")
        other = ObjectStore(self.jetstream, bucket)
        target = await other.info(name)
        if target.link is not None:
            raise ObjectIsLinkError(f"object {link.name!r} is a link to another link, {name!r}")
        return await other.get(name)

    async def _stream_info(self, min_last_seq: int | None) -> StreamInfo:
        try:
            return await reached(self.jetstream, self.stream, min_last_seq or 0)
        except StreamNotFoundError as error:
            raise self._no_bucket(error) from None

    def _read(self, request: RangeRequest) -> AsyncGenerator[Frames, None]:
        return OrderedReader(self._link, request).batches()

    def _no_bucket(self, error: StreamNotFoundError) -> BucketNotFoundError:
        return BucketNotFoundError(
            f"the object store {self.bucket!r} does not exist ({error})", error.code, error.err_code
        )

    # -- writing --------------------------------------------------------------------------------

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
        """Write an object, in place of the one of this name.

        Args:
            data: bytes, a binary file (read in a thread) or an async iterable of bytes.
            chunk_size: bytes of a message; at most the server's ``max_payload``.

        Returns:
            Its meta data. ``sequence`` is that of the meta message: readers who name it see this
            object, or a later one.

        Raises:
            MessageTooLargeError, StreamFullError, PublishError: refused; nothing is left behind.
            AckLostError, AckTimeoutError: it may be written or not. What is left of one that is
                not are chunks that nothing names.
        """
        if not name or chunk_size < 1:
            raise ConfigurationError("an object has a name, and chunks of one byte or more")
        info = ObjectInfo(
            bucket=self.bucket,
            name=name,
            nuid=self._nuid.next().decode(),
            description=description,
            headers=headers or {},
            metadata=metadata or {},
            chunk_size=chunk_size,
        )
        old = await self._present(name)
        sent = False
        try:
            subject = self._write_to(chunk_subject(self.bucket, info.nuid))
            digest = await write_chunks(self.jetstream.connection, subject, data, chunk_size)
            info = replace(info, size=digest.size, chunks=digest.chunks, digest=digest.text)
            sent = True
            ack, old = await self._replace(info, old)
        except BaseException as error:
            # Once the meta message may be there, its chunks must stay.
            unknown = isinstance(error, AckLostError | AckTimeoutError | asyncio.CancelledError)
            if not (sent and unknown):
                await self._clean_up(info)
            if isinstance(error, NoStreamError):
                raise self._no_way(error) from None
            raise
        if old.info is not None and not old.info.deleted:
            await self._clean_up(old.info)
        return replace(info, sequence=ack.seq)

    async def delete(self, name: str) -> ObjectInfo:
        """Delete an object: its chunks go, and its meta message says so. Again is no error.

        Returns:
            The meta data as they are now, with the sequence of the message that says so.

        Raises:
            ObjectNotFoundError: there never was one.
        """
        for attempt in range(_WRITERS):
            old = await self.info(name, deleted=True)
            if old.deleted:
                return old
            info = replace(old, deleted=True, size=0, chunks=0, digest="")
            try:
                ack = await self._write_meta(info, old.sequence)
                break
            except NoStreamError as error:
                raise self._no_way(error) from None
            except WrongLastSequenceError:
                if attempt + 1 == _WRITERS:
                    raise
        await self._clean_up(old)
        return replace(info, sequence=ack.seq, modified_ns=0)

    async def _present(self, name: str) -> _Present:
        try:
            message = await self.jetstream.message(
                self.stream, last_by_subj=meta_subject(self.bucket, name)
            )
        except StreamNotFoundError as error:
            raise self._no_bucket(error) from None
        if message is None:
            return _Present(0, None)
        try:
            return _Present(message.seq, ObjectInfo.of(message))
        except BadObjectInfoError as error:
            log.warning("replaced, and its chunks stay", store=self, object=name, error=error)
            return _Present(message.seq, None)

    async def _replace(self, info: ObjectInfo, old: _Present) -> tuple[PubAck, _Present]:
        """Write the meta message; its PubAck, and what it took the place of."""
        for attempt in range(_WRITERS):
            try:
                return await self._write_meta(info, old.seq), old
            except WrongLastSequenceError:
                await asyncio.sleep(attempt * _PAUSE)
                old = await self._present(info.name)
        return await self._write_meta(info, None), old  # more writers than one can keep up with

    async def _write_meta(self, info: ObjectInfo, expected: int | None) -> PubAck:
        publisher = self.jetstream.connection.companion(Publisher)
        subject = self._write_to(meta_subject(self.bucket, info.name))
        headers = {ROLLUP: "sub"}
        if expected is not None:
            headers[EXPECTED_LAST_SUBJECT_SEQUENCE] = str(expected)
        return await publisher.publish(subject, info.encoded(), headers=headers)

    async def _clean_up(self, info: ObjectInfo) -> None:
        """Remove an object's chunks; where that fails they take room, and nothing reads them."""
        if not info.nuid:
            return  # of a link
        request = {"filter": chunk_subject(self.bucket, info.nuid)}
        try:
            await self.jetstream.call(f"STREAM.PURGE.{self.stream}", request)
        except NatsSourceError as error:
            log.warning("chunks not removed", store=self, object=info.name, error=error)

    def _no_way(self, error: NoStreamError) -> NoStreamError:
        if self.jetstream.connection.settings.api_prefix == DEFAULT_API_PREFIX:
            return error
        return NoStreamError(
            f"{error}. The store {self.bucket!r} is there, but writes to '$O.>' do not get through "
            f"the prefix: an account's import needs '$O.>' to '<prefix>.$O.>', a domain needs "
            f"{MAPPING}",
            error.code,
            error.err_code,
        )

    def _write_to(self, subject: str) -> str:
        return write_subject(subject, self.jetstream.connection.settings.api_prefix)


def _infos(frames: Frames) -> list[ObjectInfo]:
    tokens = ack_tokens(frames)
    return [
        ObjectInfo.parse(frames.payload(i), int(tokens.stream_seq[i]), int(tokens.timestamp_ns[i]))
        for i in range(len(frames))
    ]
