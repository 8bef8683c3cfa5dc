"""Taking turns: many may ask a subscription for its next message, one does so at a time.

An ``asyncio.Lock`` with a deadline: who waits for a turn at most so long cannot wait for whoever
has it for ever.
"""

from __future__ import annotations

import asyncio


class Turn:
    """A turn that one task has at a time; in the order of asking."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: list[asyncio.Future[bool]] = []

    def __repr__(self) -> str:
        return f"<Turn {'taken' if self._taken else 'free'} waiting={len(self._waiting)}>"

    async def take(self, timeout: float | None) -> bool:
        """Take the turn, to be given back with :meth:`give`.

        Args:
            timeout: seconds; None to wait for ever.

        Returns:
            False when it was not free in time.
        """
        if not self._taken:
            self._taken = True
            return True
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[bool] = loop.create_future()
        timer = None if timeout is None else loop.call_later(timeout, _late, mine)
        self._waiting.append(mine)
        try:
            return await mine
        except asyncio.CancelledError:
            if not mine.cancelled() and mine.result():
                self.give()  # it was given in the moment of the cancellation
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if mine in self._waiting:
                self._waiting.remove(mine)

    def give(self) -> None:
        """Give the turn to who has waited longest."""
        while self._waiting:
            next_one = self._waiting.pop(0)
            if not next_one.done():
                next_one.set_result(True)
                return
        self._taken = False


def _late(waiting: asyncio.Future[bool]) -> None:
    if not waiting.done():
        waiting.set_result(False)
