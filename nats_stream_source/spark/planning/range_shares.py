"""The shares of several streams in the limits of a micro-batch.

Pure: rows in, limits out. As in Spark's Kafka source, each stream has a share of the limit in
proportion to its available rows; unlike there, the sum never exceeds the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    limit: RangeLimit, demands: Mapping[str, Demand], first: str = ""
) -> dict[str, RangeLimit | None]:
    """The share of each stream in the limits of a micro-batch.

    A range that is read as a whole comes first, and takes what it needs; the first one may exceed
    the limit. The others share the rest. A stream without rows is not limited: its end may move
    all the same, past messages that do not match.

    Args:
        demands: by stream.
        first: the stream that comes first where the limit is too low for all: a name, since each
            micro-batch has other streams. The others follow by name, cyclically.

    Returns:
        for each stream its limit, in the order of their turns; None for all of its range,
        :data:`NOTHING` for none of it.
    """
    # False sorts before True: the names from `first` on, then those before it.
    order = sorted(demands, key=lambda name: (name < first, name))
    result: dict[str, RangeLimit | None] = dict.fromkeys(order)
    rows_left, bytes_left = limit.max_rows, limit.max_bytes
    for name in order:
        demand = demands[name]
        if not demand.whole or not demand.rows:
            continue
        if rows_left == 0 or bytes_left == 0:
            result[name] = NOTHING
            continue
        if rows_left is not None:
            rows_left = max(0, rows_left - demand.rows)
        if bytes_left is not None:
            bytes_left = max(0, bytes_left - max(1, int(demand.nbytes)))
    divisible = [name for name in order if demands[name].rows and not demands[name].whole]
    by_rows = by_bytes = None
    if rows_left is not None:
        by_rows = shares(rows_left, [demands[name].rows for name in divisible])
    if bytes_left is not None:
        by_bytes = shares(bytes_left, [max(1, int(demands[name].nbytes)) for name in divisible])
    for position, name in enumerate(divisible):
        of_rows = None if by_rows is None else by_rows[position]
        of_bytes = None if by_bytes is None else by_bytes[position]
        result[name] = NOTHING if 0 in (of_rows, of_bytes) else RangeLimit(of_rows, of_bytes)
    return result


def next_first(limits: Mapping[str, RangeLimit | None], first: str) -> str:
    """The stream that comes first in the next micro-batch: the first one that had no share."""
    return next((name for name, limit in limits.items() if limit == NOTHING), first)


def shares(limit: int, rows: Sequence[int]) -> list[int]:
    """Shares of ``limit`` in proportion to ``rows``, in sum at most ``limit``.

    A stream with rows has a share of at least 1, unless the limit is lower than the number of such
    streams; then the first ones have it.

    Args:
        rows: the rows available in each stream; a stream without has the share 0.
    """
    active = [index for index, count in enumerate(rows) if count > 0]
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
