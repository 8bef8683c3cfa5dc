"""When an idle query polls its streams, and when the rows that are available make a micro-batch.

:class:`PollBackoff`: Spark calls an idle query every 10 ms. A poll costs the planner a millisecond
of a core and the server a third of one, and Spark's call itself costs time. So the planner waits
for the next poll inside of Spark's call, and polls become rarer while the stream is unchanged: the
interval is a hundredth of the time since the last change, at least 20 ms and at most 250 ms. While
other subjects receive messages that the query does not read, polls take a tenth of the time at
most. A poll of many streams consists of several requests: there are at most five requests in a
second.

:class:`TriggerDelay`: a query with ``minRowsPerTrigger`` reads nothing until so many rows are
available, or until ``maxTriggerDelay`` seconds have passed since its last micro-batch. The first
micro-batch of a run does not wait, as with Spark's Kafka source (``minOffsetsPerTrigger``): a query
that was stopped for a while catches up at once. ``Trigger.AvailableNow`` and ``Trigger.Once`` do
not wait either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

_MIN_INTERVAL = 0.02  # seconds between two polls
_MAX_INTERVAL = 0.25
_SHARE_OF_SILENCE = 0.01
_MAX_INTERVAL_UNDER_WRITES = 0.1
_INTERVAL_PER_POLL_TIME = 10
_INTERVAL_PER_REQUEST = 0.2  # seconds, of polls with several requests
_POLLING = 0.05  # seconds between two calls of Spark when the query has no other source


class PollBackoff:
    """When the next poll is due, and the stream's state at the last one."""

    def __init__(
        self, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._empty_at: object = None
        self._last_state: object = None
        self._silent_since = 0.0
        self._returned_at = 0.0
        self._polled_at = 0.0
        self._due = 0.0

    async def wait_until_due(self, start: object) -> bool:
        """Wait until a poll from ``start`` is due; return at once unless the last one was empty.

        Returns False without a wait if the poll is not due and Spark did other work since its last
        call, for example for another source of the same query, which must not wait for this one.
        """
        now = self._clock()
        remaining = self._due - now if start == self._empty_at else 0.0
        if remaining > 0:
            if now - self._returned_at > _POLLING:
                self._returned_at = now
                return False
            await self._sleep(remaining)
        self._polled_at = self._clock()
        return True

    def is_unchanged(self, start: object, state: object, requests: int = 1) -> bool:
        """Whether the state is the same as at the empty poll from ``start``.

        Args:
            requests: the number of requests of the poll.
        """
        if self._last_state is None or start != self._empty_at or state != self._last_state:
            return False
        self._returned_at = now = self._clock()
        interval = (now - self._silent_since) * _SHARE_OF_SILENCE
        interval = min(max(interval, _MIN_INTERVAL), _MAX_INTERVAL)
        self._due = now + max(interval, _slowest(requests))
        return True

    def record_empty(self, start: object, state: object, requests: int = 1) -> None:
        """Record a poll that found no message after ``start``.

        Args:
            state: the state of the stream or streams that the poll covered; None if it did not
                cover all filters, so that the next one must.
        """
        self._returned_at = self._silent_since = now = self._clock()
        self._empty_at, self._last_state = start, state
        interval = _INTERVAL_PER_POLL_TIME * (now - self._polled_at)
        interval = min(max(interval, _MIN_INTERVAL), _MAX_INTERVAL_UNDER_WRITES)
        self._due = now + max(interval, _slowest(requests))

    def reset(self) -> None:
        """Record a poll that found messages."""
        self._empty_at = None


def _slowest(requests: int) -> float:
    return _INTERVAL_PER_REQUEST * requests if requests > 1 else 0.0


class TriggerDelay:
    """Decides whether the rows that are available make a micro-batch.

    Args:
        min_rows: ``minRowsPerTrigger``; None if the query does not wait.
        max_delay: ``maxTriggerDelay``, seconds.
        clock: the time in seconds.
    """

    def __init__(self, min_rows: int | None, max_delay: float, clock: Callable[[], float]) -> None:
        self._min_rows = min_rows
        self._max_delay = max_delay
        self._clock = clock
        self._last_trigger: float | None = None

    def is_due(self, rows: int) -> bool:
        """Whether a micro-batch with ``rows`` available rows begins now."""
        if self._min_rows is None or rows >= self._min_rows or self._last_trigger is None:
            return True
        return self._clock() - self._last_trigger >= self._max_delay

    def record(self) -> None:
        """Record that a micro-batch begins."""
        if self._min_rows is not None:
            self._last_trigger = self._clock()
