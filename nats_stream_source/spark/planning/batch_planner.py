"""The planner of a batch: decides the range and the splits of ``spark.read``. Runs on the driver.

It requests the state of each stream from its leader once, and the batch reads that state:

=============================  =================================  ===========================
options                        rows                               splits
=============================  =================================  ===========================
(none)                         each key's last entry              one (``reading.latest_values``)
``asOfSequence``, ``asOfTime``  each key's last entry as of then  one (``reading.as_of``)
``includeHistory``,            all revisions in the stream,       as a micro-batch of that range
``startSequence``, …           from there to the last one
``deliverPolicy``, …           the messages from there to         likewise; one for
                               ``endSequence``, ``endTime`` or    ``last_per_subject``
                               the last one
=============================  =================================  ===========================

A sequence or time beyond the stream's end is an error: the batch would read less than requested,
and other rows the next time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.options import DeliverPolicy, KvOptions, StreamOptions
from nats_stream_source.rows.base import FormatAdapter, Split, StateSplit, StreamView
from nats_stream_source.rows.data_loss import report_aged_out
from nats_stream_source.rows.start_position import resolve_start, seq_before_time, validate_past
from nats_stream_source.spark.planning.limits import Limits, plan_tasks
from nats_stream_source.spark.planning.stream_states import (
    StreamStates,
    verify_filters,
    warn_of_other_subjects,
)
from nats_stream_source.spark.runner import Runner


def plan_batch(adapter: FormatAdapter) -> list[tuple[Split, ...]]:
    """The splits of a batch by the task that reads them, over a connection for this call."""
    with contextlib.closing(Runner(adapter.options.connection)) as runner:
        return runner.plan(BatchPlanner(adapter, runner.connection).tasks)


class BatchPlanner:
    """Plans one batch."""

    def __init__(self, adapter: FormatAdapter, connection: ReusableConnection) -> None:
        self._adapter = adapter
        self._states = StreamStates(adapter, connection, time.monotonic)
        self._cores = os.cpu_count() or 1
        self._min_partitions = adapter.options.common.min_partitions or 1

    async def tasks(self) -> list[tuple[Split, ...]]:
        """The splits by the task that reads them; an empty list for an empty batch.

        A task reads several small streams one after the other over one connection.
        """
        views = await self._states.first_poll()
        await self._states.verify_listed(views)
        await verify_filters(self._adapter, views.values())
        for view in views.values():
            await warn_of_other_subjects(view)
        messages = {name: view.info.messages for name, view in views.items()}

        async def plan(name: str, min_splits: int) -> list[tuple[Split, int]]:
            splits = await self._splits(views[name], min_splits)
            return [(split, _rows(views[name].info, split.range)) for split in splits]

        return await plan_tasks(
            messages, plan, min_partitions=self._min_partitions, cores=self._cores
        )

    async def _splits(self, view: StreamView, min_splits: int) -> Sequence[Split]:
        self._validate_positions(view.info)
        as_of = await self._as_of_sequence(view)
        if as_of is not None:
            return self._plan_state(view, as_of, as_of=True)
        if self._adapter.last_per_subject:
            return self._plan_state(view, view.info.last_seq, as_of=False)
        return await self._plan_range(view, min_splits)

    def _validate_positions(self, info: StreamInfo) -> None:
        options, start = self._adapter.options, self._adapter.start_of(info.name)
        # A batch that starts right after the last message is valid, and empty.
        self._validate_sequence(info, "startSequence", start.sequence, info.last_seq + 1)
        if isinstance(options, KvOptions):
            self._validate_sequence(info, "asOfSequence", options.as_of_sequence)
            option, limit = "asOfTime", options.as_of_time
        else:
            self._validate_sequence(info, "endSequence", options.end_sequence)
            option, limit = "endTime", options.end_time
        if limit is not None:
            validate_past(info, limit, option)

    def _validate_sequence(
        self, info: StreamInfo, option: str, seq: int | None, limit: int | None = None
    ) -> None:
        if seq is None or seq <= (info.last_seq if limit is None else limit):
            return
        terms = self._adapter.terms
        raise OptionError(
            f"could not read stream {info.name} with option {option!r}: {seq} lies beyond the end, "
            f"expected at most the last {terms.sequence} {info.last_seq}; set "
            f"{terms.min_last_option}={seq} to wait for it"
        )

    async def _as_of_sequence(self, view: StreamView) -> int | None:
        """The sequence of the requested past state; None for the present state or a range."""
        options = self._adapter.options
        if not isinstance(options, KvOptions):
            return None
        if options.as_of_sequence is not None:
            return options.as_of_sequence
        if options.as_of_time is None:
            return None
        # Spark floors times to microseconds: an entry that it shows with this time is included.
        next_microsecond = (options.as_of_time // 1000 + 1) * 1000
        return await seq_before_time(view.jetstream, view.info, next_microsecond)

    def _plan_state(self, view: StreamView, end: int, *, as_of: bool) -> Sequence[Split]:
        info, scope = view.info, view.scope
        if not end or not (as_of or info.messages):
            return []
        # With one message per subject, every message is its subject's last.
        last_per_subject = not as_of and scope.history != 1
        start = 0 if last_per_subject else min(info.first_seq - 1, end)
        return [
            StateSplit(
                self._adapter.range_request(
                    scope, info, start, end, last_per_subject=last_per_subject
                ),
                ENDLESS,
                as_of=as_of,
                planned=info,
                history=scope.history,
                subject_count=None if scope.filters else info.subjects,
            )
        ]

    async def _plan_range(self, view: StreamView, min_splits: int) -> Sequence[Split]:
        adapter, info = self._adapter, view.info
        position = adapter.start_of(info.name)
        policy = position.policy
        start, end = await resolve_start(view, position), await self._range_end(view)
        if policy is DeliverPolicy.LAST and start >= end:
            # The last match was written after the first request, or no message matches.
            end = min(start + 1, (await self._states.request(info.name)).info.last_seq)
        missing_is_loss = adapter.missing_is_loss(view.scope)
        chosen = policy is DeliverPolicy.BY_START_SEQUENCE
        if missing_is_loss and chosen and end > start and info.first_seq > start + 1:
            last = min(info.first_seq - 1, end)
            await report_aged_out(adapter, view.jetstream, info, start + 1, last)
        if end <= start:
            return []
        ends = await Limits(self._cores).split_ends(view, start, end, min_splits)
        starts = [start, *ends[:-1]]
        return [
            Split(
                adapter.range_request(view.scope, info, first, last),
                ENDLESS,
                max(first + 1, info.first_seq) if missing_is_loss else None,
            )
            for first, last in zip(starts, ends, strict=True)
        ]

    async def _range_end(self, view: StreamView) -> int:
        options = self._adapter.options
        if isinstance(options, StreamOptions):
            if options.end_sequence is not None:
                return options.end_sequence
            if options.end_time is not None:
                return await seq_before_time(view.jetstream, view.info, options.end_time)
        return view.info.last_seq


def _rows(info: StreamInfo, request: RangeRequest) -> int:
    """The number of messages of a range, if the stream has them at equal distances."""
    sequences = max(1, info.last_seq - info.first_seq + 1)
    of_range = request.end - max(request.start, info.first_seq - 1)
    return max(0, info.messages * min(of_range, sequences) // sequences)
