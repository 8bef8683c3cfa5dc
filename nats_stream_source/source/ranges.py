"""The planner's arithmetic: pure, without a server.

What needs the server's answers is a generator that yields a sequence and is sent the answer, so
that the planner can ask a real server and a test a list of numbers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

Answer = TypeVar("Answer")
Result = TypeVar("Result")

_MOST_RANKS = 12
_GOOD_ENOUGH = 0.9


def limited_end(start: int, end: int, limit: int) -> Generator[int, int | None, tuple[int, int]]:
    """Where a range that may hold more than ``limit`` rows ends, by rank and interpolation.

    Yields sequences ``s`` and is sent how many rows there are in ``(s, end]``, or None when there
    is no time for more questions. Answers may be of different moments, as long as they err towards
    more rows at the start and fewer elsewhere. Returns
    ``(limited, rows)``: the last sequence of the range, ``start < limited <= end``, and how many
    rows it holds: never more than ``limit``, and at least 90 % of it when that was found within
    12 questions. Rows never exceed sequences, so a range of ``limit`` sequences is right without a
    question, and is the answer that is left when interpolation does not converge.
    """
    if limit < 1:
        raise ValueError("a limit of less than one row")
    if end - start <= limit:
        return end, end - start
    total = yield start
    if total is None:
        return start + limit, limit
    if total <= limit:
        return end, total
    # Invariant: rows in (start, low] are `low_rows` <= limit < rows in (start, high].
    low, low_rows = start, 0
    high, high_rows = end, total
    for question in range(_MOST_RANKS - 1):
        if low_rows >= _GOOD_ENOUGH * limit or high - low <= 1:
            break
        if question % 3 == 2:
            middle = (low + high) // 2  # interpolation alone crawls where holes lie in clusters
        else:
            aim = limit - limit // 20
            middle = low + (high - low) * (aim - low_rows) // max(high_rows - low_rows, 1)
            middle = min(max(middle, low + 1), high - 1)
        beyond = yield middle
        if beyond is None:
            break
        rows = total - beyond
        if rows <= limit:
            low, low_rows = middle, rows
        else:
            high, high_rows = middle, rows
    # What follows `low` holds at most one row per sequence: free to take up to the limit.
    # Not bounded by `high`: where answers of different moments contradict each other, that bound
    # may leave nothing, and the query would stand still.
    free = min(low + limit - low_rows, end)
    if low_rows < _GOOD_ENOUGH * limit and free > low:
        return free, min(low_rows + free - low, limit)
    return low, low_rows


def first_after(low: int, high: int) -> Generator[int, bool, int]:
    """The smallest sequence in ``[low, high]`` that is sent True; ``high + 1`` if none is. Bisects.

    Yields a sequence, is sent whether it (or the next existing message) lies after the point looked
    for. The answers must be monotonic: False up to some sequence, True from there on.
    """
    low, high = low, high + 1
    while low < high:
        middle = (low + high) // 2
        if (yield middle):
            high = middle
        else:
            low = middle + 1
    return low


def moves_on(position: int, first_seq: int, last_seq: int) -> bool:
    """Whether a query without matching rows shall move its offset on to ``last_seq``.

    A filter that rarely matches must not leave the offset behind, or retention passes it and the
    query is told of a loss that is none. Moving on costs an empty micro-batch, so it waits until
    the position lies in the older half of the stream.
    """
    return position < last_seq and position - first_seq < last_seq - position


async def answered(
    questions: Generator[int, Answer, Result], answer: Callable[[int], Awaitable[Answer]]
) -> Result:
    """Run a question generator of this module, each question put to ``answer``; its result."""
    try:
        question = next(questions)
        while True:
            question = questions.send(await answer(question))
    except StopIteration as end:
        result: Result = end.value
        return result
