"""The planner of a batch: what ``spark.read`` reads, in which tasks. It runs on the driver.

The stream's leader is asked once, and what it had then is what is read:

=============================  =================================  =============================
options                        rows                               tasks
=============================  =================================  =============================
(none)                         each key's last entry              one (``source.current``)
``asOfSequence``, ``asOfTime``  each key's last entry then        one (``source.as_of``)
``includeHistory``,            all revisions that there are,      as a micro-batch of that range
``startSequence``, …           from there to the last one
``deliverPolicy``, …           the messages from there, to        likewise; one for
                               ``endSequence``, ``endTime`` or    ``last_per_subject``
                               the last one
=============================  =================================  =============================

What the user asks for and the stream does not have is an error: a point or an end that lies beyond
the last sequence, or a time that has not come, would read less than was meant, and other rows the
next time. Filters of the query (``source.pushdown``) make all this smaller, and may lie anywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.api import StreamInfo
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.range_request import ENDLESS
from nats_stream_source.options import DeliverPolicy, KvOptions, StreamOptions
from nats_stream_source.source.batch_plan import BatchPlan, What, removed_by
from nats_stream_source.source.beginning import before_time, begins_after, check_past
from nats_stream_source.source.continuity import Continuity
from nats_stream_source.source.cuts import Cuts
from nats_stream_source.source.leader import Leader
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.query import Content, query_of

if TYPE_CHECKING:  # it needs a Spark that has filters to push
    from nats_stream_source.source.pushdown import Narrowed


class BatchPlanner:
    """Plans one batch.

    Args:
        narrowed: what the query's filters leave of it; None for all.
        cores: how many tasks run at a time, as far as is known.
        timer: seconds, for how long ranks may take.
    """

    def __init__(
        self,
        options: KvOptions | StreamOptions,
        link: Link,
        *,
        narrowed: Narrowed | None = None,
        cores: int | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._options = options
        self._narrowed = narrowed
        self._query = query_of(options)
        self._link = link
        self._leader = Leader(self._query, link)
        self._cuts = Cuts(options.reading.min_partitions or 1, cores or os.cpu_count() or 1, timer)

    async def plans(self) -> list[BatchPlan]:
        """The tasks; none when there is nothing to read.

        Raises:
            OptionError: a point, an end or a beginning that the stream does not have.
            MinLastSequenceError: it does not reach ``minLastRevision`` (``minLastSequence``).
            DataLossError: it begins after ``startSequence``, and ``failOnDataLoss`` is set.
        """
        info = await self._leader.look_first()
        await self._leader.check()
        self._check(info)
        content: Content | None = self._leader.content
        if self._narrowed is not None:
            content = self._narrowed.content(self._leader.content)
        if content is None:
            return []
        point = await self._point(info)
        if point is not None:
            return self._state(info, content, What.AS_OF, point)
        if self._query.last_first:
            return self._state(info, content, What.CURRENT, info.last_seq)
        return await self._range(info, content)

    def _check(self, info: StreamInfo) -> None:
        options = self._options
        # Where it ended the last time, a batch that goes on there finds nothing, and that is right.
        self._check_reached(info, "startSequence", options.beginning.sequence, info.last_seq + 1)
        times = {"startTime": options.beginning.time}
        if isinstance(options, KvOptions):
            self._check_reached(info, "asOfSequence", options.as_of_sequence)
            times["asOfTime"] = options.as_of_time
        else:
            self._check_reached(info, "endSequence", options.end_sequence)
            times["endTime"] = options.end_time
        for option, moment in times.items():
            if moment is not None:
                check_past(info, moment, option)

    def _check_reached(
        self, info: StreamInfo, option: str, seq: int | None, most: int | None = None
    ) -> None:
        if seq is None or seq <= (info.last_seq if most is None else most):
            return
        least = f"minLast{self._query.words.sequence.capitalize()}"
        raise OptionError(
            f"option {option!r}: {seq} lies beyond the end of stream {info.name}, which has "
            f"{info.last_seq}. Where it is about to come, the option {least}={seq} waits for it"
        )

    async def _point(self, info: StreamInfo) -> int | None:
        """The sequence of the state that is asked for; None when it is not a state of the past."""
        options = self._options
        if not isinstance(options, KvOptions):
            return None
        if options.as_of_sequence is not None:
            return options.as_of_sequence
        if options.as_of_time is None:
            return None
        # An entry that Spark shows with this very time is of this state.
        beyond = (options.as_of_time // 1000 + 1) * 1000
        return await before_time(await self._leader.jetstream(), info, beyond)

    def _state(self, info: StreamInfo, content: Content, what: What, end: int) -> list[BatchPlan]:
        if not end or (what is What.CURRENT and not info.messages):
            return []
        # With one message a subject, every message is its subject's last.
        listed = what is What.CURRENT and content.history != 1
        filters = content.filters or ((content.everything,) if listed else ())
        start = 0 if listed else min(info.first_seq - 1, end)
        subjects = None if content.filters else info.subjects
        content = replace(content, filters=filters)
        return [
            self._plan(info, content, what, start, end, last_per_subject=listed, subjects=subjects)
        ]

    async def _range(self, info: StreamInfo, content: Content) -> list[BatchPlan]:
        query = self._query
        start, end = await self._start(info), await self._end(info)
        if query.beginning.policy is DeliverPolicy.LAST and start >= end:
            # It was written after that look, or nothing matches.
            end = min(start + 1, (await self._leader.look()).last_seq)
        named = query.beginning.policy is DeliverPolicy.BY_START_SEQUENCE
        complete = query.complete(content)
        if complete and named and end > start and info.first_seq > start + 1:
            Continuity(query, self._link).aged_out(info, start + 1, min(info.first_seq - 1, end))
        if self._narrowed is not None:
            start, end = await self._bounded(info, self._narrowed, start, end)
        if end <= start:
            return []
        stops = await self._cuts.splits(
            await self._leader.jetstream(), info, content.counted, start, end
        )
        starts = [start, *stops[:-1]]
        return [
            self._plan(info, content, What.RANGE, first, last, complete=complete)
            for first, last in zip(starts, stops, strict=True)
        ]

    async def _start(self, info: StreamInfo) -> int:
        jetstream, filters = await self._leader.jetstream(), self._leader.content.filters
        return await begins_after(jetstream, info, self._query.beginning, filters)

    async def _end(self, info: StreamInfo) -> int:
        options = self._options
        if isinstance(options, StreamOptions):
            if options.end_sequence is not None:
                return options.end_sequence
            if options.end_time is not None:
                return await before_time(await self._leader.jetstream(), info, options.end_time)
        return info.last_seq

    async def _bounded(
        self, info: StreamInfo, narrowed: Narrowed, start: int, end: int
    ) -> tuple[int, int]:
        """What the query's filters leave of the range ``(start, end]``."""
        jetstream = await self._leader.jetstream()
        start, end = narrowed.sequences(start, end)
        if narrowed.since is not None:
            start = max(start, await before_time(jetstream, info, narrowed.since))
        if narrowed.until is not None:
            end = min(end, await before_time(jetstream, info, narrowed.until))
        return start, end

    def _plan(
        self,
        info: StreamInfo,
        content: Content,
        what: What,
        start: int,
        end: int,
        *,
        last_per_subject: bool = False,
        complete: bool = False,
        subjects: int | None = None,
    ) -> BatchPlan:
        pinned = None if info.last_time is None else (info.last_seq, info.last_time)
        plan = Plan(
            stream=info.name,
            created=info.created,
            prefix=content.prefix,
            filters=content.filters,
            start=start,
            end=end,
            initial_through=ENDLESS,
            last_per_subject=last_per_subject,
            complete_from=max(start + 1, info.first_seq) if complete else None,
            pinned=pinned,
        )
        return BatchPlan(
            plan=plan,
            what=what,
            history=content.history,
            subjects=subjects,
            lasting=not removed_by(info.config),
            newest=end >= info.last_seq,
            first_seq=info.first_seq,
        )
