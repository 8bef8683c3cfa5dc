"""Encode messages to publish: the bytes of many PUB and HPUB frames from Arrow columns.

A frame is one protocol message of a client (docs.nats.io, "Client protocol")::

    PUB <subject> <reply> <#bytes>\\r\\n<payload>\\r\\n
    HPUB <subject> <reply> <#header bytes> <#total bytes>\\r\\n<headers><payload>\\r\\n

Theory of operation. ``binary_join_element_wise`` of Arrow joins the parts of each row into one
element of a new array. The data buffer of that array is the frames, one after the other, ready to
be sent; its offsets are their borders. So no Python object is created for a message. The reply
subject of a frame is a prefix and the message's *serial*, its number on this connection; the serial
is how ``pub_acks`` finds the message of a PubAck.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_BINARY = pa.binary()
_FRAME_BYTES = 64  # more than command, sizes, serial and CRLFs of a frame have
MAX_BYTES = (1 << 31) - 1
"""Maximum size of the frames that are encoded at once: the offsets of Arrow's arrays are int32."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MessageColumns:
    """Messages to publish, in order: columns of one length.

    Attributes:
        subjects: ``pa.binary()`` or ``pa.string()``, without nulls, each a valid subject.
        payloads: ``pa.binary()`` or ``pa.string()``, without nulls.
        headers: ``pa.binary()``: header blocks (``headers.py``), null for a message without
            headers; None if no message has headers.
    """

    subjects: pa.Array
    payloads: pa.Array
    headers: pa.Array | None = None

    def __len__(self) -> int:
        return len(self.subjects)

    def slice(self, start: int, stop: int) -> MessageColumns:
        """The messages ``[start, stop)``; shares memory."""
        headers = None if self.headers is None else self.headers[start:stop]
        return MessageColumns(self.subjects[start:stop], self.payloads[start:stop], headers)

    def with_headers(self, block: bytes) -> MessageColumns:
        """The same messages, each with the header block ``block``."""
        return MessageColumns(self.subjects, self.payloads, pa.array([block] * len(self), _BINARY))

    def subject(self, i: int) -> str:
        """The subject of message ``i``."""
        subject = self.subjects[i].as_py()
        return subject if isinstance(subject, str) else subject.decode(errors="replace")

    def sizes(self) -> NDArray[np.int64]:
        """The size of each message as a server counts it: header block and payload, in bytes."""
        sizes = _lengths(self.payloads)
        return sizes if self.headers is None else sizes + _lengths(self.headers)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EncodedFrames:
    """The frames of messages with the serials ``first_serial``, ``first_serial + 1``, ….

    Attributes:
        buffer: the bytes of all frames.
        ends: where each frame ends in ``buffer``; it begins where the one before it ends.
    """

    first_serial: int
    buffer: memoryview
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return self.ends.size

    def nbytes(self, start: int, stop: int) -> int:
        """The size of the frames ``[start, stop)``."""
        return self._border(stop) - self._border(start)

    def line_lengths(self, messages: MessageColumns) -> NDArray[np.int64]:
        """What the line of each of ``messages`` has after its command, in bytes."""
        lengths = np.diff(self.ends, prepend=0) - messages.sizes() - len("PUB \r\n\r\n")
        if messages.headers is not None:  # HPUB
            lengths -= messages.headers.is_valid().to_numpy(zero_copy_only=False)
        return lengths

    def bytes_of(self, start: int, stop: int) -> memoryview:
        """The bytes of the frames ``[start, stop)``."""
        return self.buffer[self._border(start) : self._border(stop)]

    def _border(self, i: int) -> int:
        return int(self.ends[i - 1]) if i else 0


def encode(
    messages: MessageColumns,
    reply_prefix: str,
    first_serial: int,
    *,
    numbers: NDArray[np.int64] | None = None,
    reply_suffixes: pa.Array | None = None,
) -> EncodedFrames:
    """Encode ``messages``, in order.

    Args:
        reply_prefix: the reply subject of a message is this, its number and its suffix.
        first_serial: the serial of the first message.
        numbers: the number of each message in its reply subject. Default: the serials.
        reply_suffixes: ``pa.binary()``. Default: no suffixes.

    Raises:
        OverflowError: the frames have more than :data:`MAX_BYTES` bytes.
    """
    n = len(messages)
    subjects = messages.subjects.cast(_BINARY)
    payloads = messages.payloads.cast(_BINARY)
    total = messages.sizes()
    fixed = n * (len(reply_prefix) + _FRAME_BYTES)
    if reply_suffixes is not None:
        fixed += int(_lengths(reply_suffixes).sum())
    if (size := int(total.sum()) + int(_lengths(subjects).sum()) + fixed) > MAX_BYTES:
        raise OverflowError(
            f"could not encode {n} messages: the frames have up to {size} bytes, expected at most "
            f"{MAX_BYTES}; publish fewer messages at once"
        )
    if numbers is None:
        numbers = np.arange(first_serial, first_serial + n)
    reply = [_decimal(numbers)] if reply_suffixes is None else [_decimal(numbers), reply_suffixes]
    before_reply, crlf = scalar(f" {reply_prefix}".encode()), scalar(b"\r\n")
    space, empty = scalar(b" "), scalar(b"")
    headers, command, block = messages.headers, scalar(b"PUB "), list[pa.Array]()
    sizes = [_decimal(total)]
    if headers is not None and headers.null_count < n:
        command = scalar(b"HPUB ")
        header_size = pc.binary_join_element_wise(_decimal(_lengths(headers)), empty, space)
        if headers.null_count:
            without = headers.is_null()
            command = pc.if_else(without, scalar(b"PUB "), command)
            header_size = pc.if_else(without, empty, header_size)
            headers = headers.fill_null(b"")
        sizes, block = [header_size, *sizes], [headers]
    frames = pc.binary_join_element_wise(
        command, subjects, before_reply, *reply, space, *sizes, crlf, *block, payloads, crlf, empty
    )
    offsets = np.frombuffer(frames.buffers()[1], np.int32, n + 1, frames.offset * 4)
    data = frames.buffers()[2]
    buffer = memoryview(b"" if data is None else data)[: int(offsets[-1])]
    return EncodedFrames(first_serial, buffer, offsets[1:].astype(np.int64))


def scalar(value: bytes) -> pa.Scalar:
    """Bytes that are the same in each row."""
    return pa.scalar(value, _BINARY)


def _decimal(numbers: NDArray[np.int64]) -> pa.Array:
    return pa.array(numbers).cast(pa.string()).cast(_BINARY)


def _lengths(column: pa.Array) -> NDArray[np.int64]:
    lengths = pc.binary_length(column).fill_null(0)
    result: NDArray[np.int64] = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    return result
