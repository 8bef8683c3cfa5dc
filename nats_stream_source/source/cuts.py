"""How a range is limited, and how it is cut into splits.

The arithmetic is that of ``source.ranges``, the answers come from ``source.counts``; here is what
may be asked for what, and for how long.

How many tasks Spark runs at a time, nobody tells the planner: its process has no session, no Spark
context, no configuration and no variable that says so (Spark 4.2 and 4.3). The driver's cores stand
in, which is right for ``local[*]``; on a cluster the option ``minPartitions`` says more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.source.counts import Counts
from nats_stream_source.source.ranges import answered, borders, limited_end, split_count

# Seconds for the ranks of one micro-batch: where a limit can bind, for the borders between splits,
# and where a report is all that a rank is for.
_LIMIT_SECONDS = 0.06
_BORDER_SECONDS = 0.012
_REPORT_SECONDS = 0.005
_MOST_COUNTED = 10_000  # messages whose subjects are listed to count them


class Cuts:
    """Limits and cuts the ranges of one query.

    Each method is given the stream as the leader has just described it, and the filters.

    Args:
        at_least: splits of a range, as far as it has sequences.
        cores: how many tasks run at a time, as far as is known.
        timer: a clock, in seconds.
    """

    def __init__(self, at_least: int, cores: int, timer: Callable[[], float]) -> None:
        self._at_least = at_least
        self._cores = cores
        self._counts = Counts(timer)
        self._rows: dict[tuple[int, int], int] = {}  # of the range that was limited last
        self._share: float | None = None  # of a range's sequences that matched, the last time

    async def limited(
        self,
        jetstream: JetStream,
        info: StreamInfo,
        filters: Sequence[str],
        start: int,
        end: int,
        limit: int | None,
    ) -> tuple[int, int, int]:
        """The end of ``(start, end]`` under a limit, the rows up to it, and those up to ``end``.

        The rows are upper bounds under a limit, else an estimate where a rank takes too long.
        """
        counts = self._counts
        self._rows.clear()
        floor = _floor(start, end, info)
        most = min(end - floor, info.messages)
        can_bind = limit is not None and limit < most
        if not can_bind and (not filters or most == 1):
            return end, most, most
        counts.begin(jetstream, info, filters)
        total = counts.known(floor, 0 if limit is None else limit // 10)
        if not can_bind:
            if total is None:
                counts.allow(_REPORT_SECONDS, 1 if self._share is None else 0)
                total = await counts.about(floor)
            if total is None:
                rows = most if self._share is None else round(most * self._share)
            else:
                self._rows[start, end] = rows = min(most, total)
                self._share = rows / most
            return end, rows, rows
        assert limit is not None
        # Without these questions a stream with holes would be cut by sequences again and again.
        counts.allow(_LIMIT_SECONDS, 1 if total is not None else 2)

        async def answer(seq: int) -> int | None:
            nonlocal total
            if seq == floor:
                total = await counts.total(floor)
                return total
            return await counts.after(seq)

        questions = limited_end(
            floor,
            end,
            limit,
            shape=counts.shape,
            total=total,
            gaps=counts.gaps(floor),
            behind=info.last_seq - end,
        )
        limited, rows = await answered(questions, answer)
        self._rows[start, limited] = rows
        return limited, rows, most if total is None else min(most, total)

    async def splits(
        self,
        jetstream: JetStream,
        info: StreamInfo,
        filters: Sequence[str],
        start: int,
        end: int,
    ) -> list[int]:
        """The ends of the splits of ``(start, end]``, the last one ``end``."""
        counts = self._counts
        mean = info.nbytes / max(info.messages, 1)
        floor = _floor(start, end, info)
        most = min(end - floor, info.messages)
        left = info.consumers_left
        most_readers = end - start if left is None else max(left, 1)

        def parts(rows: int) -> int:
            wanted = split_count(
                end - start, rows, rows * mean, at_least=self._at_least, cores=self._cores
            )
            return min(wanted, most_readers)

        if parts(most) == 1:
            return [end]
        counts.begin(jetstream, info, filters)
        counts.allow(_BORDER_SECONDS)
        # A rank counts to the stream's end, and the range may end before it.
        behind = 0 if end >= info.last_seq else await counts.after(end)
        rows = self._rows.get((start, end))
        if rows is None:
            counted = counts.known(floor, 0)
            if counted is None and filters:
                counted = await counts.about(floor)
            if counted is not None:
                rows = max(0, counted - (behind or 0))
            else:
                # Without an answer, a few of many sequences are no large range.
                rows = 0 if filters else most
        rows = min(rows, most)
        # Below the stream's first message there is nothing to share, unless that is all there is.
        low = floor if end - floor >= parts(rows) else start

        async def within(sequences: Sequence[int]) -> list[int | None]:
            if behind is None:
                return [None] * len(sequences)
            found = await counts.each_after(sequences)
            return [None if one is None else max(0, one - behind) for one in found]

        return await answered(borders(low, end, parts(rows), rows, shape=counts.shape), within)

    async def subjects(self, jetstream: JetStream, info: StreamInfo, filters: Sequence[str]) -> int:
        """How many subjects match the filters now; an estimate where they are too many to list."""
        self._counts.begin(jetstream, info, filters)
        self._counts.allow(_REPORT_SECONDS, 1)
        messages = await self._counts.about(0) or 0
        if messages > _MOST_COUNTED:
            return messages * info.subjects // max(info.messages, 1)
        found = await asyncio.gather(*(jetstream.subjects(info.name, one) for one in filters))
        return sum(map(len, found))


def _floor(start: int, end: int, info: StreamInfo) -> int:
    """``start``, or the sequence before the first message of ``(start, end]``."""
    return max(start, min(info.first_seq, end) - 1)
