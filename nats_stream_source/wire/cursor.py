"""The state machine of one ordered consumer over one range ``(start, end]``.

An ordered consumer is a series of server-side consumers, each with a serial. The server numbers
what it delivers to each: consumer sequences 1, 2, 3 and so on. As long as they arrive without a
hole, nothing between two stream sequences was lost on the way. The cursor holds the last kept
stream sequence (``position``), looks at every frame, and says what to do; the shell around it does
the I/O. It never waits and never reads a clock.

==========  =====================================================  =======  ========================
state       input                                                  to       the shell shall
==========  =====================================================  =======  ========================
IDLE        created()                                              READING
READING     deliver: consumer_seq is not the next one              IDLE     rebuild (GAP)
READING     deliver: stream_seq does not grow, and is no list's    READING  fail (ProtocolError)
READING     deliver: stream_seq <= position                        READING  skip the row
READING     deliver: position < stream_seq <= end                  READING  keep the row
READING     deliver: stream_seq >= end                             DONE     keep it if it is end
READING     heartbeat: last_consumer is not ours                   IDLE     rebuild (GAP)
READING     heartbeat: last_stream >= end                          DONE     finish
READING     heartbeats: too many, and a list is not over           IDLE     rebuild (STALE_LIST)
READING     heartbeat: stalled, not answered yet                   READING  answer flow control
READING     heartbeat: stalled though the answer arrived           IDLE     rebuild (STALLED)
READING     flow control                                           READING  answer
READING     flow control, the rest of the range is on its way      READING  hold the answer back
READING     waited(): nothing more came                            READING  answer
READING     lost(reason)                                           IDLE     rebuild (reason)
IDLE, DONE  a frame of an earlier consumer                         same     ignore it
==========  =====================================================  =======  ========================

Why a row at or below ``position`` is skipped, not refused: a rebuilt ``last_per_subject`` consumer
starts its list again; after its list it may deliver again what was written while the list was made;
and nats-server 2.10 moves a start beyond its own end back to that end. Other consumers' sequences
grow, from one call of :meth:`Cursor.deliver` to the next, too: one that does not may be another
message than it says, and the one in whose place it came would be taken for deleted.

Why an answer to flow control may be held back: what the server sends beyond ``end`` is sent for
nothing, and each answer lets it send up to twice as much. It asks when half of what it may have
under way is delivered, so when no more sequences are left than came since it asked last, they are
on their way already. Where that guess is wrong (the last values are the large ones), nothing
more comes, and the answer is given a moment later.

Why heartbeats may end a list (``last_per_subject``): the server makes it when the consumer is
created, and where it comes to a message that was superseded or purged since, it waits; its own next
heartbeat then takes it on by that one message. A new list has none of these, but begins with all
that came before; and a replica that lags looks the same, once its list is over. So a list is given
four heartbeats that find nothing to deliver, and each further one twice as many.

Why ``last_stream >= end`` with our ``last_consumer`` is an end and ``pending == 0`` is not: the
first says that this replica has looked at all sequences up to ``end`` and that we have all it
found; the second may be said by a replica that has not received ``end`` yet (ADR-53; DESIGN 3.2,
3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError


class State(Enum):
    """Where the cursor stands."""

    IDLE = "idle"
    READING = "reading"
    DONE = "done"


class Rebuild(Enum):
    """Why a consumer is given up for a new one."""

    GAP = "gap"
    MISSED_HEARTBEAT = "missed heartbeat"
    CONSUMER_GONE = "consumer gone"
    RECONNECTED = "reconnected"
    STALLED = "stalled"
    STALE_LIST = "stale list"
    NO_ANSWER = "no answer"


@dataclass(frozen=True, slots=True)
class Step:
    """What one input leads to.

    Of the delivered messages, those from index ``first`` up to ``stop`` are rows; ``answer`` is the
    subject to publish an empty message to (flow control), or None.
    """

    first: int = 0
    stop: int = 0
    answer: str | None = None


_NOTHING = Step()
_LIST_HEARTBEATS = 4


class Cursor:
    """One ordered consumer over ``(start, end]``.

    Args:
        list_through: the consumers begin with a list, of the last message of each subject, which
            is over when the server has looked at this sequence; 0 where there is none.

    Attributes:
        position: the stream sequence up to which rows were kept; a rebuild goes on after it.
        consumer_seq: the last consumer sequence of the current consumer.
        seen_through: the last stream sequence that the server is known to have looked at.
        kept: how many rows were kept.
        rebuilds: the reasons of all rebuilds, in order.
        fruitless: rebuilds since the last progress: ``seen_through`` moved on, or a heartbeat
            showed that the consumer has nothing more to deliver.
    """

    def __init__(self, start: int, end: int, list_through: int = 0) -> None:
        if not 0 <= start <= end:
            raise ValueError(f"not a range: ({start}, {end}]")
        self.start = start
        self.end = end
        self.position = start
        self.consumer_seq = self._delivered = 0  # of the current consumer
        self.seen_through = start
        self.kept = 0
        self.rebuilds: list[Rebuild] = []
        self.fruitless = 0
        self.state = State.DONE if start == end else State.IDLE
        self._answered: str | None = None
        self._answer_arrived = False
        self._held_back: str | None = None
        self._asked_at = start
        self._list_through = list_through
        self._idle = 0  # heartbeats of the current consumer
        self._patience = _LIST_HEARTBEATS  # that many are too many before a list is over

    def __repr__(self) -> str:
        return (
            f"<Cursor ({self.start}, {self.end}] {self.state.value} at {self.position} "
            f"consumer_seq={self.consumer_seq} kept={self.kept} rebuilds={len(self.rebuilds)}>"
        )

    @property
    def done(self) -> bool:
        """Whether all rows of the range were delivered."""
        return self.state is State.DONE

    def created(self) -> None:
        """A new consumer exists and will deliver from ``position`` on."""
        if self.state is not State.IDLE:
            raise RuntimeError(f"created() in {self!r}")
        self.state = State.READING
        self.consumer_seq = self._delivered = 0
        self._answered = None
        self._answer_arrived = False
        self._held_back = None
        self._asked_at = self.position
        self._idle = 0

    def deliver(self, consumer_seq: NDArray[np.int64], stream_seq: NDArray[np.int64]) -> Step:
        """Messages of the current consumer, in the order of arrival.

        Args:
            consumer_seq, stream_seq: the numbers of their ACK subjects, n each. Where a list's
                sequences do not grow, there is another call.

        Raises:
            ProtocolError: stream sequences that do not grow though consumer sequences do.
        """
        if self.state is not State.READING or not len(consumer_seq):
            return _NOTHING
        expected = np.arange(self.consumer_seq + 1, self.consumer_seq + 1 + len(consumer_seq))
        gaps = np.flatnonzero(consumer_seq != expected)
        sound = int(gaps[0]) if len(gaps) else len(consumer_seq)
        if not sound:
            self.lost(Rebuild.GAP)
            return _NOTHING
        stream_seq = stream_seq[:sound]
        least = 0 if self._list_through else self._delivered
        if stream_seq[0] <= least or (np.diff(stream_seq) <= 0).any():
            raise ProtocolError("an ordered consumer's stream sequences went backwards")
        self._delivered = last = int(stream_seq[-1])
        first = int(np.searchsorted(stream_seq, self.position, side="right"))
        stop = int(np.searchsorted(stream_seq, self.end, side="right"))
        self.consumer_seq += sound
        if stop > first:
            self.kept += stop - first
            self.position = int(stream_seq[stop - 1])
        self._saw(last)
        if last >= self.end:
            self.state = State.DONE
        elif sound < len(consumer_seq):
            self.lost(Rebuild.GAP)
        return Step(first, max(first, stop))

    def heartbeat(self, last_consumer: int, last_stream: int, stalled: str | None) -> Step:
        """An idle heartbeat: ``Nats-Last-Consumer``, ``-Stream`` and ``Nats-Consumer-Stalled``."""
        if self.state is not State.READING:
            return _NOTHING
        if last_consumer != self.consumer_seq:
            self.lost(Rebuild.GAP)
            return _NOTHING
        self._saw(last_stream)
        if last_stream >= self.end:
            self.state = State.DONE
            return _NOTHING
        if stalled is None:
            # A consumer that works, though there is nothing to deliver.
            self.fruitless = 0
            self._idle += 1
            if last_stream < self._list_through and self._idle >= self._patience:
                self._patience *= 2
                self.lost(Rebuild.STALE_LIST)
            return _NOTHING
        if stalled != self._answered:
            return self._answer(stalled)
        if self._answer_arrived:
            self.lost(Rebuild.STALLED)
        return _NOTHING

    def flow_control(self, reply: str) -> Step:
        """The server waits for an empty message on ``reply`` before it sends more (ADR-15)."""
        if self.state is not State.READING or reply in (self._answered, self._held_back):
            return _NOTHING
        window = self.seen_through - self._asked_at
        self._asked_at = self.seen_through
        if self.end - self.seen_through <= window:
            self._held_back = reply
            return _NOTHING
        return self._answer(reply)

    @property
    def holds_back(self) -> bool:
        """Whether an answer to flow control is held back; then :meth:`waited` is due soon."""
        return self._held_back is not None and self.state is State.READING

    def waited(self) -> Step:
        """Nothing more came for a moment: give the answer that was held back."""
        return self._answer(self._held_back) if self.holds_back else _NOTHING

    def _answer(self, reply: str | None) -> Step:
        self._answered, self._held_back = reply, None
        self._answer_arrived = False
        return Step(answer=reply)

    @property
    def unconfirmed(self) -> str | None:
        """The flow-control subject that was answered, while nobody knows that it arrived."""
        return None if self._answer_arrived else self._answered

    def confirmed(self, reply: str) -> None:
        """A PING/PONG after the answer on ``reply``: heartbeats sent from now on know of it."""
        if reply == self._answered:
            self._answer_arrived = True

    def lost(self, reason: Rebuild) -> None:
        """The current consumer is of no use any more, or could not be created."""
        if self.state is State.DONE:
            return
        self.state = State.IDLE
        self.rebuilds.append(reason)
        self.fruitless += 1

    def _saw(self, stream_seq: int) -> None:
        if stream_seq > self.seen_through:
            self.seen_through = stream_seq
            self.fruitless = 0
            # Delivery went on: a stall that is reported later is another one.
            self._answered = None if self._answer_arrived else self._answered
            self._answer_arrived = False
