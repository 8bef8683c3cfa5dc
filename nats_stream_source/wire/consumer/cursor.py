"""The state machine of one ordered consumer over one range ``(start, end]``.

An ordered consumer is a series of server-side consumers. The server numbers the deliveries of each
one: consumer sequences 1, 2, 3 and so on. While they arrive without a gap, no message between two
stream sequences was lost in transit. The cursor holds the last kept stream sequence (``position``),
receives the numbers of every frame, and returns the action for the reader, which does the I/O. The
cursor does not wait and does not read a clock.

==========  =====================================================  =======  ========================
state       input                                                  to       action of the reader
==========  =====================================================  =======  ========================
IDLE        created()                                              READING
READING     deliver: consumer_seq is not the next one              IDLE     rebuild (GAP)
READING     the same, while initial values are missing             READING  keep the rows behind it
READING     initial values end, and some are missing               IDLE     rebuild (GAP)
READING     deliver: stream_seq not higher after initial values    READING  fail (ProtocolError)
READING     deliver: stream_seq <= position                        READING  skip the row
READING     deliver: position < stream_seq <= end                  READING  keep the row
READING     deliver: stream_seq >= end                             DONE     keep it if it is end
READING     heartbeat: last_consumer is not the cursor's           IDLE     rebuild (GAP)
READING     heartbeat: last_stream >= end                          DONE     finish
READING     heartbeats: at the limit, initial values are missing   IDLE     rebuild (STALE_LIST)
READING     heartbeat: stalled, without a reply so far             READING  reply to flow control
READING     heartbeat: stalled although the reply arrived          IDLE     rebuild (STALLED)
READING     flow control                                           READING  reply
READING     flow control, the rest of the range is in transit      READING  defer the reply
READING     idle(): nothing more was received                      READING  send the deferred reply
READING     lost(reason)                                           IDLE     rebuild (reason)
IDLE, DONE  a frame of an earlier consumer                         same     ignore it
==========  =====================================================  =======  ========================

Why the cursor skips a row at or below ``position`` instead of failing: a rebuilt
``last_per_subject`` consumer starts its initial values again. After them it may deliver again
messages that were written while the server looked for them. And nats-server 2.10 moves a start
position beyond its last sequence back to that sequence. The sequences of other consumers always
grow, also from one call of :meth:`Cursor.deliver` to the next. A sequence that does not grow may
belong to another message than it states, and the message that it replaced would be taken for
deleted.

Why a gap does not end initial values (``last_per_subject``): the next consumer starts them again.
At a loss of one frame in a hundred, no consumer would get through those of some thousand subjects.
So the rows behind a gap are kept, the next consumer adds the missing ones, and the initial values
are complete when all of them are covered (:class:`Coverage`). The rows keep their
order: ``position`` is the last row before the first one that is missing, and the reader holds back
the rows behind it.

Why the reply to flow control may be deferred: messages beyond ``end`` waste bandwidth, and each
reply lets the server send up to twice as much. The server requests a reply when half of its window
is delivered. So when no more sequences remain than were received since its last request, they are
in transit already. Where this estimate is wrong (the last values are the large ones), no more
messages arrive, and the reader sends the reply after a short wait.

Why heartbeats may end initial values (``last_per_subject``): the server lists their sequences when
the consumer is created. At a message that was superseded or purged since, the server waits, and its
next heartbeat moves it past that one message. The next consumer does not have such messages, but
starts with all that were delivered before. A replica that lags looks the same once its initial
values are complete. So a consumer has four heartbeats without a delivery, and each further consumer
twice as many.

Why ``last_stream >= end`` with the cursor's ``last_consumer`` is an end and ``pending == 0`` is
not: the first means that this replica has scanned all sequences up to ``end`` and that all matching
messages were received. The second is also reported by a replica that has not received ``end`` yet
(ADR-53; docs/internals/measurements.md, Servers 2 and 3).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.errors import ProtocolError


class State(Enum):
    """State of the cursor."""

    IDLE = "idle"
    READING = "reading"
    DONE = "done"


class Rebuild(Enum):
    """Reason why a consumer is replaced by a new one."""

    GAP = "gap"
    MISSED_HEARTBEAT = "missed heartbeat"
    CONSUMER_GONE = "consumer gone"
    RECONNECTED = "reconnected"
    STALLED = "stalled"
    STALE_LIST = "stale list"
    NO_ANSWER = "no answer"
    LEADER_CHANGED = "leader changed"


@dataclass(frozen=True, slots=True)
class CursorAction:
    """The action that one input requires.

    Of the delivered messages, those from index ``first`` up to ``stop`` are rows; if ``rows`` is
    not None, only those of them for which it is true. ``reply`` is the subject to which the reader
    publishes an empty message (flow control), or None.
    """

    first: int = 0
    stop: int = 0
    reply: str | None = None
    rows: NDArray[np.bool_] | None = None


_NO_ACTION = CursorAction()
_MAX_IDLE_HEARTBEATS = 4


class Cursor:
    """One ordered consumer over ``(start, end]``.

    Args:
        initial_through: each consumer starts with the last message of each subject; these initial
            values are complete when the server has scanned this sequence. 0 for consumers without
            initial values.

    Attributes:
        position: the stream sequence up to which all rows were kept; a rebuild resumes after it.
        consumer_seq: the last consumer sequence of the current consumer.
        seen_through: the last stream sequence that the server has reported as scanned, and before
            which no initial value is missing.
        kept: the number of rows kept.
        rebuilds: the reasons of all rebuilds, in order.
        failed_rebuilds: rebuilds since the last progress: a higher ``seen_through``, more initial
            values, or a heartbeat of a consumer that has nothing more to deliver.
    """

    def __init__(self, start: int, end: int, initial_through: int = 0) -> None:
        if not 0 <= start <= end:
            raise ValueError(f"not a range: ({start}, {end}]")
        self.start = start
        self.end = end
        self.position = start
        self.consumer_seq = self._delivered = 0  # of the current consumer
        self.seen_through = start
        self.kept = 0
        self.rebuilds: list[Rebuild] = []
        self.failed_rebuilds = 0
        self.state = State.DONE if start == end else State.IDLE
        self._last_reply: str | None = None
        self._reply_confirmed = False
        self._deferred_reply: str | None = None
        self._window_start = start
        self._initial_through = initial_through
        self._coverage = Coverage(start)
        self._run_start = start  # no row is missing between it and the last delivery
        self._idle_heartbeats = 0  # of the current consumer, without a delivery
        self._heartbeat_limit = _MAX_IDLE_HEARTBEATS  # while initial values are missing

    def __repr__(self) -> str:
        return (
            f"<Cursor ({self.start}, {self.end}] {self.state.value} at {self.position} "
            f"consumer_seq={self.consumer_seq} kept={self.kept} rebuilds={len(self.rebuilds)}>"
        )

    @property
    def done(self) -> bool:
        """Whether all rows of the range were delivered."""
        return self.state is State.DONE

    @property
    def reads_initial_values(self) -> bool:
        """Whether the initial values are incomplete."""
        return self._coverage.prefix < self._initial_through

    def created(self) -> None:
        """A new consumer was created and delivers the messages after ``position``."""
        if self.state is not State.IDLE:
            raise RuntimeError(f"created() in {self!r}")
        self.state = State.READING
        self.consumer_seq = self._delivered = 0
        self._last_reply = None
        self._reply_confirmed = False
        self._deferred_reply = None
        self._window_start = self.position
        self._run_start = self.start
        self._idle_heartbeats = 0

    def deliver(
        self,
        consumer_seq: NDArray[np.int64],
        stream_seq: NDArray[np.int64],
        *,
        in_sequence: bool = False,
    ) -> CursorAction:
        """Receive messages of the current consumer, in the order of arrival.

        Args:
            consumer_seq, stream_seq: the numbers of their ACK subjects, n each. Where the sequences
                of initial values do not grow, or consumer sequences are missing or repeated, the
                reader makes another call.
            in_sequence: the consumer sequences are known to be consecutive and the stream sequences
                to grow (``Frames.in_sequence``).

        Raises:
            ProtocolError: the stream sequences do not grow although the consumer sequences do.
        """
        if self.state is not State.READING or not len(consumer_seq):
            return _NO_ACTION
        if self.reads_initial_values:
            return self._deliver_initial_values(consumer_seq, stream_seq)
        if consumer_seq[0] != self.consumer_seq + 1:
            self.lost(Rebuild.GAP)
            return _NO_ACTION
        contiguous = len(consumer_seq)
        if not in_sequence:
            gaps = np.flatnonzero(consumer_seq[1:] - consumer_seq[:-1] != 1)
            contiguous = int(gaps[0]) + 1 if len(gaps) else contiguous
        stream_seq = stream_seq[:contiguous]
        previous = 0 if self._initial_through else self._delivered
        self._verify_growth(previous, stream_seq[:1] if in_sequence else stream_seq)
        self._delivered = last = int(stream_seq[-1])
        first = int(np.searchsorted(stream_seq, self.position, side="right"))
        stop = int(np.searchsorted(stream_seq, self.end, side="right"))
        self.consumer_seq += contiguous
        if stop > first:
            self.kept += stop - first
            self.position = int(stream_seq[stop - 1])
        self._advance(last)
        if last >= self.end:
            self.state = State.DONE
        elif contiguous < len(consumer_seq):
            self.lost(Rebuild.GAP)
        return CursorAction(first, max(first, stop))

    def _deliver_initial_values(
        self, consumer_seq: NDArray[np.int64], stream_seq: NDArray[np.int64]
    ) -> CursorAction:
        """Receive consecutive initial values, of which earlier ones may be missing."""
        repeated = int(np.searchsorted(consumer_seq, self.consumer_seq, side="right"))
        if repeated == len(consumer_seq):
            return _NO_ACTION
        self._verify_growth(0, stream_seq)
        if consumer_seq[repeated] > self.consumer_seq + 1:
            self._run_start = int(stream_seq[repeated]) - 1
        self.consumer_seq, last = int(consumer_seq[-1]), int(stream_seq[-1])
        self._run_start = min(self._run_start, int(stream_seq[repeated]) - 1)
        self._delivered = last
        stop = int(np.searchsorted(stream_seq, self.end, side="right"))
        rows = self._coverage.missing(stream_seq[:stop])
        rows[:repeated] = False
        self.kept += int(np.count_nonzero(rows))
        row = int(stream_seq[stop - 1]) if stop else self._run_start
        self._advance(last, row)
        self._end_initial_values(last)
        return CursorAction(0, stop, rows=rows)

    def _end_initial_values(self, scanned: int) -> None:
        """End the consumer, which has scanned up to ``scanned``, where its initial values end."""
        if self._coverage.prefix >= self.end:
            self.state = State.DONE
        elif self.reads_initial_values and scanned >= min(self.end, self._initial_through):
            self.lost(Rebuild.GAP)

    @staticmethod
    def _verify_growth(previous: int, stream_seq: NDArray[np.int64]) -> None:
        if stream_seq[0] <= previous or (stream_seq[1:] <= stream_seq[:-1]).any():
            raise ProtocolError("an ordered consumer's stream sequences went backwards")

    def heartbeat(self, last_consumer: int, last_stream: int, stalled: str | None) -> CursorAction:
        """Receive a heartbeat.

        Args:
            last_consumer, last_stream: ``Nats-Last-Consumer`` and ``Nats-Last-Stream``.
            stalled: ``Nats-Consumer-Stalled``, None where it is absent.
        """
        if self.state is not State.READING:
            return _NO_ACTION
        if last_consumer != self.consumer_seq:
            self.lost(Rebuild.GAP)
            return _NO_ACTION
        reads_initial_values = self.reads_initial_values
        self._advance(last_stream)
        if reads_initial_values:
            self._end_initial_values(last_stream)
        elif last_stream >= self.end:
            self.state = State.DONE
        if self.state is not State.READING:
            return _NO_ACTION
        if stalled is None:
            # The consumer works and has nothing to deliver.
            self.failed_rebuilds = 0
            self._idle_heartbeats += 1
            at_limit = self._idle_heartbeats >= self._heartbeat_limit
            if at_limit and last_stream < self._initial_through:
                self._heartbeat_limit *= 2
                self.lost(Rebuild.STALE_LIST)
            return _NO_ACTION
        if stalled != self._last_reply:
            return self._send_reply(stalled)
        if self._reply_confirmed:
            self.lost(Rebuild.STALLED)
        return _NO_ACTION

    def flow_control(self, reply: str) -> CursorAction:
        """Receive a flow-control request: the server waits for a message on ``reply`` (ADR-15)."""
        if self.state is not State.READING or reply in (self._last_reply, self._deferred_reply):
            return _NO_ACTION
        window = self.seen_through - self._window_start
        self._window_start = self.seen_through
        if self.end - self.seen_through <= window:
            self._deferred_reply = reply
            return _NO_ACTION
        return self._send_reply(reply)

    @property
    def defers_reply(self) -> bool:
        """Whether a flow-control reply is deferred; then :meth:`idle` is due soon."""
        return self._deferred_reply is not None and self.state is State.READING

    def idle(self) -> CursorAction:
        """Nothing more was received for a moment: send the deferred reply."""
        return self._send_reply(self._deferred_reply) if self.defers_reply else _NO_ACTION

    def _send_reply(self, reply: str | None) -> CursorAction:
        self._last_reply, self._deferred_reply = reply, None
        self._reply_confirmed = False
        return CursorAction(reply=reply)

    @property
    def unconfirmed_reply(self) -> str | None:
        """The subject of the last flow-control reply, until its arrival is confirmed."""
        return None if self._reply_confirmed else self._last_reply

    def confirmed(self, reply: str) -> None:
        """A PONG followed the reply on ``reply``: later heartbeats take that reply into account."""
        if reply == self._last_reply:
            self._reply_confirmed = True

    def lost(self, reason: Rebuild) -> None:
        """The current consumer cannot be used any more, or could not be created."""
        if self.state is State.DONE:
            return
        self.state = State.IDLE
        self.rebuilds.append(reason)
        self.failed_rebuilds += 1

    def _advance(self, stream_seq: int, row: int = 0) -> None:
        """The server has scanned up to ``stream_seq``; ``row`` is the last initial value."""
        if self.reads_initial_values:
            progress = self._coverage.add(self._run_start, stream_seq, row)
            self.position = max(self.position, min(self._coverage.last_row, self.end))
            self.seen_through = max(self.seen_through, self._coverage.prefix)
        else:
            progress = stream_seq > self.seen_through
            self.seen_through = max(self.seen_through, stream_seq)
        if progress:
            self.failed_rebuilds = 0
            # Delivery continued: a stall that is reported later is another one.
            self._last_reply = None if self._reply_confirmed else self._last_reply
            self._reply_confirmed = False


class Coverage:
    """Covered ranges ``(low, high]`` of stream sequences.

    Two deliveries of initial values with consecutive consumer sequences cover the range between
    them: the consumer has no row in it. A later consumer has no new row in a covered range either,
    because a message that is the last of its subject now was so before, unless it is newer than the
    earlier consumer. So the initial values are complete once the covered ranges adjoin from their
    start to their end.

    Attributes:
        prefix: everything from the start up to this sequence is covered.
        last_row: the last row in it; the start without a row.
    """

    def __init__(self, start: int) -> None:
        self.prefix = start
        self.last_row = start
        # Disjoint, rising, beyond the prefix: low and high borders, last row.
        self._low: list[int] = []
        self._high: list[int] = []
        self._row: list[int] = []

    def missing(self, stream_seq: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these sequences, in rising order, are not covered."""
        beyond: NDArray[np.bool_] = stream_seq > self.prefix
        if self._low and beyond.any():
            index = np.searchsorted(np.array(self._low), stream_seq, side="left") - 1
            high = np.array(self._high)[np.maximum(index, 0)]
            beyond &= (index < 0) | (stream_seq > high)
        return beyond

    def add(self, low: int, high: int, row: int) -> bool:
        """Cover ``(low, high]``; returns whether any of it was not covered.

        Args:
            row: the last row in it, or ``low`` without a row.
        """
        if high <= self.prefix:
            return False
        if low <= self.prefix:
            self.prefix = high
            self.last_row = max(self.last_row, row)
            self._absorb()
            return True
        first = bisect_left(self._high, low)  # the first range that overlaps or adjoins
        if first < len(self._low) and self._low[first] <= low and high <= self._high[first]:
            return False
        stop = first
        while stop < len(self._low) and self._low[stop] <= high:
            low, high = min(low, self._low[stop]), max(high, self._high[stop])
            row = max(row, self._row[stop])
            stop += 1
        self._low[first:stop], self._high[first:stop], self._row[first:stop] = [low], [high], [row]
        return True

    def _absorb(self) -> None:
        """Join the ranges that the prefix has reached to it."""
        count = 0
        while count < len(self._low) and self._low[count] <= self.prefix:
            self.prefix = max(self.prefix, self._high[count])
            self.last_row = max(self.last_row, self._row[count])
            count += 1
        del self._low[:count], self._high[:count], self._row[:count]
