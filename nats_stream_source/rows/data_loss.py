"""Data loss: compares an offset with the stream as its leader reports it, and reports a loss.

Three events are data loss to a query:

- *re-created*: the stream was deleted and created again (``jetstream.stream_identity``).
- *rolled back*: the stream's last sequence is lower than the offset (a server that lost power
  before its fsync, an older backup), or the stream has grown past the offset again and has
  another message at ``stream_seq``.
- *aged out*: the stream's first sequence is later than the offset, so messages were removed before
  they were read. Current values are exempt, since compaction removes superseded ones
  (``FormatAdapter.missing_is_loss``).

With ``failOnDataLoss`` (the default) each is an error, on the driver as on executors. Without, it
is a warning, and the query continues without repeating a row: in a new epoch from the start of the
re-created stream, or from the first message later than all that it has read; or with the messages
that are left.

A stream that was restored from a backup with all messages of the offset is not a data loss: the
query continues with the new ``created``.

A mirror that was deleted and created again, or rolled back, lacks the offset only until it has
caught up with its origin. The query waits for it: a poll finds no messages, and a run of
``Trigger.AvailableNow`` or a micro-batch of an earlier process begins later. After
``outageTimeout`` without progress the mirror is compared as it is: re-created or rolled back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.errors import ConsumerLimitError, DataLossError, PermissionDeniedError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.requests import accepts_other_subjects, count_entries
from nats_stream_source.jetstream.ordered.request import ENDLESS
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_identity import Identity, KnownStream, identify
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.logs import field_logger
from nats_stream_source.metrics.table import DATA_LOSSES, count
from nats_stream_source.options import DeliverPolicy
from nats_stream_source.rows.base import FormatAdapter
from nats_stream_source.rows.offsets import Position
from nats_stream_source.rows.start_position import seq_before_time

log = field_logger(__name__)

_LOG_INTERVAL = 10.0  # seconds between two log lines of a mirror that lags
_POLL_INTERVAL = 0.25


def report_data_loss(adapter: FormatAdapter, stream: str, observed: str, action: str) -> None:
    """Raise DataLossError, or log a warning with ``failOnDataLoss=false``.

    Args:
        observed: what was lost, and what was expected.
        action: what ``failOnDataLoss=false`` does instead, as "continue at 120".
    """
    if adapter.options.common.fail_on_data_loss:
        raise DataLossError(
            f"data loss in stream {stream}: {observed}; set failOnDataLoss=false to {action}, or "
            f"{adapter.terms.start_anew}"
        )
    count(DATA_LOSSES, stream)
    log.warning(
        f"data loss accepted: stream {stream}: {observed}; failOnDataLoss=false: {action}",
        stream=stream,
    )


async def report_aged_out(
    adapter: FormatAdapter,
    jetstream: JetStream,
    info: StreamInfo,
    first: int,
    last: int,
    missing: int | None = None,
) -> None:
    """Report that required messages from ``first`` to ``last`` aged out before they were read.

    With filters the subjects of the missing messages are unknown, and perhaps the filters matched
    none of them: that is a warning with any ``failOnDataLoss``. The same applies to a bucket whose
    stream has or accepts messages that are not its entries.

    Args:
        missing: their number; None for all.
    """
    terms = adapter.terms
    some = "" if missing in (None, last - first + 1) else f"{missing} of "
    observed = (
        f"first {terms.sequence} is {info.first_seq}, expected {first} or lower "
        f"({some}{terms.sequence}s {first} to {last} aged out; {terms.retention_hint})"
    )
    scope = adapter.read_scope(await adapter.completed(jetstream, info))
    filters = adapter.user_filters if scope.effective_filters else ()
    if filters:
        given = ",".join(filters)
        unknown = f"whether {terms.filter_option}={given} matched any of them is unknown"
    elif (prefix := scope.prefix) and (
        accepts_other_subjects(info.config, prefix)
        or (await other_messages(jetstream, info, prefix) or 0) > 0
    ):
        unknown = "whether any of them was an entry of the bucket is unknown"
    else:
        report_data_loss(adapter, info.name, observed, f"continue at {info.first_seq}")
        return
    log.warning(f"messages of stream {info.name} aged out: {observed}; {unknown}", stream=info.name)


async def other_messages(jetstream: JetStream, info: StreamInfo, prefix: str) -> int | None:
    """The number of messages that are not entries of a bucket; None if they cannot be counted."""
    try:
        return (await count_entries(jetstream, info, prefix))[1]
    except (PermissionDeniedError, ConsumerLimitError):
        return None


async def timestamp_at(jetstream: JetStream, info: StreamInfo, seq: int) -> str | None:
    """The timestamp of the message at ``seq``; None if it is missing and was not the last one."""
    if seq == info.last_seq:
        return info.last_time
    message = await jetstream.message(info.name, seq=seq) if seq else None
    return message.time if message else None


class DataLossCheck:
    """Compares the offsets of one query with the stream as its leader reports it."""

    def __init__(
        self, adapter: FormatAdapter, connection: ReusableConnection, clock: Callable[[], float]
    ) -> None:
        self._adapter = adapter
        self._connection = connection
        self._clock = clock
        # Seconds without progress after which a mirror without the position of the query is not
        # waited for any more. As for outages: 0 waits for ``connectTimeout``.
        self._timeout = adapter.options.common.outage_timeout or connection.settings.connect_timeout
        self._lags_since: float | None = None
        self._reached: tuple[str, int] | None = None  # ``created`` and last sequence of the mirror
        self._progressed = self._logged = 0.0
        self._expired = False  # no progress for the timeout
        self._restored: str | None = None  # ``created`` of the restored stream that was reported

    @property
    def waits_for_mirror(self) -> bool:
        """Whether the last stream that was compared was a mirror that lags."""
        return self._lags_since is not None

    async def caught_up(self, at: Position, info: StreamInfo) -> StreamInfo:
        """The stream once it has reached ``at``, which a mirror may reach later.

        It returns a mirror without ``at`` where that does not progress any more.
        """
        while await self._identify(at, info) is Identity.LAGGING:
            await asyncio.sleep(_POLL_INTERVAL)
            info = await (await self._connection.jetstream()).stream_info(info.name)
        return info

    async def resume_from(
        self, start: Position, info: StreamInfo, *, merged_through: int = 0
    ) -> Position | None:
        """The offset from which reading resumes: ``start``, or that of a new epoch after a loss.

        None while a mirror is waited for.

        Args:
            merged_through: messages up to this sequence are not required.
        """
        sequence = self._adapter.terms.sequence
        identity = await self._identify(start, info)
        if identity is Identity.LAGGING:
            return None
        if identity is Identity.RECREATED:
            self._report(
                info.name,
                f"stream was deleted and re-created: it was created at {info.created}, expected "
                f"{start.created} (messages after {sequence} {start.stream_seq} were not read)",
                "read the re-created stream from its start",
            )
            return _new_epoch(start, info.created, max(0, info.first_seq - 1))
        if identity is Identity.ROLLED_BACK:
            at = await self._seq_before_unread(start, info)
            observed = (
                f"last {sequence} is {info.last_seq}, expected {start.stream_seq} or higher"
                if info.last_seq < start.stream_seq
                else f"{sequence} {start.stream_seq} has another message, expected the one that "
                f"the query had read"
            )
            self._report(
                info.name,
                f"stream was rolled back: {observed}",
                f"continue after {sequence} {at}",
            )
            time = await timestamp_at(await self._connection.jetstream(), info, at)
            return _new_epoch(start, info.created, at, time)
        if identity is Identity.RESTORED:
            self._report_restored(start, info)
            start = replace(start, created=info.created)
        await self.verify_retained(info, max(start.stream_seq, merged_through), start)
        return start

    async def restored_position(self, at: Position, info: StreamInfo) -> Position | None:
        """The position after ``at`` in a stream that was deleted and restored; None in another one.

        The offset before it does not have the stream, so the position is an origin.
        """
        if await self._identify(at, info) is Identity.RECREATED:
            return None
        # A mirror that lags is compared with the position by the next polls.
        resumed = await self.resume_from(at, info) or replace(at, created=info.created)
        return replace(resumed, origin=resumed.stream_seq, consumer_seq=0)

    async def verify_retained(
        self, info: StreamInfo, start: int, offset: Position, end: int = ENDLESS
    ) -> None:
        """Report messages of ``(start, end]`` that aged out, where every message is required.

        Args:
            offset: an offset of the epoch of the range.
        """
        required_after = max(start, self.expiry_allowed_through(info.name, start, offset))
        last = min(info.first_seq - 1, end)
        if last > required_after and self._adapter.missing_is_loss(self._adapter.read_scope(info)):
            jetstream = await self._connection.jetstream()
            await report_aged_out(self._adapter, jetstream, info, required_after + 1, last)

    def expiry_allowed_through(self, stream: str, start: int, offset: Position) -> int:
        """The sequence up to which messages after ``start`` may age out without a data loss.

        Before its first row a query accepts the history as it is. Messages that were written since
        the query started are required, and so is a sequence that the user chose.
        """
        chosen = self._adapter.start_of(stream).policy is DeliverPolicy.BY_START_SEQUENCE
        return 0 if chosen or start > offset.origin else offset.initial_through

    async def readable_end(self, end: Position, info: StreamInfo) -> Position:
        """The end up to which a range is readable that an earlier process planned up to ``end``.

        A lower end does not have a timestamp, since other messages may follow it now.
        """
        sequence = self._adapter.terms.sequence
        identity = await self._identify(end, info)
        if identity is Identity.RECREATED:
            self._report(
                info.name,
                f"stream was deleted and re-created: the micro-batch up to {sequence} "
                f"{end.stream_seq} was planned but not finished, and its messages are missing",
                "leave that micro-batch empty",
            )
            return replace(end, stream_seq=0, time=None)
        if identity is not Identity.ROLLED_BACK:
            return end
        at = await self._seq_before_unread(end, info)
        self._report(
            info.name,
            f"stream was rolled back: the micro-batch up to {sequence} {end.stream_seq} was "
            f"planned but not finished, and its messages after {at} are missing",
            f"read it up to {sequence} {at}",
        )
        return replace(end, stream_seq=min(at, end.stream_seq), time=None)

    async def _identify(self, offset: Position, info: StreamInfo) -> Identity:
        # The query waits at a chosen start position beyond the stream's end.
        waits = offset.time is None and offset.stream_seq == offset.origin
        seq = 0 if waits else offset.stream_seq
        known = KnownStream(offset.created, seq, offset.time, gap=offset.time is None)
        jetstream = await self._connection.jetstream()
        identity = await identify(jetstream, info, known)
        if identity is Identity.LAGGING:
            if not self._waits(info, seq):
                identity = await identify(jetstream, info, known, may_lag=False)
            return identity
        if self._lags_since is not None and not self._expired:
            seconds = round(self._clock() - self._lags_since, 1)
            log.warning("mirror has caught up", stream=info.name, seconds=seconds)
        self._lags_since, self._reached, self._expired = None, None, False
        return identity

    def _waits(self, info: StreamInfo, seq: int) -> bool:
        """Whether a mirror that lacks ``seq`` is waited for; logs a line every ten seconds."""
        now, reached = self._clock(), (info.created, info.last_seq)
        begins = self._lags_since is None
        since = self._lags_since = now if self._lags_since is None else self._lags_since
        if reached != self._reached:
            self._reached, self._progressed = reached, now
        self._expired = now - self._progressed >= self._timeout
        if not self._expired and (begins or now - self._logged >= _LOG_INTERVAL):
            self._logged = now
            log.warning(
                "mirror is behind the query, waiting for it",
                stream=info.name,
                last=info.last_seq,
                expected=seq,
                seconds=round(now - since, 1),
                timeout=self._timeout,
            )
        return not self._expired

    def _report_restored(self, start: Position, info: StreamInfo) -> None:
        if self._restored != info.created:
            self._restored = info.created
            log.warning(
                "stream was restored from a backup: the query continues, without a data loss",
                stream=info.name,
                created=info.created,
                before=start.created,
                after=start.stream_seq,
            )

    async def _seq_before_unread(self, start: Position, info: StreamInfo) -> int:
        """The sequence before the first message that is later than ``start.time``."""
        if start.time is None:
            return min(start.stream_seq, info.last_seq)  # unknown; does not repeat a row
        return await seq_before_time(
            await self._connection.jetstream(), info, nanoseconds(start.time) + 1
        )

    def _report(self, stream: str, observed: str, action: str) -> None:
        if self._expired:
            observed += f"; the mirror made no progress for {self._timeout:g} s"
        report_data_loss(self._adapter, stream, observed, action)


def _new_epoch(start: Position, created: str, origin: int, time: str | None = None) -> Position:
    return replace(
        start,
        created=created,
        epoch=start.epoch + 1,
        origin=origin,
        stream_seq=origin,
        time=time,
        initial_through=origin,
    )


_MAX_GAPS = 100_000  # above, gaps are merged into one; their number of sequences stays exact


class SequenceGapTracker:
    """Tracks the sequences that a reader receives, in increasing order: the others may be lost.

    A stream with a limit removes its oldest messages continuously, also while a range is read. A
    first sequence that has advanced meanwhile is not a loss: the removed messages may have been
    read before. So the tracker records the sequences that were not received. Those below the
    stream's present first sequence either aged out unread, or were a gap that a deleted message had
    left; the two cannot be distinguished afterwards. At the start of a query the history is
    accepted as it is: messages removed before its first message are not a loss.

    Args:
        first: the first required sequence.
        expiry_allowed_through: messages up to here may be missing before the first received one.
    """

    def __init__(self, first: int, expiry_allowed_through: int = 0) -> None:
        self._next = first
        self._expiry_allowed_through = expiry_allowed_through
        self._gaps: list[NDArray[np.int64]] = []  # rows of (first, last, number of sequences)
        self._gap_count = 0

    @property
    def has_gaps(self) -> bool:
        """Whether a sequence before a received one was not received."""
        return self._gap_count > 0

    def add(self, sequences: NDArray[np.int64]) -> None:
        """Record the next sequences: increasing, and higher than all recorded ones."""
        ahead = sequences[np.searchsorted(sequences, self._next) :]
        if not len(ahead):
            return
        self._next = max(self._next, min(int(ahead[0]), self._expiry_allowed_through + 1))
        self._expiry_allowed_through = 0
        last = int(ahead[-1])
        if last - self._next == len(ahead) - 1:  # increasing, so nothing is missing
            self._next = last + 1
            return
        before = np.concatenate(([self._next - 1], ahead[:-1]))
        holes = np.flatnonzero(ahead - before > 1)
        if len(holes):
            begin, end = before[holes] + 1, ahead[holes] - 1
            self._record(np.column_stack((begin, end, end - begin + 1)))
        self._next = last + 1

    def _record(self, gaps: NDArray[np.int64]) -> None:
        self._gaps.append(gaps)
        self._gap_count += len(gaps)
        if self._gap_count > _MAX_GAPS:
            every = np.concatenate(self._gaps)
            self._gaps = [np.array([[every[0, 0], every[-1, 1], every[:, 2].sum()]])]
            self._gap_count = 1

    def aged_out(self, first_seq: int, end: int) -> tuple[int, int, int] | None:
        """The sequences up to ``end`` that were not received and are not available; None if none.

        Args:
            first_seq: the stream's present first sequence.

        Returns:
            The first and the last of these sequences, and their number.
        """
        last_removed = min(first_seq - 1, end)
        rest = max(self._next, self._expiry_allowed_through + 1)
        gaps = np.concatenate((*self._gaps, [[rest, last_removed, last_removed - rest + 1]]))
        gaps = gaps[gaps[:, 0] <= last_removed]
        if not len(gaps):
            return None
        last = min(int(gaps[-1, 1]), last_removed)
        gaps[-1, 2] = min(gaps[-1, 2], last - gaps[-1, 0] + 1)
        return int(gaps[0, 0]), last, int(gaps[:, 2].sum())
