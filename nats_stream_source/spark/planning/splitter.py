"""Limits a range, and cuts it into splits.

The arithmetic is in ``spark.planning.range_math``, the row counts come from
``spark.planning.row_counter``; this module decides which counts are requested, and how long they
may take.

The three options that size a range act here: ``maxRowsPerTrigger``, ``maxBytesPerTrigger`` and
``minPartitions``, all from :class:`CommonOptions`. The planner cannot read the number of tasks that
Spark runs in parallel: its process has no session, Spark context, configuration or variable with it
(Spark 4.2 and 4.3). The driver's number of cores takes its place, which is right for ``local[*]``;
on a cluster ``minPartitions`` raises it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.options import CommonOptions
from nats_stream_source.spark.planning.range_math import (
    RangeLimit,
    limited_end,
    run_search,
    split_count,
    split_ends,
)
from nats_stream_source.spark.planning.row_counter import RowCounter

# Seconds for the ranks of one micro-batch: where a limit can apply, for the ends of splits, and
# where a rank only serves a report.
_LIMIT_SECONDS = 0.06
_SPLIT_SECONDS = 0.012
_REPORT_SECONDS = 0.005
_MAX_LISTED = 10_000  # messages whose subjects are listed to count them


class RangeSplitter:
    """Limits and cuts the ranges of one query.

    Each method takes the stream as the leader has just reported it, and the filters.

    Args:
        options: the limits of a range and its minimum number of splits.
        cores: the number of tasks that run in parallel.
        timer: a clock, in seconds.
    """

    def __init__(self, options: CommonOptions, cores: int, timer: Callable[[], float]) -> None:
        self._options = options
        self._min_splits = options.min_partitions or 1
        self._cores = cores
        self._counter = RowCounter(timer)
        self._rows: dict[tuple[int, int], int] = {}  # of the last range that was limited
        self._match_share: float | None = None  # of the last range's sequences

    async def limit(
        self,
        jetstream: JetStream,
        info: StreamInfo,
        filters: Sequence[str],
        start: int,
        end: int,
        range_limit: RangeLimit | None,
    ) -> tuple[int, int, int]:
        """The end of ``(start, end]`` under the limits, the rows up to it, and those up to ``end``.

        The rows are upper bounds under a limit, otherwise an estimate where a rank takes too long.

        Args:
            range_limit: None for no limit.
        """
        mean = info.nbytes / max(info.messages, 1)
        limit = None if range_limit is None else range_limit.rows(mean)
        counter = self._counter
        self._rows.clear()
        floor = _floor(start, end, info)
        max_rows = min(end - floor, info.messages)
        can_apply = limit is not None and limit < max_rows
        if not can_apply and (not filters or max_rows == 1):
            return end, max_rows, max_rows
        counter.start_planning(jetstream, info, filters)
        total = counter.known_rows(floor, 0 if limit is None else limit // 10)
        if not can_apply:
            if total is None:
                counter.set_budget(_REPORT_SECONDS, 1 if self._match_share is None else 0)
                total = await counter.estimate(floor)
            if total is None:
                share = self._match_share
                rows = max_rows if share is None else round(max_rows * share)
            else:
                self._rows[start, end] = rows = min(max_rows, total)
                self._match_share = rows / max_rows
            return end, rows, rows
        assert limit is not None
        # Without these requests a stream with holes would be cut by sequences again and again.
        counter.set_budget(_LIMIT_SECONDS, 1 if total is not None else 2)

        async def rows_after(seq: int) -> int | None:
            nonlocal total
            if seq == floor:
                total = await counter.upper_bound(floor)
                return total
            return await counter.lower_bound(seq)

        search = limited_end(
            floor,
            end,
            limit,
            shape=counter.shape,
            total=total,
            gaps=counter.missing_sequences(floor),
            rows_beyond=info.last_seq - end,
        )
        limited_to, rows = await run_search(search, rows_after)
        self._rows[start, limited_to] = rows
        return limited_to, rows, max_rows if total is None else min(max_rows, total)

    async def split_ends(
        self,
        jetstream: JetStream,
        info: StreamInfo,
        filters: Sequence[str],
        start: int,
        end: int,
        min_splits: int | None = None,
    ) -> list[int]:
        """The ends of the splits of ``(start, end]``; the last one is ``end``.

        Args:
            min_splits: the minimum number; by default ``minPartitions``.
        """
        at_least = self._min_splits if min_splits is None else min_splits
        counter = self._counter
        mean = info.nbytes / max(info.messages, 1)
        floor = _floor(start, end, info)
        max_rows = min(end - floor, info.messages)
        consumers_left = info.consumers_left
        max_splits = end - start if consumers_left is None else max(consumers_left, 1)

        def splits(rows: int) -> int:
            wanted = split_count(
                end - start, rows, rows * mean, at_least=at_least, cores=self._cores
            )
            return min(wanted, max_splits)

        if splits(max_rows) == 1:
            return [end]
        counter.start_planning(jetstream, info, filters)
        counter.set_budget(_SPLIT_SECONDS)
        # A rank counts to the stream's end, and the range may end before it.
        beyond = 0 if end >= info.last_seq else await counter.lower_bound(end)
        rows = self._rows.get((start, end))
        if rows is None:
            counted = counter.known_rows(floor, 0)
            if counted is None and filters:
                counted = await counter.estimate(floor)
            if counted is not None:
                rows = max(0, counted - (beyond or 0))
            else:
                # Without a count, a filtered range is treated as small.
                rows = 0 if filters else max_rows
        rows = min(rows, max_rows)
        # Sequences below the stream's first one have no rows; use them only if the rest is too few.
        low = floor if end - floor >= splits(rows) else start

        async def rows_between(sequences: Sequence[int]) -> list[int | None]:
            if beyond is None:
                return [None] * len(sequences)
            counts = await counter.lower_bounds(sequences)
            return [None if count is None else max(0, count - beyond) for count in counts]

        search = split_ends(low, end, splits(rows), rows, shape=counter.shape)
        return await run_search(search, rows_between)

    async def count_subjects(
        self, jetstream: JetStream, info: StreamInfo, filters: Sequence[str]
    ) -> int:
        """The number of subjects that match the filters; an estimate where they are too many."""
        self._counter.start_planning(jetstream, info, filters)
        self._counter.set_budget(_REPORT_SECONDS, 1)
        messages = await self._counter.estimate(0) or 0
        if messages > _MAX_LISTED:
            return messages * info.subjects // max(info.messages, 1)
        listed = await asyncio.gather(
            *(jetstream.subjects(info.name, subject_filter) for subject_filter in filters)
        )
        return sum(map(len, listed))


def _floor(start: int, end: int, info: StreamInfo) -> int:
    """``start``, or the sequence before the first message of ``(start, end]``."""
    return max(start, min(info.first_seq, end) - 1)
