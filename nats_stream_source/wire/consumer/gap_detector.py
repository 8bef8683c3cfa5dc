"""Gaps in the deliveries of a consumer (ADR-15, "Messages Gaps").

A consumer numbers its deliveries 1, 2, 3, …, redeliveries included. A message with another number
than the next one shows that messages were lost in transit. So does a heartbeat whose
``Nats-Last-Consumer`` differs from the last received number. A replicated consumer may send a
heartbeat before the message that it counts. So a heartbeat counts only when the next one repeats
its number and no message was received in between.

The ordered consumer has stricter rules: ``wire/consumer/cursor.py``.
"""

from __future__ import annotations

from typing import NamedTuple


class Gap(NamedTuple):
    """The consumer sequence that was expected, and the one received, or announced, instead."""

    expected: int
    received: int


class GapDetector:
    """Tracks the consumer sequences of one consumer.

    Attributes:
        consumer_seq: the last received one; None before the first message of a consumer that
            existed before.
    """

    def __init__(self, consumer_seq: int | None) -> None:
        """``consumer_seq`` is 0 for a new consumer, None for one that existed before."""
        self.consumer_seq = consumer_seq
        self._announced: int | None = None

    def __repr__(self) -> str:
        return f"<GapDetector consumer_seq={self.consumer_seq}>"

    def message(self, consumer_seq: int) -> Gap | None:
        """Receive a message; return the gap before it or None. Detection resumes there."""
        before, self.consumer_seq, self._announced = self.consumer_seq, consumer_seq, None
        if before is None or consumer_seq == before + 1:
            return None
        return Gap(before + 1, consumer_seq)

    def heartbeat(self, last_consumer: int) -> Gap | None:
        """Receive a heartbeat; return the gap that it shows or None. Detection resumes there."""
        last = self.consumer_seq
        if last is None:
            self.consumer_seq = last_consumer
        elif last_consumer == last:
            self._announced = None
        elif last_consumer != self._announced:
            self._announced = last_consumer
        else:
            self.consumer_seq, self._announced = last_consumer, None
            return Gap(last + 1, last_consumer + 1)
        return None
