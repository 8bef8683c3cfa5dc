"""The messages of a publisher that wait for their PubAcks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

from nats_stream_source.jetstream.publish.pub_ack import PubAck


class MessageInFlight(asyncio.Future[PubAck]):
    """A message in flight, which is the future of its PubAck.

    One object instead of two: a third of the time for a message was the collector's.

    Attributes:
        subject: the message's subject.
        deadline: by :meth:`MessagesInFlight.now`; infinite until the message was written.
        reconnects: the reconnects of the connection when it was sent.
    """

    __slots__ = ("deadline", "reconnects", "subject")

    subject: str
    deadline: float
    reconnects: int


class MessagesInFlight:
    """Messages in flight by serial number, in the order in which they were sent.

    Args:
        limit: the maximum number of messages.
        timeout: seconds from the writing of a message to its deadline.

    Attributes:
        slots: acquired for each message before it is added.
    """

    def __init__(self, limit: int, timeout: float) -> None:
        self.limit = limit
        self._timeout = timeout
        self.slots = asyncio.Semaphore(limit)
        self._messages: dict[int, MessageInFlight] = {}
        self._serial = 0
        self._unwritten: list[MessageInFlight] = []
        self._blocked_seconds = 0.0

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, serial: int) -> MessageInFlight:
        return self._messages[serial]

    def get(self, serial: int) -> MessageInFlight | None:
        """The message with this number; None if it is not in flight."""
        return self._messages.get(serial)

    def add(self, subject: str, reconnects: int) -> tuple[int, MessageInFlight]:
        """Add a message for which a slot was acquired; its serial number and itself."""
        loop = asyncio.get_running_loop()
        message = MessageInFlight(loop=loop)
        message.subject, message.reconnects, message.deadline = subject, reconnects, math.inf
        self._serial += 1
        self._messages[self._serial] = message
        # nats-py writes the message after the tasks that are ready now. With a hundred thousand of
        # them that takes longer than the timeout.
        if not self._unwritten:
            loop.call_soon(self._set_deadlines)
        self._unwritten.append(message)
        return self._serial, message

    def _set_deadlines(self) -> None:
        deadline = self.now() + self._timeout
        for message in self._unwritten:
            message.deadline = deadline
        self._unwritten.clear()

    def remove(self, serial: int) -> MessageInFlight | None:
        """Remove a message and release its slot; None if it was removed before."""
        message = self._messages.pop(serial, None)
        if message is not None:
            self.slots.release()
        return message

    def complete(self, serial: int, outcome: PubAck | Exception) -> None:
        """Remove a message and give its caller the outcome."""
        message = self.remove(serial)
        if message is None or message.done():
            return  # the caller was cancelled
        if isinstance(outcome, PubAck):
            message.set_result(outcome)
        else:
            message.set_exception(outcome)

    def complete_stored(
        self, serials: Iterable[int], seqs: Iterable[int], stream: str, domain: str | None
    ) -> None:
        """Complete many messages, each with the sequence at which ``stream`` has stored it."""
        messages, release = self._messages, self.slots.release
        for serial, seq in zip(serials, seqs, strict=True):
            if (message := messages.pop(serial, None)) is not None:
                release()
                if not message.done():
                    message.set_result(PubAck(stream, seq, False, domain))

    def serials(self, which: Callable[[MessageInFlight], bool] = lambda message: True) -> list[int]:
        """The serial numbers of these messages."""
        return [serial for serial, message in self._messages.items() if which(message)]

    def now(self) -> float:
        """The clock of the deadlines, in seconds; it stops while the event loop is blocked."""
        return asyncio.get_running_loop().time() - self._blocked_seconds

    def stop_clock(self, seconds: float) -> None:
        """Exclude seconds in which the event loop was blocked and read no PubAck."""
        self._blocked_seconds += seconds

    def next_deadline(self) -> float | None:
        """The deadline of the oldest message: all have the same timeout; infinite at first."""
        oldest = next(iter(self._messages.values()), None)
        return None if oldest is None else oldest.deadline

    def overdue(self) -> list[int]:
        """The serial numbers of the messages whose deadline has passed."""
        overdue, now = [], self.now()
        for serial, message in self._messages.items():
            if message.deadline > now:
                break
            overdue.append(serial)
        return overdue
