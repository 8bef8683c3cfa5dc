"""How a query waits when there is nothing to read.

Spark asks an idle query every 10 ms. A look at the stream costs the planner a millisecond of a
core, the server a third of one, and Spark's question alone is not free. So the planner waits for
the next look inside of Spark's question, and looks become rarer while nothing is written: a look
comes after a hundredth of the silence before it, at least 20 ms and at most 250. Where others write
what the query does not read, looks take a tenth of the time at most.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nats_stream_source.jetstream.api import StreamInfo
from nats_stream_source.source.offsets import Offset

_SHORTEST = 0.02  # seconds between two looks
_LONGEST = 0.25
_OF_SILENCE = 0.01
_LONGEST_UNDER_WRITES = 0.1
_TIMES_A_LOOK = 10
_POLLING = 0.05  # seconds between two questions of Spark, when it does nothing else


class Idle:
    """When the next look is due, and what the last one saw."""

    def __init__(
        self, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._at: Offset | None = None
        self._seen: tuple[object, ...] = ()
        self._silent_since = 0.0
        self._answered = 0.0
        self._looked = 0.0
        self._due = 0.0

    async def rest(self, start: Offset) -> bool:
        """Wait until a look from ``start`` on is due; at once, unless the last one saw nothing.

        False: nobody waited, and it is not due. Spark did something else since it asked last, as
        for another source of the same query, which must not wait for this one.
        """
        now = self._clock()
        left = self._due - now if start == self._at else 0.0
        if left > 0:
            if now - self._answered > _POLLING:
                self._answered = now
                return False
            await self._sleep(left)
        self._looked = self._clock()
        return True

    def unchanged(self, start: Offset, info: StreamInfo) -> bool:
        """Whether the stream is as it was when there was nothing to read from ``start`` on."""
        if start != self._at or _state(info) != self._seen:
            return False
        self._answered = now = self._clock()
        silence = (now - self._silent_since) * _OF_SILENCE
        self._due = now + min(max(silence, _SHORTEST), _LONGEST)
        return True

    def nothing(self, start: Offset, info: StreamInfo, settled: bool) -> None:
        """A look found nothing to read from ``start`` on; ``settled``: it looked at everything."""
        self._answered = self._silent_since = now = self._clock()
        self._at, self._seen = start, _state(info) if settled else ()
        took = now - self._looked
        self._due = now + min(max(_TIMES_A_LOOK * took, _SHORTEST), _LONGEST_UNDER_WRITES)

    def over(self) -> None:
        """There was something to read."""
        self._at = None


def _state(info: StreamInfo) -> tuple[object, ...]:
    return info.created, info.first_seq, info.last_seq, info.last_time
