"""ADR-8's Entry: one revision of a key, from a stored message or from a consumer's frames.

A message is a marker only with ``KV-Operation: DEL | PURGE`` or the server's
``Nats-Marker-Reason``. Every other message is a value, in all read paths
(``wire/headers.operations``).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.errors import (
    ConfigurationError,
    MessageNotFoundError,
    PermissionDeniedError,
    ProtocolError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_get.client import DirectGet
from nats_stream_source.jetstream.kv.bucket import Bucket
from nats_stream_source.jetstream.kv.codec import OnUndecodable, SkippedEntries
from nats_stream_source.jetstream.subjects import stream_of
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.wire.columns import header_blocks, payloads, subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.headers import Headers, operations, parse_headers

Operation = Literal["PUT", "DEL", "PURGE"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MAX_REVISION = (1 << 64) - 1  # stream sequences are unsigned 64-bit integers


@dataclass(frozen=True, slots=True)
class Entry:
    """One revision of a key.

    Attributes:
        bucket, key: the bucket and the key.
        value: the value; empty for markers and when only metadata was requested.
        revision: the stream sequence.
        created_ns: time at which the stream stored it, nanoseconds since 1970, UTC.
        delta: number of newer entries still to be delivered when this one was: in a key's history 0
            for the latest, 1 for the one before it. 0 for a single get.
        operation: ``PUT``, ``DEL`` or ``PURGE``.
        header_block: the message's raw headers; see :attr:`headers`.
    """

    bucket: str
    key: str
    value: bytes = field(repr=False)
    revision: int
    created_ns: int
    delta: int
    operation: Operation
    header_block: bytes = field(default=b"", repr=False)

    @property
    def created(self) -> datetime:
        """Time at which the stream stored it, UTC, floored to microseconds."""
        return _EPOCH + timedelta(microseconds=self.created_ns // 1000)

    @property
    def is_marker(self) -> bool:
        """Whether the entry marks the key as deleted, purged or expired."""
        return self.operation != "PUT"

    @property
    def headers(self) -> Headers | None:
        """The message's headers; None without headers; ProtocolError if they are malformed."""
        return parse_headers(self.header_block) if self.header_block else None


def validate_revision(
    action: str, name: str, revision: object, *, first: int = 0, optional: bool = False
) -> None:
    """Raise ConfigurationError if ``revision`` is not an integer from ``first`` to 2**64 - 1.

    It becomes a header of a write or a field of a request. None would make a conditional write
    unconditional, and the server would parse or ignore what other types turn into.

    Args:
        action: the failed operation, for the error: ``write key 'a'``.
        name: the argument's name.
        optional: whether None is valid.
    """
    if optional and revision is None:
        return
    if type(revision) is not int or not first <= revision <= _MAX_REVISION:
        raise ConfigurationError(
            f"could not {action}: {name} is {revision!r}, expected an integer from {first} to "
            f"2^64-1; change {name}",
            settings=(name,),
        )


def decoded_entry(entry: Entry, bucket: Bucket, skipped: SkippedEntries | None) -> Entry | None:
    """The entry with its key and value decoded by the bucket's codec; None if it is skipped.

    UndecodableError if it is not decodable and may not be skipped: ``skipped``, which counts it, is
    None.
    """
    codec = bucket.codec
    if not codec:
        return entry
    key = codec.decoded_key(entry.key)
    value = codec.decoded_value(entry.value)  # a marker and an entry without a value have b""
    if key is not None and value is not None:
        return replace(entry, key=key, value=value)
    if skipped is None or codec.on_undecodable is OnUndecodable.FAIL:
        raise codec.undecodable(bucket.name, entry.key, entry.revision)
    skipped.add(bucket.name, entry.key, entry.revision)
    return None


def entry_from_message(message: StoredMessage, bucket: Bucket) -> Entry:
    """The entry of a stored message of the bucket, as it is stored."""
    operation: Operation = "PUT"
    if message.headers:
        operation = operations(pa.array([message.headers], pa.binary()))[0].as_py()
    return Entry(
        bucket=bucket.name,
        key=message.subject[len(bucket.prefix) :],
        value=message.data if operation == "PUT" else b"",
        revision=message.seq,
        created_ns=nanoseconds(message.time),
        delta=0,
        operation=operation,
        header_block=message.headers,
    )


def keys_from_frames(frames: Frames, bucket: Bucket) -> pa.Array:
    """The keys of deliveries as ``pa.string()``; ProtocolError for a subject of another bucket."""
    names = subjects(frames)
    if len(names) and not pc.all(pc.starts_with(names, bucket.prefix)).as_py():
        raise ProtocolError(
            f"could not read bucket {bucket.name!r}: observed a delivery on another subject, "
            f"expected the prefix {bucket.prefix!r}"
        )
    return pc.utf8_slice_codeunits(names, len(bucket.prefix))


def entries_from_frames(frames: Deliveries, bucket: Bucket) -> list[Entry]:
    """The entries of deliveries of the bucket's stream, in order, as they are stored."""
    if not len(frames):
        return []
    blocks = header_blocks(frames)
    columns = (
        keys_from_frames(frames, bucket).to_pylist(),
        payloads(frames).to_pylist(),
        frames.stream_seq.tolist(),
        frames.time.tolist(),
        frames.pending.tolist(),
        operations(blocks).to_pylist(),
        blocks.to_pylist(),
    )
    name = bucket.name
    return [
        Entry(name, key, value if operation == "PUT" else b"", seq, time, delta, operation, block)
        for key, value, seq, time, delta, operation, block in zip(*columns, strict=True)
    ]


async def last_entry_after(
    jetstream: JetStream, bucket: Bucket, key: str, conflict: WrongLastSequenceError
) -> Entry | None:
    """The key's last entry, not older than the one with which a conditional write is in conflict.

    The leader usually includes its sequence in the conflict, which a Direct Get must then reach
    (ADR-53). Without it, the leader's message is new enough; a user who may not request it reads
    the one of a replica, and a stale one costs another attempt.
    """
    # The stream that stores the writes, or its mirror if only that is reachable from here.
    stream = bucket.stream if bucket.write_api_prefix else stream_of(bucket.write_bucket)
    subject = bucket.prefix + key
    if conflict.last_seq is None:
        with contextlib.suppress(PermissionDeniedError):
            found = await jetstream.message(stream, last_by_subj=subject)
            return None if found is None else entry_from_message(found, bucket)
    with contextlib.suppress(MessageNotFoundError):
        direct_get = DirectGet(jetstream, stream)
        message = await direct_get.last(subject, min_last_seq=conflict.last_seq)
        return entry_from_message(message, bucket)
    return None
