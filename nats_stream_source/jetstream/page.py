"""A page: a run of stored messages as they came from the server, for columns or as objects.

Nothing is made for a single message before :meth:`Page.messages` is asked for. Pages of two kinds
have the same face: what a Direct Get answered says what a message is in the server's header fields
(:class:`AnswerPage`), what an ordered consumer delivered says it in the subject and in the reply
(:class:`DeliveredPage`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.jetstream.api import StoredMessage
from nats_stream_source.jetstream.times import rfc3339
from nats_stream_source.wire.answer_columns import Answers, texts
from nats_stream_source.wire.columns import ack_tokens
from nats_stream_source.wire.frames import Frames

P = TypeVar("P", bound="Page")

_END = b"\r\n\r\n"
# What sets a field of a frozen class that has slots.
_SETTERS = [getattr(StoredMessage, field.name).__set__ for field in fields(StoredMessage)]


class Page(ABC):
    """Stored messages, ascending by sequence.

    Attributes:
        frames: the messages as received, for ``wire.columns``: ``payloads(page.frames)``.
        sequences: their stream sequences, int64.
    """

    __slots__ = ()

    frames: Frames
    sequences: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.frames)

    def __repr__(self) -> str:
        if not len(self):
            return "<Page empty>"
        return f"<Page {len(self)} messages, {self.sequences[0]}..{self.last_seq}>"

    @property
    def last_seq(self) -> int:
        """The sequence of the last message; 0 when there is none."""
        return int(self.sequences[-1]) if len(self) else 0

    @abstractmethod
    def subjects(self) -> list[str]:
        """The messages' subjects."""

    @abstractmethod
    def times(self) -> list[str]:
        """When the stream stored them: RFC 3339, as the server writes it."""

    @abstractmethod
    def part(self: P, begin: int, stop: int) -> P:
        """The messages ``begin`` to ``stop`` (positions, as in a slice)."""

    @abstractmethod
    def _own_ends(self) -> NDArray[np.int64]:
        """How many bytes of each header block are the publisher's, but for the empty line."""

    def through(self: P, end: int) -> P:
        """The messages up to the sequence ``end``."""
        if self.last_seq <= end:
            return self
        return self.part(0, int(np.searchsorted(self.sequences, end, side="right")))

    def messages(self) -> list[StoredMessage]:
        """The messages as objects."""
        frames = self.frames
        if not len(frames):
            return []
        first = int(frames.begin[0])
        data = bytes(frames.buffer[first : int(frames.stop[-1])])
        spans = zip(
            (frames.payload_begin - first).tolist(),
            (frames.payload_end - first).tolist(),
            strict=True,
        )
        payloads = [data[begin:end] for begin, end in spans]
        own = self._own_ends()
        headers: list[bytes] | repeat[bytes] = repeat(b"")
        if own.any():
            begins = frames.header_begin - first
            headers = [
                data[begin:end] + _END if begin < end else b""
                for begin, end in zip(begins.tolist(), (begins + own).tolist(), strict=True)
            ]
        sequences = self.sequences.tolist()
        return _stored(self.subjects(), sequences, self.times(), payloads, headers)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AnswerPage(Page):
    """The messages that one Direct Get answered.

    Attributes:
        answers: what the server says of each.
    """

    answers: Answers

    @property
    def frames(self) -> Frames:  # type: ignore[override]
        """The messages as received."""
        return self.answers.frames

    @property
    def sequences(self) -> NDArray[np.int64]:  # type: ignore[override]
        """Their stream sequences."""
        return self.answers.sequences

    def subjects(self) -> list[str]:
        """As :meth:`Page.subjects`."""
        return texts(self.frames, self.answers.subject_spans)

    def times(self) -> list[str]:
        """As :meth:`Page.times`."""
        return texts(self.frames, self.answers.time_spans)

    def part(self, begin: int, stop: int) -> AnswerPage:
        """As :meth:`Page.part`."""
        return AnswerPage(self.answers[begin:stop])

    def _own_ends(self) -> NDArray[np.int64]:
        return self.answers.own_ends


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DeliveredPage(Page):
    """The messages that an ordered consumer delivered."""

    delivered: Frames

    @property
    def frames(self) -> Frames:  # type: ignore[override]
        """The messages as received."""
        return self.delivered

    @property
    def sequences(self) -> NDArray[np.int64]:  # type: ignore[override]
        """Their stream sequences."""
        return ack_tokens(self.delivered).stream_seq

    def subjects(self) -> list[str]:
        """As :meth:`Page.subjects`."""
        return texts(self.delivered, (self.delivered.subject_begin, self.delivered.subject_end))

    def times(self) -> list[str]:
        """As :meth:`Page.times`."""
        return [rfc3339(when) for when in ack_tokens(self.delivered).timestamp_ns.tolist()]

    def part(self, begin: int, stop: int) -> DeliveredPage:
        """As :meth:`Page.part`."""
        return DeliveredPage(self.delivered.select(slice(begin, stop)))

    def _own_ends(self) -> NDArray[np.int64]:
        # The block of a delivery is the publisher's own, to its end.
        own = self.delivered.payload_begin - self.delivered.header_begin - len(_END)
        clipped: NDArray[np.int64] = np.maximum(own, 0)
        return clipped


def _stored(*columns: Iterable[Any]) -> list[StoredMessage]:
    """One message for each row of the columns, which are the class's fields.

    Column by column: the ``__init__`` of a frozen dataclass takes nearly twice as long, and there
    is nothing larger in :meth:`DirectGet.batch` than to make these objects.
    """
    subjects, *_ = columns
    made = [StoredMessage.__new__(StoredMessage) for _ in subjects]
    for setter, column in zip(_SETTERS, columns, strict=True):
        deque(map(setter, made, column), maxlen=0)
    return made
