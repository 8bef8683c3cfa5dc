"""PubAcks as columns: which messages a stream has stored, from the received frames.

Theory of operation. The PubAcks of one stream differ in the sequence only::

    {"stream":"ORDERS","seq":17}

So the bytes before the number are *learned* from the first PubAck, which is parsed as JSON, and
compared for all frames at once. The number is parsed for all frames at once, too. A frame that
differs (an error, a duplicate, another stream, a status) is left to the caller, one by one.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.wire.arrow_slices import numbers, slices
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.framing.parse import FrameKind

_AFTER_SEQ = b"}"
_SEQ = b'"seq":'


def learn(payload: bytes) -> bytes:
    """The bytes before the sequence in a stream's PubAcks, from a valid one; empty if unusual."""
    before, found, number = payload.rpartition(_SEQ)
    usual = number.endswith(_AFTER_SEQ) and number[:-1].isdigit()
    return before + found if found and usual else b""


def parse(
    frames: Frames, reply_prefix: bytes, learned: bytes
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Parse the PubAcks among ``frames``, which are received on ``reply_prefix`` and a serial.

    Args:
        learned: of :func:`learn`; empty: no frame is parsed as a PubAck.

    Returns:
        the messages' serials, -1 for a frame whose subject does not end with one; the stream
        sequences, -1 for a frame that is not a PubAck of the learned form.
    """
    serial = numbers(frames.buffer, frames.subject_begin + len(reply_prefix), frames.subject_end)
    seq = np.full(len(frames), -1, np.int64)
    if learned:
        begin, end = frames.payload_begin, frames.payload_end
        payloads = slices(frames.buffer, begin, end, pa.binary())
        usual = pc.and_(pc.starts_with(payloads, learned), pc.ends_with(payloads, _AFTER_SEQ))
        fits = usual.to_numpy(zero_copy_only=False) & (frames.kind == FrameKind.MSG)
        seq[fits] = numbers(frames.buffer, begin[fits] + len(learned), end[fits] - 1)
    return serial, seq
