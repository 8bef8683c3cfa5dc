"""Gaps in what a consumer delivers (ADR-15, "Messages Gaps").

A consumer numbers its deliveries 1, 2, 3, …, redeliveries included. A message that is not the next
one, or a heartbeat whose ``Nats-Last-Consumer`` is not the last one that arrived, tells that
something was lost on the way. A replicated consumer may send a heartbeat before the message it
speaks of, so a heartbeat counts when the next one says the same and nothing has come in between.

The ordered consumer has its own, stricter rules: ``wire/cursor.py``.
"""

from __future__ import annotations

from typing import NamedTuple


class Gap(NamedTuple):
    """The consumer sequence that was next, and the one that came, or is to come, instead."""

    expected: int
    found: int


class GapWatch:
    """Follows one consumer's sequence.

    Attributes:
        consumer_seq: the last one; None until the first is known, for a consumer that was there
            before.
    """

    def __init__(self, consumer_seq: int | None) -> None:
        """``consumer_seq`` is 0 for a new consumer."""
        self.consumer_seq = consumer_seq
        self._ahead: int | None = None

    def __repr__(self) -> str:
        return f"<GapWatch consumer_seq={self.consumer_seq}>"

    def message(self, consumer_seq: int) -> Gap | None:
        """A message arrived; the gap before it, if there is one. It goes on from there."""
        before, self.consumer_seq, self._ahead = self.consumer_seq, consumer_seq, None
        if before is None or consumer_seq == before + 1:
            return None
        return Gap(before + 1, consumer_seq)

    def heartbeat(self, last_consumer: int) -> Gap | None:
        """A heartbeat arrived; the gap that it shows, if it does. It goes on from there."""
        ours = self.consumer_seq
        if ours is None:
            self.consumer_seq = last_consumer
        elif last_consumer == ours:
            self._ahead = None
        elif last_consumer != self._ahead:
            self._ahead = last_consumer
        else:
            self.consumer_seq, self._ahead = last_consumer, None
            return Gap(ours + 1, last_consumer + 1)
        return None
