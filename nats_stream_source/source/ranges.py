"""The planner's arithmetic: pure, without a server.

What needs the server's answers is a generator that yields sequences and is sent the answers, so
that the planner can ask a real server and a test a list of numbers. An answer may be None: there is
no time for more questions. Then sequences have to do, which are never fewer than rows.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")
Result = TypeVar("Result")

_MOST_RANKS = 12  # for the end of a range
_ROUNDS = 4  # of questions for the borders between splits: one, then …
_MOST_AT_ONCE = 16
_GOOD_ENOUGH = 0.9  # of a limit
_BALANCED = 0.1  # of a split's rows: how far a border may lie from its place

ROWS_PER_SPLIT = 500_000  # about a second of reading
BYTES_PER_SPLIT = 128 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """A guess at how a stream's messages lie between its sequences: first guesses come from it.

    A bucket's entry goes away when its key is written again. Where keys are overwritten at random,
    the share of entries that are left falls exponentially with their age, by ``decay`` a sequence.
    Where nothing goes away, it is the same everywhere: ``decay`` is 0. A wrong guess costs
    questions or balance, never rows.
    """

    decay: float = 0.0

    @classmethod
    def of(cls, sequences: int, messages: int) -> Shape:
        """From how many messages are left of how many sequences."""
        left = messages / sequences if sequences > 0 else 1.0
        if not 0 < left < 1:
            return EVEN
        # All is left of the newest: (1 - exp(-x)) / x is the share over all, x = decay * sequences.
        low, high = 0.0, 1 / left
        for _ in range(50):
            x = (low + high) / 2
            if -math.expm1(-x) / x > left:
                low = x
            else:
                high = x
        return cls(low / sequences)

    def between(self, low: int, high: int, share: float) -> int:
        """The sequence up to which ``share`` of the rows in ``(low, high]`` lie; inside of it."""
        share = min(max(share, 0.0), 1.0)
        steps = self.decay * (high - low)
        if steps < 1e-6:
            found = low + int((high - low) * share)
        else:
            # exp(-steps) is the density at `low`, 1 that at `high`.
            weight = math.exp(-steps) - share * math.expm1(-steps)
            found = high + int(math.log(weight) / self.decay) if weight > 0 else low
        return min(max(found, low + 1), high - 1)


EVEN = Shape()


def limited_end(
    start: int,
    end: int,
    limit: int,
    *,
    shape: Shape = EVEN,
    total: int | None = None,
    gaps: int | None = None,
    behind: int = 0,
) -> Generator[int, int | None, tuple[int, int]]:
    """Where a range that may hold more than ``limit`` rows ends, by rank and interpolation.

    Yields sequences ``s`` and is sent how many rows there are in ``(s, end]``, or None when there
    is no time for more questions. Answers may be of different moments, as long as they err towards
    more rows at the start and fewer elsewhere. Returns
    ``(limited, rows)``: the last sequence of the range, ``start < limited <= end``, and how many
    rows it holds: never more than ``limit``, and at least 90 % of it when that was found within
    12 questions. Rows never exceed sequences, so a range of ``limit`` sequences is right without a
    question. It is the answer that is left when interpolation does not converge, and the first one
    where so many of the sequences up to ``end`` have a row that questions would not make the ranges
    fewer: some of them may then hold less than 90 %.

    Args:
        total: the rows of the range, or more, where that is known: then it is not asked for.
        gaps: how many of its sequences have no row, where that is known.
        behind: how many of the rows that are counted may lie behind ``end``.
    """
    if limit < 1:
        raise ValueError("a limit of less than one row")
    if end - start <= limit:
        return end, end - start if total is None else min(total, end - start)
    if gaps is not None and _as_few(end - start, end - start - gaps, limit):
        return start + limit, limit
    if total is None:
        total = yield start
    if total is None:
        return start + limit, limit
    if total <= limit:
        return end, total
    if _as_few(end - start, total - behind, limit):
        return start + limit, limit
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
            middle = shape.between(low, high, (aim - low_rows) / max(high_rows - low_rows, 1))
        beyond = yield middle
        if beyond is None:
            break
        rows = total - beyond
        if not limit / 2 <= rows <= 2 * limit:
            shape = EVEN  # a guess that failed once
        if rows <= limit:
            low, low_rows = middle, max(rows, 0)
        else:
            high, high_rows = middle, rows
    # What follows `low` holds at most one row per sequence: free to take up to the limit.
    # Not bounded by `high`: where answers of different moments contradict each other, that bound
    # may leave nothing, and the query would stand still.
    free = min(low + limit - low_rows, end)
    if low_rows < _GOOD_ENOUGH * limit and free > low:
        return free, min(low_rows + free - low, limit)
    return low, low_rows


def _as_few(sequences: int, rows: int, limit: int) -> bool:
    """Whether ranges of ``limit`` sequences are no more than ranges of good enough rows."""
    return math.ceil(sequences / limit) <= math.ceil(rows / (_GOOD_ENOUGH * limit))


def row_limit(rows: int | None, nbytes: int | None, mean: float) -> int | None:
    """The most rows that keep both limits, None where there is none; ``mean`` bytes a message."""
    if nbytes is None:
        return rows
    fitting = max(1, int(nbytes / max(mean, 1.0)))
    return fitting if rows is None else min(rows, fitting)


def split_count(sequences: int, rows: int, nbytes: float, *, at_least: int, cores: int) -> int:
    """How many splits a range is cut into: one, unless it is large or ``at_least`` says more.

    A split costs a consumer and a task, and what the server sends beyond its end before the
    consumer is deleted: up to 20 MB. So there are no more than ``cores``, each with 500,000 rows or
    128 MiB; with ``minPartitions`` as many as that, as far as there are sequences.
    """
    wanted = min(cores, max(rows // ROWS_PER_SPLIT, int(nbytes) // BYTES_PER_SPLIT))
    return max(1, min(max(wanted, at_least), sequences))


def borders(
    start: int, end: int, parts: int, total: int, *, shape: Shape = EVEN
) -> Generator[Sequence[int], Sequence[int | None], list[int]]:
    """The ends of ``parts`` splits of ``(start, end]`` with about as many rows each.

    Yields sequences ``s``, a few at a time, and is sent how many rows there are in ``(s, end]``,
    or None. Whatever the answers are, the result is ``parts`` growing sequences, the last of them
    ``end``: splits without a hole or an overlap, none without a sequence.

    Args:
        parts: at most the number of sequences.
        total: the rows of the range, or an estimate.
    """
    if not 1 <= parts <= end - start:
        raise ValueError(f"({start}, {end}] cannot be cut into {parts} splits")
    total = max(total, 1)
    # Sequences, and how many rows there are up to them. The first and the last are never asked.
    knots = [(start, 0), (end, total)]
    for round_ in range(_ROUNDS):
        places = [_place(knots, total * i // parts, total // parts, shape) for i in range(1, parts)]
        guesses = [seq for seq, settled in places if not settled]
        if not guesses:
            break
        # The first question alone tells what one costs, and how good the guess is.
        step = len(guesses) if round_ == 0 else -(-len(guesses) // _MOST_AT_ONCE)
        asked = sorted(set(guesses[(step - 1) // 2 :: step]))
        answers = yield asked
        for seq, beyond in zip(asked, answers, strict=True):
            if beyond is not None:
                _add(knots, seq, total - beyond)
                if round_ == 0 and not total / 4 <= beyond <= 3 * total / 4:
                    shape = EVEN  # it was to be the middle
        if any(answer is None for answer in answers):
            break
    places = [_place(knots, total * i // parts, total // parts, shape) for i in range(1, parts)]
    return _growing([seq for seq, _ in places], start, end)


def _place(
    knots: Sequence[tuple[int, int]], rows: int, size: int, shape: Shape
) -> tuple[int, bool]:
    """About the sequence up to which there are ``rows`` rows, and whether it is known to be."""
    above = next(i for i, (_, known) in enumerate(knots) if i and known >= rows)
    (low, low_rows), (high, high_rows) = knots[above - 1], knots[above]
    for i in (above - 1, above):
        if 0 < i < len(knots) - 1 and abs(knots[i][1] - rows) <= _BALANCED * size:
            return knots[i][0], True
    if high - low <= 1:
        return high, True
    return shape.between(low, high, (rows - low_rows) / max(high_rows - low_rows, 1)), False


def _add(knots: list[tuple[int, int]], seq: int, rows: int) -> None:
    """Insert what was answered, bent to what is known: answers may be of different moments."""
    above = next(i for i, (known, _) in enumerate(knots) if known >= seq)
    if knots[above][0] != seq:
        knots.insert(above, (seq, min(max(rows, knots[above - 1][1]), knots[above][1])))


def _growing(places: Sequence[int], start: int, end: int) -> list[int]:
    """``places`` and ``end``, moved apart where they coincide, so that each has a sequence."""
    parts = len(places) + 1
    found, last = [], start
    for i, place in enumerate(places, start=1):
        last = min(max(place, last + 1), end - (parts - i))
        found.append(last)
    return [*found, end]


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
    questions: Generator[Question, Answer, Result],
    answer: Callable[[Question], Awaitable[Answer]],
) -> Result:
    """Run a question generator of this module, each question put to ``answer``; its result."""
    try:
        question = next(questions)
        while True:
            question = questions.send(await answer(question))
    except StopIteration as end:
        result: Result = end.value
        return result
