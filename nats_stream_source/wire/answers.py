"""Direct Get's answers (ADR-31, "Response Format"), as far as they are whole.

``Nats-Last-Sequence`` chains a batch: a message that was lost on the way shows at the next one, or
at the EOB. :class:`Chain` keeps what is whole. What stands in a single answer:
``wire/answer_text.py``; how many are read at once: ``wire/answer_columns.py``.
"""

from __future__ import annotations

import numpy as np

from nats_stream_source.wire.answer_columns import Answers, read_answers
from nats_stream_source.wire.answer_text import Answer, Status, read_status
from nats_stream_source.wire.frames import Frames

__all__ = ["Answer", "Answers", "Chain", "Status"]

EOB, NOT_FOUND, BAD_REQUEST, MIN_LAST_SEQUENCE, TOO_MANY, NOBODY = 204, 404, 408, 412, 413, 503


class Chain:
    """The answers to one request as far as they are whole.

    Attributes:
        status: what ended them, None while nothing has.
        broken: a message is missing; what is in ``answers`` came before it.
        last_seq: the sequence of the last message, 0 before there is one.
    """

    __slots__ = ("_parts", "broken", "last_seq", "status")

    def __init__(self) -> None:
        self._parts: list[Answers] = []
        self.status: Status | None = None
        self.broken = False
        self.last_seq = 0

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __repr__(self) -> str:
        end = "broken" if self.broken else self.status or "open"
        return f"<Chain {len(self)} answers, {end}>"

    @property
    def answers(self) -> Answers:
        """The messages, each the next one of the one before."""
        if len(self._parts) != 1:
            self._parts = [Answers.join(self._parts)]
        return self._parts[0]

    @property
    def numbered(self) -> bool:
        """Whether the first message says what came before it; all of a batch do."""
        return bool(self._parts) and bool(self._parts[0].previous[0] >= 0)

    @property
    def over(self) -> bool:
        """Nothing that comes now can belong to it."""
        return self.broken or self.status is not None

    def take(self, frames: Frames) -> int:
        """Take frames that arrived next; how many of them, from the first, are now in ``answers``.

        Raises:
            ProtocolError: a frame is neither a message with the server's fields nor a status.
        """
        if self.over or not len(frames):
            return 0
        answers = read_answers(frames)
        taken = len(answers)
        before = np.empty_like(answers.sequences)
        before[:1] = self.last_seq
        before[1:] = answers.sequences[:-1]
        missing = (answers.previous >= 0) & (answers.previous != before)
        if missing.any():
            self.broken = True
            answers = answers[: int(missing.argmax())]
        if len(answers):
            self._parts.append(answers)
            self.last_seq = int(answers.sequences[-1])
        if not self.broken and taken < len(frames):
            self.status = status = read_status(frames.header(taken))
            self.broken = status.code == EOB and status.last_seq != self.last_seq
        return len(answers)
