"""PubAcks as columns: which messages a stream has stored, from the received frames.

Theory of operation. The PubAcks of one stream differ in the sequence only::

    {"stream":"ORDERS","seq":17}

So the bytes before the number are *learned* from the first PubAck, which is parsed as JSON, and
compared for all frames at once. The number is parsed for all frames at once, too. A frame that
differs (an error, a duplicate, another stream, a status) is left to the caller, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.wire.ascii_integers import bytes_at, numbers_between
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.table import FrameKind

_MIN_POSITION = 24  # numbers_between reads so many bytes before the end of a number
_AFTER_SEQ = b"}"
_SEQ = b'"seq":'


@dataclass(frozen=True, slots=True, eq=False)
class PubAckColumns:
    """The responses to messages, in the order in which they were received.

    Attributes:
        serial: the message's serial; -1 for a frame whose subject does not end with one.
        seq: the stream sequence; -1 for a frame that is not a PubAck of the learned form.
    """

    serial: NDArray[np.int64]
    seq: NDArray[np.int64]


def learn(payload: bytes) -> bytes:
    """The bytes before the sequence in the PubAcks of a stream, from one of them; empty if unusual.

    Args:
        payload: the bytes of a valid PubAck that is not a duplicate.
    """
    before, found, number = payload.rpartition(_SEQ)
    usual = number.endswith(_AFTER_SEQ) and number[:-1].isdigit()
    return before + found if found and usual else b""


def parse(frames: Frames, reply_prefix: bytes, learned: bytes) -> PubAckColumns:
    """Parse the PubAcks among ``frames``, which are received on ``reply_prefix`` and a serial.

    Args:
        learned: of :func:`learn`; empty: no frame is parsed as a PubAck.
    """
    serial = _numbers(frames, frames.subject_begin + len(reply_prefix), frames.subject_end)
    seq = np.full(len(frames), -1, np.int64)
    if learned:
        size = frames.payload_end - frames.payload_begin
        fits = (frames.kind == FrameKind.MSG) & (size >= len(learned) + 2)
        usual = frames.select(fits)
        begin = usual.payload_begin
        if len(usual):
            same = bytes_at(usual.buffer, begin, len(learned)) == np.void(learned)
            last = bytes_at(usual.buffer, usual.payload_end - 1, 1) == np.void(_AFTER_SEQ)
            numbers = _numbers(usual, begin + len(learned), usual.payload_end - 1)
            seq[fits] = np.where(same & last, numbers, -1)
    return PubAckColumns(serial, seq)


def _numbers(frames: Frames, begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    if begin.size and int(end.min()) < _MIN_POSITION:
        return np.array([_number(frames, *one) for one in zip(begin, end, strict=True)], np.int64)
    number, good = numbers_between(frames.buffer, begin, end)
    return np.where(good, number, -1)


def _number(frames: Frames, begin: int, end: int) -> int:
    token = bytes(frames.buffer[begin:end])
    return int(token) if token.isdigit() and len(token) <= 18 else -1
