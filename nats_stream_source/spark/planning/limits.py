"""Limits a range by rows and bytes, and cuts it into splits of about as many rows.

A limit is an upper bound. Rows never exceed sequences, so a range of ``limit`` sequences needs no
request. Where holes (messages that were removed or do not match) would leave it with much fewer
rows, the server counts: what is left, what follows an estimated end, and what follows other ends
where the estimate was wrong, at most three times. The rows of a range are the difference of two
counts, between which others write and the stream is compacted. The first count is an upper bound: a
message that it has can only be removed. The second one minus the messages written since is a lower
bound; their number is in ``STREAM.INFO`` after it.

The next range starts where the last one ended, whose count is then what is left: unless much was
written since, a planning counts once. The density before that start is its first estimate. An end
that had too many rows bounds the next search too: where rows begin to lie close together, each
planning narrows it. Where few holes are left, no range has many, and the planning does not count.

A replica that lags counts too few. The leader reports its lag in operations, each of which may
store thousands of messages, so counts are not used while a replica lags. (Operations that a replica
has logged but not applied are not reported: a count may lack the newest few messages.)
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.errors import ConsumerLimitError
from nats_stream_source.jetstream.direct_get.request import MessageCount, count_messages
from nats_stream_source.jetstream.stream_identity import Identity, KnownStream, compare
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.rows.base import StreamView
from nats_stream_source.spark.planning.stream_states import MAX_STREAMS

S = TypeVar("S")

ROWS_PER_SPLIT = 500_000  # about a second of reading
BYTES_PER_SPLIT = 128 << 20
_MAX_ENDS = 3  # ends of a range that are counted; one less if what is left is counted too
_STEEP = 4  # of the limit: rows that are not explained by a wrong estimate of an even density
_MAX_ROUNDS = 3  # of parallel counts for the ends of splits
_MIN_PARALLEL, _MAX_PARALLEL = 3, 7
_BALANCE = 1.25  # of the mean: rows of a split that need no other round


@dataclass(frozen=True, slots=True)
class _Counted:
    """What a planning counted: the messages after the start of a range, and after its end.

    Attributes:
        beyond: a sequence up to which there were more rows than the limit, and the messages after
            it: the next planning does not search beyond.
        density: rows per sequence where it counted last; None if unknown.
    """

    view: StreamView
    counts: Mapping[int, MessageCount]
    beyond: tuple[int, int]
    density: float | None

    @property
    def seq(self) -> int:
        """The last sequence after which it counted."""
        return max(self.counts)

    @property
    def rows(self) -> int:
        """The rows after ``seq``."""
        return self.counts[self.seq].messages


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


class Limits:
    """Limits and cuts the ranges of one query on one stream.

    Args:
        cores: the driver's cores, since the planner's process cannot read the number of tasks that
            run in parallel (Spark 4.2 and 4.3); on a cluster ``minPartitions`` raises it.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._last: _Counted | None = None

    def forget(self) -> None:
        """Forget all counts: the stream has other messages now."""
        self._last = None

    def _counted(self, view: StreamView) -> _Counted | None:
        """What was counted last, unless it was of another stream or scope."""
        if (last := self._last) is None or last.view.scope != view.scope:
            return None
        return last if _is_same(last.view.info, view.info) else None

    async def limit(
        self, view: StreamView, start: int, end: int, range_limit: RangeLimit | None
    ) -> tuple[int, int, int]:
        """The end of ``(start, end]`` under the limits, the rows up to it, and those up to ``end``.

        Under a limit that can apply, the rows are upper bounds, otherwise an estimate.
        """
        info, filters = view.info, view.scope.effective_filters
        low = max(start, min(info.first_seq, end) - 1)
        max_rows = min(end - low, info.messages)
        holes = math.inf if filters else info.num_deleted
        limit = None if range_limit is None else range_limit.rows(info.mean_size)
        if (last := self._counted(view)) is not None and last.seq <= start:
            # Each message that was written since is a row; or it is a hole, or has left one.
            max_rows = min(max_rows, last.rows + info.last_seq - last.view.info.last_seq)
            holes = min(holes, info.last_seq - last.seq - last.rows)
        try:
            if limit is None or max_rows <= limit:
                if filters and max_rows > 1:
                    max_rows = min(max_rows, (await self._count(view, start)).messages)
                return end, max_rows, max_rows
            if 2 * holes > limit and not info.has_lagging_replica:
                limited = await self._limit_by_counts(view, start, end, limit)
                if limited is not None:
                    return limited
        except ConsumerLimitError:
            pass  # the readers need the consumers that are left
        limited_end = end if limit is None else min(end, low + limit)
        return limited_end, min(max_rows, limited_end - low), max_rows

    async def _limit_by_counts(
        self, view: StreamView, start: int, end: int, limit: int
    ) -> tuple[int, int, int] | None:
        """The result of :meth:`limit`; None where the counts are not an upper bound."""
        info = now = view.info
        last, known, density, written = self._counted(view), None, None, 0
        if last is not None:
            known, density = last.counts.get(start), last.density
            written = info.last_seq - last.view.info.last_seq
        if requested := known is None or 4 * written > limit:
            total = await _count_after(view, start)
        else:
            total = replace(known, messages=known.messages + written)
        counts = {start: total}
        low = total.gap_end(max(start, min(info.first_seq, end) - 1), end), 0
        # At most all sequences after `end` have a row; most have one, since they are recent.
        high = end, total.messages - (info.last_seq - end)
        if last is not None and low[0] < (seq := last.beyond[0]) < end:
            rows = min(last.rows, total.messages) - last.beyond[1]
            high = (seq, rows) if rows > limit else high
        lows, decay = [low], _decay(info)
        for _ in range(_MAX_ENDS - requested):
            holes = high[0] - low[0] - (high[1] - low[1])
            if total.messages <= limit or 2 * holes <= limit - low[1]:
                break
            middle = next_end(low, high, limit, density, decay)
            if middle is None:
                break
            requested, rest = True, await _count_after(view, middle)
            rows, decay = max(0, total.messages - rest.messages), 0.0
            if rows > limit:
                high = middle, rows
                continue
            density = max(0, rows - low[1]) / (middle - low[0])
            low = rest.gap_end(middle, end), rows
            lows.append(low)
            counts[low[0]] = rest
            if 2 * rows >= limit:
                break
        if requested:
            now = await view.jetstream.stream_info(info.name)
        if now.has_lagging_replica or not _is_same(info, now):
            return None
        self._last = _Counted(view, counts, (high[0], total.messages - high[1]), density)
        max_rows = min(end - start, total.messages)
        if max_rows <= limit:
            return end, max_rows, max_rows
        written = now.last_seq - info.last_seq
        bounds = [lows[0], *((seq, rows + written) for seq, rows in lows[1:])]
        reached, rows = next(bound for bound in reversed(bounds) if bound[1] <= limit)
        if 2 * rows < limit:
            # The sequences after it have at most one row each.
            seq, reached = reached, min(end, reached + limit - rows)
            rows += reached - seq
        return reached, rows, max_rows

    async def split_ends(
        self, view: StreamView, start: int, end: int, min_splits: int
    ) -> list[int]:
        """The ends of the splits of ``(start, end]``; the last one is ``end``.

        One split, unless the range is large or ``min_splits`` is higher.
        """
        info = view.info
        low = max(start, min(info.first_seq, end) - 1)
        most = end - start if info.consumers_left is None else min(end - start, info.consumers_left)

        def number(rows: int) -> int:
            """A split costs a consumer, a task, and up to 20 MB sent beyond its end."""
            full = max(rows // ROWS_PER_SPLIT, int(rows * info.mean_size) // BYTES_PER_SPLIT)
            return max(1, min(max(min(self._cores, full), min_splits), most))

        rows = min(end - low, info.messages)
        if number(rows) == 1:
            return [end]
        knots, count = {low: 0, end: rows}, number(rows)
        if view.scope.effective_filters or 4 * info.num_deleted * count > rows:
            count = number(0)
            with contextlib.suppress(ConsumerLimitError):
                total = await self._count(view, start)
                # A count goes to the stream's end, which may be beyond that of the range.
                beyond = (await self._count(view, end)).messages if end < info.last_seq else 0
                rows = min(rows, max(0, total.messages - beyond))
                knots, count = {total.gap_end(low, end - 1): 0, end: rows}, number(rows)
                parts = min(max(count, _MIN_PARALLEL + 1), _MAX_PARALLEL + 1, end - low)
                for _ in range(_MAX_ROUNDS if count > 1 else 0):
                    middles = _cut(knots, parts)
                    rests = await asyncio.gather(*(_count_after(view, seq) for seq in middles))
                    up_to = [rows - max(0, rest.messages - beyond) for rest in rests]
                    knots |= zip(middles, up_to, strict=True)
                    largest = max(b - a for a, b in pairwise([0, *up_to, rows]))
                    if largest <= _BALANCE * rows / parts:
                        break
        ends, last = [], start
        for i, seq in enumerate(_cut(knots, count), start=1):
            last = min(max(seq, last + 1), end - (count - i))  # each split has a sequence
            ends.append(last)
        return [*ends, end]

    async def _count(self, view: StreamView, seq: int) -> MessageCount:
        """The messages after ``seq``; not requested if the planning of ``view`` counted them."""
        if (last := self._counted(view)) is None or last.view.info.last_seq != view.info.last_seq:
            return await _count_after(view, seq)
        return last.counts.get(seq) or await _count_after(view, seq)

    async def count_subjects(self, view: StreamView) -> int:
        """The number of subjects that match the filters, estimated by their messages."""
        messages = view.info.messages
        with contextlib.suppress(ConsumerLimitError):
            messages = (await _count_after(view, 0)).messages
        # Rounded up: a range that counts no rows would take no part in the limits.
        return -(-messages * view.info.subjects // max(view.info.messages, 1))


def _is_same(then: StreamInfo, now: StreamInfo) -> bool:
    """Whether counts of ``then`` and of ``now`` are of one stream, which was not rolled back."""
    return compare(KnownStream.of(then), now) is Identity.SAME


async def _count_after(view: StreamView, seq: int) -> MessageCount:
    info, filters = view.info, view.scope.effective_filters
    if not filters and seq < info.first_seq:
        return MessageCount(info.messages, info.first_seq)
    return await count_messages(view.jetstream, info.name, seq + 1, filters)


def _decay(info: StreamInfo) -> float:
    """The exponential decay, per sequence, of entries whose keys are overwritten at random.

    All are left at the stream's end. ``1 / share - share`` is within 6 % of the whole exponent.
    """
    sequences = info.last_seq - info.first_seq + 1
    share = info.messages / max(sequences, 1)
    return (1 / share - share) / sequences if 0 < share < 1 else 0.0


def next_end(
    low: tuple[int, int], high: tuple[int, int], limit: int, density: float | None, decay: float
) -> int | None:
    """The sequence up to which to count next, for an end with at least half of ``limit`` rows.

    Rows are often close together at the end of a stream and far apart before, so the mean up to
    ``high`` gives an end too early, and the density before ``low`` one too late. The sequence is at
    least as far as the limit reaches without a count: nothing is lost if the count is exact there.

    Args:
        low, high: a sequence and the rows up to it: less than half of the limit, and more than it.
        density: rows per sequence before ``low``; None if unknown.
        decay: the exponential decay of the density from ``high`` to ``low``; 0 if unknown.

    Returns:
        None if the limit reaches ``high`` without a count.
    """
    (low_seq, low_rows), (high_seq, high_rows) = low, high
    reached = low_seq + limit - low_rows
    if reached >= high_seq:
        return None
    # An estimate that is a third too low or too high still holds; few rows vary by chance.
    target = max(1.0, 0.6 * limit, 0.75 * limit - math.sqrt(limit)) - low_rows
    seq = low_seq + math.ceil(min(target / density, high_seq)) if density else high_seq
    if density is None or seq >= high_seq:
        share = target / max(high_rows - low_rows, 1)
        seq = max(reached, _between(low_seq, high_seq, share, decay))
        if density is not None and high_rows > _STEEP * limit:
            # The density rises somewhere in between: equally likely at each order of magnitude.
            seq = low_seq + math.isqrt((seq - low_seq) * (high_seq - low_seq))
    return min(max(seq, reached), high_seq - 1)


def _between(low: int, high: int, share: float, decay: float) -> int:
    """The sequence between ``low`` and ``high`` up to which about ``share`` of the rows lie."""
    steps = decay * (high - low)
    if steps < 1e-6:
        seq = low + int((high - low) * share)
    else:
        # exp(-steps) is the density at `low`, 1 that at `high`.
        density = math.exp(-steps) - share * math.expm1(-steps)
        seq = high + int(math.log(max(density, 1e-300)) / decay)
    return max(min(seq, high - 1), low + 1)


def _cut(knots: Mapping[int, int], count: int) -> list[int]:
    """The inner ends of ``count`` parts with about as many rows each; ``knots`` has known rows."""
    sequences = sorted(knots)
    rows = np.maximum.accumulate([knots[seq] for seq in sequences])
    ends: list[int] = (
        np.interp(rows[-1] * np.arange(1, count) / count, rows, sequences).astype(int).tolist()
    )
    return ends


# -- what several streams share ------------------------------------------------------------------
#
# Limits: as in Spark's Kafka source, each stream has a share of the limit in proportion to its
# available rows; unlike there, the sum never exceeds the limit.
#
# Tasks: as with Spark's small files (``spark.sql.files.openCostInBytes``), small splits share a
# task, and each one counts as some rows more than it has.

NOTHING = RangeLimit(0)
"""The limit of a range that is not read in this micro-batch."""

OPEN_COST = 5_000
"""Rows that a task reads in the time that it takes to open one more split."""


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
    if shared and 0 < by_rows == fraction:
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
    (of each split, or estimates) justify. The groups have about as many rows each.
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
