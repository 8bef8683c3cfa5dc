"""The response to one Direct Get request (ADR-31, "Response Format"): a series of replies.

``Nats-Last-Sequence`` links the messages of a batch: a message that was lost in transit shows at
the next one, or at the EOB. :class:`DirectGetResponse` keeps the replies before the first gap.
``wire/direct_get/parse.py`` parses a single reply, ``wire/direct_get/columns.py`` many at once.
"""

from __future__ import annotations

import numpy as np

from nats_stream_source.wire.direct_get.columns import ReplyColumns, read_replies
from nats_stream_source.wire.direct_get.parse import DirectGetStatus, StoredReply, read_status
from nats_stream_source.wire.framing.frames import Frames

__all__ = ["DirectGetResponse", "DirectGetStatus", "ReplyColumns", "StoredReply"]

EOB, NOT_FOUND, BAD_REQUEST, MIN_LAST_SEQUENCE, TOO_MANY = 204, 404, 408, 412, 413


class DirectGetResponse:
    """The replies to one request, up to the first gap.

    Attributes:
        status: the status that ended the response; None before that.
        broken: a message is missing; ``replies`` were received before it.
        last_seq: the sequence of the last message; 0 before the first one.
    """

    __slots__ = ("_parts", "broken", "last_seq", "status")

    def __init__(self) -> None:
        self._parts: list[ReplyColumns] = []
        self.status: DirectGetStatus | None = None
        self.broken = False
        self.last_seq = 0

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def replies(self) -> ReplyColumns:
        """The messages, without a gap."""
        if len(self._parts) != 1:
            self._parts = [ReplyColumns.join(self._parts)]
        return self._parts[0]

    @property
    def is_batch(self) -> bool:
        """Whether the first message has ``Nats-Last-Sequence``, as all messages of a batch do."""
        return bool(self._parts) and bool(self._parts[0].previous[0] >= 0)

    @property
    def ended(self) -> bool:
        """Whether later frames do not belong to the response."""
        return self.broken or self.status is not None

    def feed(self, frames: Frames) -> int:
        """Receive the next frames; return how many of them, from the first, are in ``replies``.

        Raises:
            ProtocolError: a frame is neither a message with the server's fields nor a status.
        """
        if self.ended or not len(frames):
            return 0
        replies = read_replies(frames)
        parsed = len(replies)
        expected = np.empty_like(replies.sequences)
        expected[:1] = self.last_seq
        expected[1:] = replies.sequences[:-1]
        missing = (replies.previous >= 0) & (replies.previous != expected)
        if missing.any():
            self.broken = True
            replies = replies[: int(missing.argmax())]
        if len(replies):
            self._parts.append(replies)
            self.last_seq = int(replies.sequences[-1])
        if not self.broken and parsed < len(frames):
            self.status = status = read_status(frames.header(parsed))
            self.broken = status.code == EOB and status.last_seq != self.last_seq
        return len(replies)
