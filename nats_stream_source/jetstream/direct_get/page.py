"""A page: consecutive stored messages as received, read as columns or as objects.

A page of frames creates no object for a single message before ``messages`` is called. In a Direct
Get reply, the server's header fields describe the message (:class:`DirectGetPage`). In a delivery
of an ordered consumer, the subject and the reply subject describe it (:class:`ConsumerPage`). The
messages that the stream leader sends one by one are objects (:class:`ObjectPage`).
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
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.direct_get.columns import ReplyColumns, texts
from nats_stream_source.wire.framing.frames import Frames

P = TypeVar("P", bound="MessagePage")

_HEADER_END = b"\r\n\r\n"
# The slot descriptors of the frozen dataclass: they set a field without ``__init__``.
_FIELD_SETTERS = [getattr(StoredMessage, field.name).__set__ for field in fields(StoredMessage)]


class MessagePage(ABC):
    """Stored messages, ascending by sequence.

    Attributes:
        sequences: their stream sequences, int64.
    """

    __slots__ = ()

    sequences: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def last_seq(self) -> int:
        """The sequence of the last message; 0 for an empty page."""
        return int(self.sequences[-1]) if len(self) else 0

    @abstractmethod
    def subjects(self) -> list[str]:
        """The messages' subjects."""

    @abstractmethod
    def select(self: P, rows: slice | NDArray[np.bool_]) -> P:
        """The messages at some positions."""

    @abstractmethod
    def messages(self) -> list[StoredMessage]:
        """The messages as objects."""

    def up_to(self: P, seq: int) -> P:
        """The messages up to and including the sequence ``seq``."""
        if self.last_seq <= seq:
            return self
        return self.select(slice(0, int(np.searchsorted(self.sequences, seq, side="right"))))


class FramesPage(MessagePage):
    """Messages as they were received.

    Attributes:
        frames: the messages as received, for ``wire.columns``: ``payloads(page.frames)``.
    """

    __slots__ = ()

    frames: Frames

    @abstractmethod
    def times(self) -> list[str]:
        """The messages' timestamps: RFC 3339, as the server formats them."""

    @abstractmethod
    def _publisher_header_sizes(self) -> NDArray[np.int64]:
        """Bytes of each header block that the publisher wrote, without the empty line at its end.

        0 or less for a message without headers.
        """

    def messages(self) -> list[StoredMessage]:
        """As :meth:`MessagePage.messages`."""
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
        sizes = self._publisher_header_sizes()
        headers: list[bytes] | repeat[bytes] = repeat(b"")
        if sizes.any():
            begins = frames.header_begin - first
            headers = [
                data[begin:end] + _HEADER_END if begin < end else b""
                for begin, end in zip(begins.tolist(), (begins + sizes).tolist(), strict=True)
            ]
        sequences = self.sequences.tolist()
        return _stored_messages(self.subjects(), sequences, self.times(), payloads, headers)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DirectGetPage(FramesPage):
    """The messages of one Direct Get reply.

    Attributes:
        replies: the server's header fields of each message.
    """

    replies: ReplyColumns

    @property
    def frames(self) -> Frames:  # type: ignore[override]
        """The messages as received."""
        return self.replies.frames

    @property
    def sequences(self) -> NDArray[np.int64]:  # type: ignore[override]
        """The messages' stream sequences."""
        return self.replies.sequences

    def subjects(self) -> list[str]:
        """As :meth:`MessagePage.subjects`."""
        return texts(self.frames, self.replies.subject_spans)

    def times(self) -> list[str]:
        """As :meth:`FramesPage.times`."""
        return texts(self.frames, self.replies.time_spans)

    def select(self, rows: slice | NDArray[np.bool_]) -> DirectGetPage:
        """As :meth:`MessagePage.select`."""
        return DirectGetPage(self.replies.select(rows))

    def _publisher_header_sizes(self) -> NDArray[np.int64]:
        return self.replies.own_ends


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ConsumerPage(FramesPage):
    """The messages that an ordered consumer delivered."""

    deliveries: Deliveries

    @property
    def frames(self) -> Frames:  # type: ignore[override]
        """The messages as received."""
        return self.deliveries

    @property
    def sequences(self) -> NDArray[np.int64]:  # type: ignore[override]
        """The messages' stream sequences."""
        return self.deliveries.stream_seq

    def subjects(self) -> list[str]:
        """As :meth:`MessagePage.subjects`."""
        return texts(self.deliveries, (self.deliveries.subject_begin, self.deliveries.subject_end))

    def times(self) -> list[str]:
        """As :meth:`FramesPage.times`."""
        return [rfc3339(time) for time in self.deliveries.time.tolist()]

    def select(self, rows: slice | NDArray[np.bool_]) -> ConsumerPage:
        """As :meth:`MessagePage.select`."""
        return ConsumerPage(self.deliveries.select(rows))

    def _publisher_header_sizes(self) -> NDArray[np.int64]:
        # A consumer delivers the publisher's header block unchanged.
        sizes = self.deliveries.payload_begin - self.deliveries.header_begin - len(_HEADER_END)
        clipped: NDArray[np.int64] = np.maximum(sizes, 0)
        return clipped


class ObjectPage(MessagePage):
    """Messages that are objects already."""

    __slots__ = ("_messages", "sequences")

    def __init__(self, messages: Iterable[StoredMessage]) -> None:
        self._messages = sorted(messages, key=lambda message: message.seq)
        self.sequences = np.array([message.seq for message in self._messages], np.int64)

    def subjects(self) -> list[str]:
        """As :meth:`MessagePage.subjects`."""
        return [message.subject for message in self._messages]

    def select(self, rows: slice | NDArray[np.bool_]) -> ObjectPage:
        """As :meth:`MessagePage.select`."""
        return ObjectPage(self._messages[i] for i in np.arange(len(self))[rows])

    def messages(self) -> list[StoredMessage]:
        """As :meth:`MessagePage.messages`."""
        return self._messages


def _stored_messages(*columns: Iterable[Any]) -> list[StoredMessage]:
    """One message for each row of the columns, which are the fields of :class:`StoredMessage`.

    The fields are set column by column: the ``__init__`` of a frozen dataclass takes nearly twice
    as long, and creating these objects is the largest part of the time of :meth:`DirectGet.batch`.
    """
    subjects, *_ = columns
    messages = [StoredMessage.__new__(StoredMessage) for _ in subjects]
    for setter, column in zip(_FIELD_SETTERS, columns, strict=True):
        deque(map(setter, messages, column), maxlen=0)
    return messages
