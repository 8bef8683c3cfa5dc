"""From frames to Arrow columns: subjects, payloads, header blocks.

No Python object is made for a message (``wire/arrow.py``). The numbers in the reply subjects stand
in ``wire/acks.py``.
"""

from __future__ import annotations

import pyarrow as pa

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.acks import AckTokens, ack_tokens, is_delivery, with_acks
from nats_stream_source.wire.arrow import in_order, slices
from nats_stream_source.wire.frames import Frames
from nats_stream_source.wire.layout import bytes_at

__all__ = [
    "AckTokens",
    "ack_tokens",
    "header_blocks",
    "is_delivery",
    "payloads",
    "subjects",
    "with_acks",
]


def subjects(frames: Frames, *, after: str = "", replace: bool = False) -> pa.Array:
    """The subjects: ``pa.string()``, empty for control frames.

    Args:
        after: a prefix that every subject has; what follows it is given.
        replace: what is not UTF-8 becomes U+FFFD.

    Raises:
        ProtocolError: a subject is not UTF-8, without ``replace``.
        ValueError: a subject does not begin with ``after``.
    """
    frames = in_order(frames)
    prefix = after.encode()
    if prefix:
        begin = frames.subject_begin
        fits = (frames.subject_end - begin >= len(prefix)).all()
        if not fits or bytes_at(frames.buffer, begin, len(prefix)).tobytes() != prefix * len(
            frames
        ):
            raise ValueError(f"a subject does not begin with {after!r}")
    begin = frames.subject_begin + len(prefix)
    raw = slices(frames.buffer, begin, frames.subject_end, pa.binary())
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        if replace:
            return pa.array([one.decode(errors="replace") for one in raw.to_pylist()], pa.string())
        for subject in raw.to_pylist():
            try:
                subject.decode()
            except UnicodeDecodeError:
                raise ProtocolError(f"the subject {subject!r} is not UTF-8") from None
        raise


def payloads(frames: Frames) -> pa.Array:
    """The payloads without their header blocks: ``pa.binary()``."""
    frames = in_order(frames)
    return slices(frames.buffer, frames.payload_begin, frames.payload_end, pa.binary())


def header_blocks(frames: Frames) -> pa.Array:
    """The header blocks, see ``wire/headers.py``: ``pa.binary()``, ``b""`` for MSG."""
    frames = in_order(frames)
    return slices(frames.buffer, frames.header_begin, frames.payload_begin, pa.binary())
