"""Arrow columns from frames: subjects, payloads, header blocks.

No Python object is created for a single message (``wire/arrow_slices.py``). The numbers of the
reply subjects are in ``wire/consumer/deliveries.py``.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.arrow_slices import bytes_at, slices
from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.frames import Frames, Some
from nats_stream_source.wire.headers import MARKER_STARTS, operations

_NOT_ASCII = 0x80  # the lowest such byte


def subjects(frames: Frames, *, after: str = "", replace: bool = False) -> pa.Array:
    """Return the subjects: ``pa.string()``, empty for control frames.

    Args:
        after: a prefix of every subject; the returned subjects are without it.
        replace: replace bytes that are not UTF-8 by U+FFFD.

    Raises:
        ProtocolError: a subject is not UTF-8, without ``replace``.
        ValueError: a subject does not start with ``after``.
    """
    raw = slices(
        frames.buffer, frames.subject_begin, frames.subject_end, pa.binary(), after.encode()
    )
    if _is_ascii(raw):
        return raw.view(pa.string())
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
                raise ProtocolError(
                    f"invalid subject: {after.encode() + subject!r} is not UTF-8; remove its "
                    f"messages: publish one with the headers 'Nats-Rollup: sub' and "
                    f"'Nats-TTL: 1s' to these bytes (docs/troubleshooting.md)"
                ) from None
        raise


def within(frames: Some, prefix: str) -> Some:
    """Return the frames whose subjects start with ``prefix``: ``frames`` itself if all do.

    The common case takes 3 ns a frame, a hundredth of the time that a reader needs for it.
    """
    start, width = prefix.encode(), len(prefix.encode())
    if not width or not len(frames):
        return frames
    long = frames.subject_end - frames.subject_begin >= width
    if not long.all():
        return within(frames.select(long), prefix)
    found = bytes_at(frames.buffer, frames.subject_begin, width)
    if found.tobytes() == start * len(frames):
        return frames
    rows = found.view(np.uint8).reshape(-1, width) == np.frombuffer(start, np.uint8)
    return frames.select(rows.all(axis=1))


def _is_ascii(values: pa.BinaryArray) -> bool:
    """Return whether all bytes are ASCII; a cast to string would search each value for others."""
    data = values.buffers()[2]
    return data is None or bool(np.frombuffer(data, np.uint8).max(initial=0) < _NOT_ASCII)


def payloads(frames: Frames) -> pa.Array:
    """Return the payloads, without header blocks: ``pa.binary()``."""
    return slices(frames.buffer, frames.payload_begin, frames.payload_end, pa.binary())


def entry_operations(frames: Frames) -> pa.Array | None:
    """Return the operations of entries of a KV bucket, as ``headers.operations``; None: all PUT.

    Most header blocks are not those of markers, and are not copied if the compiled scanner is
    selected (``wire/framing/scanner.py``).
    """
    if not (frames.payload_begin > frames.header_begin).any():
        return None
    rows = np.ones(len(frames), np.bool_)
    if scanner.selected() == "compiled":
        begin, end, found = frames.header_begin, frames.payload_begin, rows.view(np.uint8)
        scanner.compiled_slices.find_lines(frames.buffer, begin, end, *MARKER_STARTS, found)
    if not rows.any():
        return None
    marked = operations(header_blocks(frames.select(rows)))
    return pc.replace_with_mask(pa.repeat("PUT", len(frames)), pa.array(rows), marked)


def header_blocks(frames: Frames) -> pa.Array:
    """Return the header blocks (``wire/headers.py``): ``pa.binary()``, ``b""`` for MSG."""
    return slices(frames.buffer, frames.header_begin, frames.payload_begin, pa.binary())
