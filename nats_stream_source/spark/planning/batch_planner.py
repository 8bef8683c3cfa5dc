"""The planner of a batch: decides the range and the splits of ``spark.read``. Runs on the driver.

It requests the stream's state from the leader once, and the batch reads that state:

=============================  =================================  ===========================
options                        rows                               splits
=============================  =================================  ===========================
(none)                         each key's last entry              one (``state.latest_values``)
``asOfSequence``, ``asOfTime``  each key's last entry as of then  one (``state.as_of``)
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

import os
import time
from collections.abc import Callable
from dataclasses import replace

from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.api import StreamInfo
from nats_stream_source.jetstream.ordered.request import ENDLESS
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.options import DeliverPolicy, KvOptions, StreamOptions
from nats_stream_source.spark.data_loss_report import report_aged_out
from nats_stream_source.spark.formats.base import ReadScope
from nats_stream_source.spark.formats.factory import format_adapter
from nats_stream_source.spark.formats.splits import (
    BatchReadKind,
    BatchSplit,
    Split,
    removal_settings,
)
from nats_stream_source.spark.planning.leader import Leader
from nats_stream_source.spark.planning.splitter import RangeSplitter
from nats_stream_source.spark.planning.start_position import (
    check_past,
    resolve_start,
    seq_before_time,
)


class BatchPlanner:
    """Plans one batch of one stream.

    Args:
        stream: the stream's name; None to look it up as the options say.
        cores: the number of tasks that run in parallel; by default the driver's cores.
        timer: the time in seconds, for the time limit of ranks.
    """

    def __init__(
        self,
        options: KvOptions | StreamOptions,
        connection: ReusableConnection,
        stream: str | None = None,
        *,
        cores: int | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._options = options
        self._adapter = format_adapter(options)
        self.leader = Leader(self._adapter, connection, stream)
        self._splitter = RangeSplitter(self._adapter.common, cores or os.cpu_count() or 1, timer)

    async def splits(self) -> list[BatchSplit]:
        """The splits; an empty list for an empty batch.

        Raises:
            OptionError: a sequence or time beyond the stream's end.
            MinLastSequenceError: the stream does not reach ``minLastRevision``
                (``minLastSequence``).
            DataLossError: the first sequence is later than ``startSequence``, and
                ``failOnDataLoss`` is set.
        """
        info = await self.leader.initial_stream_info()
        await self.leader.validate_filters()
        return await self.splits_of(info)

    async def splits_of(self, info: StreamInfo, min_splits: int | None = None) -> list[BatchSplit]:
        """The splits of the stream that its leader has just reported to :attr:`leader`.

        Args:
            min_splits: the minimum number; by default ``minPartitions``.

        Raises:
            OptionError, DataLossError: as :meth:`splits`.
        """
        self._validate_positions(info)
        scope = self.leader.scope
        as_of = await self._as_of_sequence(info)
        if as_of is not None:
            return self._plan_state(info, scope, BatchReadKind.AS_OF, as_of)
        if self._adapter.last_per_subject:
            return self._plan_state(info, scope, BatchReadKind.CURRENT, info.last_seq)
        return await self._plan_range(info, scope, min_splits)

    def _validate_positions(self, info: StreamInfo) -> None:
        options = self._options
        # A batch that starts right after the last message is valid, and empty.
        self._validate_sequence(
            info, "startSequence", options.start_position.sequence, info.last_seq + 1
        )
        times = {"startTime": options.start_position.time}
        if isinstance(options, KvOptions):
            self._validate_sequence(info, "asOfSequence", options.as_of_sequence)
            times["asOfTime"] = options.as_of_time
        else:
            self._validate_sequence(info, "endSequence", options.end_sequence)
            times["endTime"] = options.end_time
        for option, limit in times.items():
            if limit is not None:
                check_past(info, limit, option)

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

    async def _as_of_sequence(self, info: StreamInfo) -> int | None:
        """The sequence of the requested past state; None for the present state or a range."""
        options = self._options
        if not isinstance(options, KvOptions):
            return None
        if options.as_of_sequence is not None:
            return options.as_of_sequence
        if options.as_of_time is None:
            return None
        # Spark floors times to microseconds: an entry that it shows with this time is included.
        next_microsecond = (options.as_of_time // 1000 + 1) * 1000
        return await seq_before_time(await self.leader.jetstream(), info, next_microsecond)

    def _plan_state(
        self, info: StreamInfo, scope: ReadScope, kind: BatchReadKind, end: int
    ) -> list[BatchSplit]:
        if not end or (kind is BatchReadKind.CURRENT and not info.messages):
            return []
        # With one message per subject, every message is its subject's last.
        last_per_subject = kind is BatchReadKind.CURRENT and scope.history != 1
        filters = scope.filters or ((scope.match_all,) if last_per_subject else ())
        start = 0 if last_per_subject else min(info.first_seq - 1, end)
        subject_count = None if scope.filters else info.subjects
        return [
            self._split(
                info,
                replace(scope, filters=filters),
                kind,
                start,
                end,
                last_per_subject=last_per_subject,
                subject_count=subject_count,
            )
        ]

    async def _plan_range(
        self, info: StreamInfo, scope: ReadScope, min_splits: int | None
    ) -> list[BatchSplit]:
        adapter = self._adapter
        policy = adapter.start_position.policy
        start, end = await self._range_start(info), await self._range_end(info)
        if policy is DeliverPolicy.LAST and start >= end:
            # The last match was written after the first request, or no message matches.
            end = min(start + 1, (await self.leader.stream_info()).last_seq)
        missing_is_loss = adapter.missing_is_loss(scope)
        chosen = policy is DeliverPolicy.BY_START_SEQUENCE
        if missing_is_loss and chosen and end > start and info.first_seq > start + 1:
            report_aged_out(adapter, info, start + 1, min(info.first_seq - 1, end))
        if end <= start:
            return []
        ends = await self._splitter.split_ends(
            await self.leader.jetstream(), info, scope.effective_filters, start, end, min_splits
        )
        starts = [start, *ends[:-1]]
        return [
            self._split(
                info, scope, BatchReadKind.RANGE, first, last, missing_is_loss=missing_is_loss
            )
            for first, last in zip(starts, ends, strict=True)
        ]

    async def _range_start(self, info: StreamInfo) -> int:
        jetstream, filters = await self.leader.jetstream(), self.leader.scope.filters
        return await resolve_start(jetstream, info, self._adapter.start_position, filters)

    async def _range_end(self, info: StreamInfo) -> int:
        options = self._options
        if isinstance(options, StreamOptions):
            if options.end_sequence is not None:
                return options.end_sequence
            if options.end_time is not None:
                return await seq_before_time(await self.leader.jetstream(), info, options.end_time)
        return info.last_seq

    def _split(
        self,
        info: StreamInfo,
        scope: ReadScope,
        kind: BatchReadKind,
        start: int,
        end: int,
        *,
        last_per_subject: bool = False,
        missing_is_loss: bool = False,
        subject_count: int | None = None,
    ) -> BatchSplit:
        split = Split(
            stream=info.name,
            created=info.created,
            prefix=scope.prefix,
            filters=scope.filters,
            start=start,
            end=end,
            initial_through=ENDLESS,
            last_per_subject=last_per_subject,
            required_from=max(start + 1, info.first_seq) if missing_is_loss else None,
            fingerprint=None if info.last_time is None else (info.last_seq, info.last_time),
        )
        return BatchSplit(
            split=split,
            kind=kind,
            history=scope.history,
            subject_count=subject_count,
            keeps_last_messages=not removal_settings(info.config),
            at_stream_end=end >= info.last_seq,
            first_seq=info.first_seq,
        )
