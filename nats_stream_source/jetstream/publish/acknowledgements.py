"""The messages that a publisher of columns has in flight, and their acknowledgements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.connection.connection import Connection
from nats_stream_source.errors import NatsSourceError
from nats_stream_source.jetstream.publish.pub_ack import too_large_error
from nats_stream_source.jetstream.publish.window import Window
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns


class Acknowledgements(ABC):
    """State of one publisher; ``column_publisher.py`` sends, a subclass reads the responses.

    Args:
        max_in_flight, allowance: see :class:`Window`.

    Attributes:
        wildcard: the last tokens of the responses' subjects, which follow ``inbox_prefix``.
        reconnects: the reconnects of the connection when the window went back for the last time.
        stored: number of messages that are stored, duplicates included.
        duplicates: number of those that the stream already had.
        failure: the error that ends the publisher.
        go_back: the reason to send again from the first message that is not done.
        waited: seconds without progress.
        silent: seconds without a response since the messages were sent.
        retries: how often messages were sent again without progress.
    """

    wildcard: ClassVar[str]

    def __init__(
        self, connection: Connection, stream: str, max_in_flight: int, allowance: int | None = None
    ) -> None:
        self._connection = connection
        self.stream = stream
        self.inbox_prefix = f"{connection.client.new_inbox()}."
        self.window = Window(max_in_flight, self._encode_valid, allowance)
        self.reconnects = connection.reconnects
        self.stored = 0
        self.duplicates = 0
        self.failure: NatsSourceError | None = None
        self.go_back: NatsSourceError | None = None
        self.waited = 0.0
        self.silent = 0.0
        self.retries = 0

    @abstractmethod
    def encode(self, messages: MessageColumns, first_serial: int, start: int) -> EncodedFrames:
        """Encode messages for the window, with the subjects of their responses."""

    def _encode_valid(
        self, messages: MessageColumns, first_serial: int, start: int
    ) -> EncodedFrames:
        self.validate_sizes(messages)  # again: another server may have another limit
        frames = self.encode(messages, first_serial, start)
        lines = frames.line_lengths(messages)
        control_line, longest = self._connection.control_line, int(lines.argmax())
        subject = messages.subject(longest)
        control_line.validate(subject, int(lines[longest]) - len(subject.encode()))
        return frames

    def validate_sizes(self, messages: MessageColumns) -> NDArray[np.int64]:
        """The size of each message; MessageTooLargeError if one exceeds ``max_payload``."""
        sizes = messages.sizes()
        limit = self._connection.client.max_payload
        if int(sizes.max()) <= limit:
            return sizes
        first = int((sizes > limit).argmax())
        raise too_large_error(messages.subject(first), int(sizes[first]), limit)

    @abstractmethod
    def process(self, frames: Frames) -> None:
        """Process responses: mark the messages that they acknowledge."""

    def requests(self) -> bytes:
        """Frames that request the last response again; empty where the server lacks it."""
        return b""

    def ends(self) -> bytes:
        """Frames that precede the messages that are sent again; called before the window's."""
        return b""

    @property
    def disconnected(self) -> bool:
        """Whether the connection of the messages in flight is lost."""
        connection = self._connection
        return not connection.online.is_set() or connection.reconnects != self.reconnects

    def add_time(self, seconds: float) -> None:
        """Count seconds in which a response could arrive."""
        self.waited += seconds
        self.silent += seconds

    def note_progress(self) -> None:
        """Restart the limits of time: another message is stored."""
        self.waited, self.silent, self.retries = 0.0, 0.0, 0
