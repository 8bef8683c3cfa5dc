"""Faults at the commits of a merge, whichever engine makes them: crashes, and other writers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nats_stream_source.delta.driver.log import DeltaLog
from nats_stream_source.delta.spark import table

# The functions that commit, of each engine: to the table or its state table, the creation, and new
# columns.
_COMMITTING: tuple[tuple[Any, str], ...] = (
    (DeltaLog, "put"),
    (table.SparkTable, "_create"),
    (table.SparkTable, "_write_no_rows"),
    (table, "_merge_as_read"),
)


class Crash(BaseException):
    """Ends a merge where a process would end."""


def crash() -> None:
    raise Crash


class Commits:
    """The commits of a merge, at one of which something happens.

    Args:
        point: the number of the commit, times two; one more for after it.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, point: int, happens: Callable[[], None] = crash
    ) -> None:
        self._monkeypatch = monkeypatch
        self._number, self._after = divmod(point, 2)
        self._happens = happens
        self._count = 0
        self._inside = False
        self.happened = False

    def run(self, work: Callable[[], None]) -> None:
        """Run merges, and what happens at the commit; a merge that crashes is repeated."""
        with self._monkeypatch.context() as patch:
            for of, name in _COMMITTING:
                patch.setattr(of, name, self._wrapped(getattr(of, name)))
            try:
                work()
                return
            except Crash:
                pass
        work()

    def _wrapped(self, commit: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if self._inside:
                return commit(*arguments, **keywords)
            number, self._count = self._count, self._count + 1
            if number == self._number and not self._after:
                self._happen()
            self._inside = True  # a commit of an engine can call that of another module
            try:
                result = commit(*arguments, **keywords)
            finally:
                self._inside = False
            if number == self._number and self._after:
                self._happen()
            return result

        return wrapped

    def _happen(self) -> None:
        self.happened = self._inside = True
        try:
            self._happens()
        finally:
            self._inside = False
