"""The tasks of a batch or micro-batch: the splits of its streams, small ones together.

As with Spark's small files (``spark.sql.files.openCostInBytes``), small splits share a task, and
each one counts as some rows more than it has.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.spark.planning.limits import ROWS_PER_SPLIT
from nats_stream_source.spark.planning.stream_states import MAX_STREAMS

OPEN_COST = 5_000
"""Rows that a task reads in the time that it takes to open one more split."""

S = TypeVar("S")


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
