"""ADR-8's Entry: one revision of a key, out of a stored message or out of a consumer's frames.

Only ``KV-Operation: DEL | PURGE`` and the server's own ``Nats-Marker-Reason`` make a marker; every
other message is a value, the same in every way of reading (``wire/headers.operations``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Literal, cast

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.errors import ProtocolError
from nats_stream_source.jetstream.api import StoredMessage
from nats_stream_source.jetstream.bucket import Bucket
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.wire.columns import ack_tokens, header_blocks, payloads, subjects
from nats_stream_source.wire.frames import Frames
from nats_stream_source.wire.headers import Headers, operations, parse_headers

Operation = Literal["PUT", "DEL", "PURGE"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class Entry:
    """One revision of a key.

    Attributes:
        bucket, key: where it is.
        value: empty for markers, and where only metadata was asked for.
        revision: its stream sequence.
        created_ns: when the stream stored it, nanoseconds since 1970, UTC.
        delta: how many newer entries of what is read were still to come when it was delivered: in
            a key's history 0 for the latest, 1 for the one before. 0 for a single get.
        operation: ``PUT``, ``DEL`` or ``PURGE``.
        header_block: the message's headers as they were sent; see :attr:`headers`.
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
        """When the stream stored it, in UTC, floored to microseconds."""
        return _EPOCH + timedelta(microseconds=self.created_ns // 1000)

    @property
    def is_marker(self) -> bool:
        """Whether the entry says that the key was deleted, purged or expired."""
        return self.operation != "PUT"

    @property
    def headers(self) -> Headers | None:
        """The message's headers, None where it has none; ProtocolError where they are malformed."""
        return parse_headers(self.header_block) if self.header_block else None


def entry_of(message: StoredMessage, bucket: Bucket) -> Entry:
    """The entry that a stored message of the bucket is."""
    operation = _operation(message.headers)
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


def _operation(block: bytes) -> Operation:
    if not block:
        return "PUT"
    return cast("Operation", operations(pa.array([block], pa.binary()))[0].as_py())


def keys_of(frames: Frames, bucket: Bucket) -> pa.Array:
    """The keys of deliveries of the bucket's stream: ``pa.string()``.

    Raises:
        ProtocolError: a subject is not one of the bucket's.
    """
    names = subjects(frames)
    if len(names) and not pc.all(pc.starts_with(names, bucket.prefix)).as_py():
        raise ProtocolError(
            f"a subject of bucket {bucket.name!r} does not begin with {bucket.prefix!r}"
        )
    return pc.utf8_slice_codeunits(names, len(bucket.prefix))


def entries_of(frames: Frames, bucket: Bucket) -> list[Entry]:
    """The entries that deliveries of the bucket's stream are, in their order."""
    if not len(frames):
        return []
    tokens = ack_tokens(frames)
    blocks = header_blocks(frames)
    columns = (
        keys_of(frames, bucket).to_pylist(),
        payloads(frames).to_pylist(),
        tokens.stream_seq.tolist(),
        tokens.timestamp_ns.tolist(),
        tokens.pending.tolist(),
        operations(blocks).to_pylist(),
        blocks.to_pylist(),
    )
    name = bucket.name
    return [
        Entry(name, key, value if operation == "PUT" else b"", seq, time, delta, operation, block)
        for key, value, seq, time, delta, operation, block in zip(*columns, strict=True)
    ]
