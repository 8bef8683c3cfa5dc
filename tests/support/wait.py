"""Waiting for a condition by polling, and a writing thread whose failure fails the test."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
DEADLINE = 60.0  # seconds; only a failing test takes that long
_INTERVAL = 0.01  # seconds


def wait_until(
    condition: Callable[[], T | None],
    what: str,
    deadline: float = DEADLINE,
    *,
    alive: Callable[[], object] = lambda: None,
    seen: Callable[[], object] = lambda: "",
) -> T:
    """Poll ``condition`` until it returns a true value, and return that.

    Args:
        alive: called before each pause; raises when the condition can no longer become true.
    """
    end = time.monotonic() + deadline
    while not (found := condition()):
        alive()
        assert time.monotonic() < end, _message(what, deadline, seen())
        time.sleep(_INTERVAL)
    return found


async def wait_until_async(
    condition: Callable[[], Any], what: str, deadline: float = DEADLINE
) -> None:
    """:func:`wait_until` on an event loop; ``condition`` is a function or a coroutine function."""
    end = time.monotonic() + deadline
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return
        assert time.monotonic() < end, _message(what, deadline, "")
        await asyncio.sleep(_INTERVAL)


def _message(what: str, deadline: float, seen: object) -> str:
    return f"after {deadline:g} s still not: {what}" + (f"; {seen}" if seen else "")


class WriterThread(threading.Thread):
    """Calls :meth:`write_until_stopped`; :meth:`stop` raises its error.

    As a context manager it writes during the block.
    """

    def __init__(self, deadline: float) -> None:
        super().__init__(daemon=True)
        self._deadline = deadline
        self.over = threading.Event()
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def write_until_stopped(self) -> None:
        """Write until ``over`` is set."""
        raise NotImplementedError

    def run(self) -> None:
        try:
            self.write_until_stopped()
        except BaseException as error:  # raised by `stop`
            self.error = error

    def stop(self) -> None:
        self.over.set()
        self.join(self._deadline)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
