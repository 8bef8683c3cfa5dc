"""What several streams share: the limits of a micro-batch, and the tasks that read their splits.

*Limits.* As in Spark's Kafka source, each stream has a share of the limit in proportion to its
available rows; unlike there, the sum never exceeds the limit.

*Tasks.* As with Spark's small files (``spark.sql.files.openCostInBytes``), small splits share a
task, and each one counts as some rows more than it has.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.spark.planning.limits import ROWS_PER_SPLIT, RangeLimit
from nats_stream_source.spark.planning.stream_states import MAX_STREAMS

NOTHING = RangeLimit(0)
"""The limit of a range that is not read in this micro-batch."""

OPEN_COST = 5_000
"""Rows that a task reads in the time that it takes to open one more split."""

S = TypeVar("S")


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
    the limit. The others share the rest; each has one row at least, while some are left. A stream
    without rows is not limited: its end may move all the same, past messages that do not match.

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
    rows_left = math.inf if limit.max_rows is None else limit.max_rows
    bytes_left = math.inf if limit.max_bytes is None else limit.max_bytes
    for name in order:
        if demands[name].whole and demands[name].rows:
            if rows_left <= 0 or bytes_left <= 0:
                result[name] = NOTHING
            rows_left -= demands[name].rows
            bytes_left -= demands[name].nbytes
    divisible = (name for name in order if demands[name].rows and not demands[name].whole)
    shared = {name: demands[name] for name in divisible}
    row_of = {name: demand.nbytes / demand.rows for name, demand in shared.items()}
    by_rows = (rows_left - len(shared)) / max(1, sum(one.rows for one in shared.values()))
    by_bytes = (bytes_left - sum(row_of.values())) / max(
        1.0, sum(one.nbytes for one in shared.values())
    )
    fraction = max(0.0, min(1.0, by_rows, by_bytes))
    rows_of = {name: 1 + int(demand.rows * fraction) for name, demand in shared.items()}
    if 0 < by_rows == fraction:
        rows_of[next(iter(shared))] += int(rows_left) - sum(rows_of.values())
    for name, rows in rows_of.items():
        result[name] = RangeLimit(rows) if rows_left >= rows and bytes_left > 0 else NOTHING
        rows_left -= rows
        bytes_left -= rows * row_of[name]
    return result


def next_first(limits: Mapping[str, RangeLimit | None], first: str) -> str:
    """The stream that comes first in the next micro-batch: the first one that had no share."""
    return next((name for name, limit in limits.items() if limit == NOTHING), first)


async def plan_tasks(
    rows: Mapping[str, int],
    plan: Callable[[str, int], Awaitable[Sequence[tuple[S, int]]]],
    *,
    min_partitions: int,
    cores: int,
) -> list[tuple[S, ...]]:
    """The splits of all streams, by the task that reads them.

    Args:
        rows: the rows by stream, or estimates.
        plan: returns the splits of a stream, at least as many as its second argument, and the rows
            of each.
        cores: the number of tasks that run in parallel.
    """
    total = sum(max(1, count) for count in rows.values())

    async def plan_one(stream: str) -> Sequence[tuple[S, int]]:
        return await plan(stream, max(1, min_partitions * max(1, rows[stream]) // total))

    planned = await gather_limited(plan_one, list(rows), MAX_STREAMS)
    splits = [split for of_stream in planned for split in of_stream]
    if len(rows) <= 1:  # its splits are as large as a task
        return [(split,) for split, _ in splits]
    groups = group_splits([count for _, count in splits], at_least=min_partitions, cores=cores)
    return [tuple(splits[index][0] for index in group) for group in groups]


def group_splits(rows: Sequence[int], *, at_least: int, cores: int) -> list[list[int]]:
    """Groups of splits, by their indices, each of which one task reads in this order.

    There are at most as many groups as splits, and no more than ``at_least``, ``cores`` or the rows
    justify. The groups have about as many rows each.

    Args:
        rows: the rows of each split, or estimates.
        at_least: the minimum number of groups, if there are so many splits.
        cores: the number of tasks that run in parallel.
    """
    weights = [count + OPEN_COST for count in rows]
    wanted = min(cores, -(-sum(weights) // ROWS_PER_SPLIT))
    count = min(len(weights), max(wanted, at_least, 1))
    loads = [(0, group) for group in range(count)]
    groups: list[list[int]] = [[] for _ in loads]
    for index in sorted(range(len(weights)), key=lambda index: -weights[index]):
        load, group = heapq.heappop(loads)
        groups[group].append(index)
        heapq.heappush(loads, (load + weights[index], group))
    return [sorted(group) for group in groups]
