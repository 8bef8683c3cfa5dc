"""Arrow columns from frames: subjects, payloads, header blocks.

No Python object is created for a single message (``wire/arrow_slices.py``). The numbers of the
reply subjects are in ``wire/ack_subject.py``.
"""

from __future__ import annotations

import pyarrow as pa

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.ack_subject import (
    AckTokens,
    ack_tokens,
    is_delivery,
    other_frames,
    with_acks,
)
from nats_stream_source.wire.arrow_slices import in_order, slices
from nats_stream_source.wire.frames import Frames

__all__ = [
    "AckTokens",
    "ack_tokens",
    "header_blocks",
    "is_delivery",
    "other_frames",
    "payloads",
    "subjects",
    "with_acks",
]


def subjects(frames: Frames, *, after: str = "", replace: bool = False) -> pa.Array:
    """Return the subjects: ``pa.string()``, empty for control frames.

    Args:
        after: a prefix of every subject; the returned subjects are without it.
        replace: replace bytes that are not UTF-8 by U+FFFD.

    Raises:
        ProtocolError: a subject is not UTF-8, without ``replace``.
        ValueError: a subject does not start with ``after``.
    """
    frames = in_order(frames)
    raw = slices(
        frames.buffer, frames.subject_begin, frames.subject_end, pa.binary(), after.encode()
    )
    try:
        return raw.cast(pa.string())
    except pa.ArrowInvalid:
        if replace:
            return pa.array(
                [subject.decode(errors="replace") for subject in raw.to_pylist()], pa.string()
            )
        for subject in raw.to_pylist():
            try:
                subject.decode()
            except UnicodeDecodeError:
                raise ProtocolError(f"invalid subject: {subject!r} is not UTF-8") from None
        raise


def payloads(frames: Frames) -> pa.Array:
    """Return the payloads, without header blocks: ``pa.binary()``."""
    frames = in_order(frames)
    return slices(frames.buffer, frames.payload_begin, frames.payload_end, pa.binary())


def header_blocks(frames: Frames) -> pa.Array:
    """Return the header blocks (``wire/headers.py``): ``pa.binary()``, ``b""`` for MSG."""
    frames = in_order(frames)
    return slices(frames.buffer, frames.header_begin, frames.payload_begin, pa.binary())
