"""The planner's range arithmetic: pure, without a server.

A computation that depends on the server's counts is a generator: it yields sequences and receives
counts. The planner runs it with requests to the leader (:func:`run_search`), a test with a list of
numbers. A count may be None when the time budget is spent. Then the arithmetic uses the number of
sequences, which is never lower than the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

Query = TypeVar("Query")
Response = TypeVar("Response")
Result = TypeVar("Result")

_MAX_RANKS = 12  # for the end of a range
_MAX_ROUNDS = 4  # of requests for the ends of splits: one request, then several in parallel
_MAX_PARALLEL = 16
_MIN_FILL = 0.9  # of a limit
_BALANCE_TOLERANCE = 0.1  # of a split's rows: accepted distance of a split's end from its target

ROWS_PER_SPLIT = 500_000  # about a second of reading
BYTES_PER_SPLIT = 128 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """An estimate of how a stream's messages are distributed over its sequences.

    A bucket's entry is removed when its key is written again. Where keys are overwritten at random,
    the share of entries that are left falls exponentially with their age, by ``decay`` per
    sequence. Without removals the share is constant: ``decay`` is 0. The first guesses of the
    searches come from it; a wrong estimate costs requests or balance, never rows.
    """

    decay: float = 0.0

    @classmethod
    def of(cls, sequences: int, messages: int) -> Shape:
        """From the number of sequences and of the messages that are left of them."""
        left = messages / sequences if sequences > 0 else 1.0
        if not 0 < left < 1:
            return EVEN
        # The newest entries are all left: (1 - exp(-x)) / x is the share over all, x = decay *
        # sequences.
        low, high = 0.0, 1 / left
        for _ in range(50):
            x = (low + high) / 2
            if -math.expm1(-x) / x > left:
                low = x
            else:
                high = x
        return cls(low / sequences)

    def between(self, low: int, high: int, share: float) -> int:
        """The sequence between ``low`` and ``high`` up to which ``share`` of the rows lie."""
        share = min(max(share, 0.0), 1.0)
        steps = self.decay * (high - low)
        if steps < 1e-6:
            seq = low + int((high - low) * share)
        else:
            # exp(-steps) is the density at `low`, 1 that at `high`.
            weight = math.exp(-steps) - share * math.expm1(-steps)
            seq = high + int(math.log(weight) / self.decay) if weight > 0 else low
        return min(max(seq, low + 1), high - 1)


EVEN = Shape()


def limited_end(
    start: int,
    end: int,
    limit: int,
    *,
    shape: Shape = EVEN,
    total: int | None = None,
    gaps: int | None = None,
    rows_beyond: int = 0,
) -> Generator[int, int | None, tuple[int, int]]:
    """Limit a range that may have more than ``limit`` rows, by ranks and interpolation.

    Yields sequences ``s`` and receives the number of rows in ``(s, end]``, or None when the time
    budget is spent. Counts may be of different points in time, as long as they err towards more
    rows at the start and fewer elsewhere. Returns ``(limited, rows)``: the last sequence of the
    range, ``start < limited <= end``, and its number of rows: never more than ``limit``, and at
    least 90 % of it if 12 requests suffice to find that. Rows never exceed sequences, so a range of
    ``limit`` sequences is valid without a request. It is the result when interpolation does not
    converge. It is also the immediate result where so many of the sequences up to ``end`` have a
    row that requests would not reduce the number of ranges: some ranges may then have less than
    90 %.

    Args:
        total: the rows of the range, or more, if known: then they are not requested.
        gaps: the number of its sequences without a row, if known.
        rows_beyond: the maximum number of counted rows that lie beyond ``end``.
    """
    if limit < 1:
        raise ValueError(f"could not limit a range: limit is {limit}, expected at least 1 row")
    if end - start <= limit:
        return end, end - start if total is None else min(total, end - start)
    if gaps is not None and _needs_no_more_ranges(end - start, end - start - gaps, limit):
        return start + limit, limit
    if total is None:
        total = yield start
    if total is None:
        return start + limit, limit
    if total <= limit:
        return end, total
    if _needs_no_more_ranges(end - start, total - rows_beyond, limit):
        return start + limit, limit
    # Invariant: rows in (start, low] are `low_rows` <= limit < rows in (start, high].
    low, low_rows = start, 0
    high, high_rows = end, total
    for request in range(_MAX_RANKS - 1):
        if low_rows >= _MIN_FILL * limit or high - low <= 1:
            break
        if request % 3 == 2:
            middle = (low + high) // 2  # interpolation alone is slow where holes are clustered
        else:
            target = limit - limit // 20
            middle = shape.between(low, high, (target - low_rows) / max(high_rows - low_rows, 1))
        beyond = yield middle
        if beyond is None:
            break
        rows = total - beyond
        if not limit / 2 <= rows <= 2 * limit:
            shape = EVEN  # the estimate was wrong
        if rows <= limit:
            low, low_rows = middle, max(rows, 0)
        else:
            high, high_rows = middle, rows
    # The sequences after `low` have at most one row each: take as many as the limit allows.
    # Not bounded by `high`: where counts of different times contradict each other, that bound may
    # leave an empty range, and the query would not advance.
    free = min(low + limit - low_rows, end)
    if low_rows < _MIN_FILL * limit and free > low:
        return free, min(low_rows + free - low, limit)
    return low, low_rows


def _needs_no_more_ranges(sequences: int, rows: int, limit: int) -> bool:
    """Whether ranges of ``limit`` sequences are at most as many as sufficiently full ranges."""
    return math.ceil(sequences / limit) <= math.ceil(rows / (_MIN_FILL * limit))


@dataclass(frozen=True, slots=True)
class RangeLimit:
    """The limits of a range: rows and bytes, each None without a limit."""

    max_rows: int | None
    max_bytes: int | None = None

    def rows(self, mean: float) -> int | None:
        """The maximum rows under both limits, None without; ``mean`` is the bytes of a message."""
        if self.max_bytes is None:
            return self.max_rows
        by_bytes = max(1, int(self.max_bytes / max(mean, 1.0)))
        return by_bytes if self.max_rows is None else min(self.max_rows, by_bytes)


def split_count(sequences: int, rows: int, nbytes: float, *, at_least: int, cores: int) -> int:
    """The number of splits of a range: one, unless it is large or ``at_least`` is higher.

    A split costs a consumer, a task, and the messages that the server sends beyond its end before
    the consumer is deleted: up to 20 MB. So a range has at most ``cores`` splits, each with 500,000
    rows or 128 MiB; with ``minPartitions`` at least that many, up to one per sequence.
    """
    wanted = min(cores, max(rows // ROWS_PER_SPLIT, int(nbytes) // BYTES_PER_SPLIT))
    return max(1, min(max(wanted, at_least), sequences))


def split_ends(
    start: int, end: int, count: int, total: int, *, shape: Shape = EVEN
) -> Generator[Sequence[int], Sequence[int | None], list[int]]:
    """The ends of ``count`` splits of ``(start, end]`` with about as many rows each.

    Yields sequences ``s``, a few at a time, and receives the number of rows in ``(s, end]`` for
    each, or None. For any counts the result is ``count`` increasing sequences, the last of them
    ``end``: splits without a hole, an overlap, or an empty range.

    Args:
        count: at most the number of sequences.
        total: the rows of the range, or an estimate.
    """
    if not 1 <= count <= end - start:
        raise ValueError(
            f"could not split ({start}, {end}]: it cannot be cut into {count} splits, expected 1 "
            f"to {end - start}"
        )
    total = max(total, 1)
    # Sequences, and the number of rows up to each. The first and the last are not requested.
    knots = [(start, 0), (end, total)]
    targets = [total * i // count for i in range(1, count)]
    for round_ in range(_MAX_ROUNDS):
        guesses = [_seq_of_rows(knots, rows, total // count, shape) for rows in targets]
        open_guesses = [seq for seq, final in guesses if not final]
        if not open_guesses:
            break
        # The first request alone shows what one costs, and how good the estimate is.
        step = len(open_guesses) if round_ == 0 else -(-len(open_guesses) // _MAX_PARALLEL)
        requested = sorted(set(open_guesses[(step - 1) // 2 :: step]))
        counts = yield requested
        for seq, beyond in zip(requested, counts, strict=True):
            if beyond is not None:
                _add_knot(knots, seq, total - beyond)
                if round_ == 0 and not total / 4 <= beyond <= 3 * total / 4:
                    shape = EVEN  # the estimate was wrong: this should be the middle
        if any(beyond is None for beyond in counts):
            break
    guesses = [_seq_of_rows(knots, rows, total // count, shape) for rows in targets]
    return _increasing([seq for seq, _ in guesses], start, end)


def _seq_of_rows(
    knots: Sequence[tuple[int, int]], rows: int, size: int, shape: Shape
) -> tuple[int, bool]:
    """The sequence up to which there are about ``rows`` rows, and whether it is accurate enough."""
    above = next(i for i, (_, known) in enumerate(knots) if i and known >= rows)
    (low, low_rows), (high, high_rows) = knots[above - 1], knots[above]
    for i in (above - 1, above):
        if 0 < i < len(knots) - 1 and abs(knots[i][1] - rows) <= _BALANCE_TOLERANCE * size:
            return knots[i][0], True
    if high - low <= 1:
        return high, True
    return shape.between(low, high, (rows - low_rows) / max(high_rows - low_rows, 1)), False


def _add_knot(knots: list[tuple[int, int]], seq: int, rows: int) -> None:
    """Insert a count, bounded by its neighbours: counts may be of different points in time."""
    above = next(i for i, (known, _) in enumerate(knots) if known >= seq)
    if knots[above][0] != seq:
        knots.insert(above, (seq, min(max(rows, knots[above - 1][1]), knots[above][1])))


def _increasing(sequences: Sequence[int], start: int, end: int) -> list[int]:
    """``sequences`` and ``end``, moved apart where they coincide, so that no split is empty."""
    count = len(sequences) + 1
    ends, last = [], start
    for i, seq in enumerate(sequences, start=1):
        last = min(max(seq, last + 1), end - (count - i))
        ends.append(last)
    return [*ends, end]


def first_after(low: int, high: int) -> Generator[int, bool, int]:
    """The lowest sequence in ``[low, high]`` that receives True; ``high + 1`` if none. Bisects.

    Yields a sequence and receives whether it (or the next existing message) lies after the searched
    point. The responses must be monotonic: False up to some sequence, True from there on.
    """
    low, high = low, high + 1
    while low < high:
        middle = (low + high) // 2
        if (yield middle):
            high = middle
        else:
            low = middle + 1
    return low


def should_advance(position: int, first_seq: int, last_seq: int) -> bool:
    """Whether a query without matching rows should advance its offset to ``last_seq``.

    Without this, retention would pass the offset of a query whose filter rarely matches, and the
    query would report a data loss although it lost no message. Advancing costs an empty
    micro-batch, so it waits until the position lies in the older half of the stream.
    """
    return position < last_seq and position - first_seq < last_seq - position


async def run_search(
    search: Generator[Query, Response, Result],
    request: Callable[[Query], Awaitable[Response]],
) -> Result:
    """Run a generator of this module, with ``request`` for each value it yields; its result."""
    try:
        query = next(search)
        while True:
            query = search.send(await request(query))
    except StopIteration as end:
        result: Result = end.value
        return result
