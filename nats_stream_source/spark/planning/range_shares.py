"""The shares of several streams in the limits of a micro-batch.

Pure: rows in, limits out. As in Spark's Kafka source, each stream has a share of the limit in
proportion to its available rows; unlike there, the sum never exceeds the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nats_stream_source.spark.planning.limits import RangeLimit

NOTHING = RangeLimit(0)
"""The limit of a range that is not read in this micro-batch."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a stream has for a micro-batch.

    Attributes:
        rows, nbytes: available rows and their size in bytes, or estimates.
        whole: whether all of it is read, or nothing.
    """

    rows: int
    nbytes: float
    whole: bool = False


def share_limits(
    limit: RangeLimit, demands: Sequence[Demand], first: int = 0
) -> list[RangeLimit | None]:
    """The share of each stream in the limits of a micro-batch.

    A range that is read as a whole comes first, and takes what it needs; the first one may exceed
    the limit. The others share the rest. A stream without rows is not limited: its end may move
    all the same, past messages that do not match.

    Args:
        first: the index of the stream that comes first where the limit is too low for all.

    Returns:
        for each stream its limit; None for all of its range, :data:`NOTHING` for none of it.
    """
    result: list[RangeLimit | None] = [None] * len(demands)
    rows_left, bytes_left = limit.max_rows, limit.max_bytes
    for index in [*range(first, len(demands)), *range(first)]:
        demand = demands[index]
        if not demand.whole or not demand.rows:
            continue
        if rows_left == 0 or bytes_left == 0:
            result[index] = NOTHING
            continue
        if rows_left is not None:
            rows_left = max(0, rows_left - demand.rows)
        if bytes_left is not None:
            bytes_left = max(0, bytes_left - max(1, int(demand.nbytes)))
    divisible = [i for i, demand in enumerate(demands) if demand.rows and not demand.whole]
    start = sum(index < first for index in divisible)
    by_rows = by_bytes = None
    if rows_left is not None:
        by_rows = shares(rows_left, [demands[i].rows for i in divisible], start)
    if bytes_left is not None:
        sizes = [max(1, int(demands[i].nbytes)) for i in divisible]
        by_bytes = shares(bytes_left, sizes, start)
    for position, index in enumerate(divisible):
        of_rows = None if by_rows is None else by_rows[position]
        of_bytes = None if by_bytes is None else by_bytes[position]
        result[index] = NOTHING if 0 in (of_rows, of_bytes) else RangeLimit(of_rows, of_bytes)
    return result


def shares(limit: int, rows: Sequence[int], first: int = 0) -> list[int]:
    """Shares of ``limit`` in proportion to ``rows``, in sum at most ``limit``.

    A stream with rows has a share of at least 1, unless the limit is lower than the number of such
    streams; then those from the index ``first`` on have it, cyclically.

    Args:
        rows: the rows available in each stream; a stream without has the share 0.
    """
    order = [*range(first, len(rows)), *range(min(first, len(rows)))]
    active = [index for index in order if rows[index] > 0]
    result = [0] * len(rows)
    if limit <= len(active):
        for index in active[: max(limit, 0)]:
            result[index] = 1
        return result
    total = sum(rows[index] for index in active)
    spare = limit - len(active)
    for index in active:
        result[index] = 1 + spare * rows[index] // total
    for index in active[: limit - sum(result)]:
        result[index] += 1
    return result
