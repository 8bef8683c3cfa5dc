"""Reads a bucket as of a revision, as far as its history reaches.

The state as of revision ``end`` is each key's last entry up to ``end``. For entries in the stream
this is exact: history removes a key's oldest revisions first, so the last revision up to ``end``
that is left is the last one that existed. Where the bucket keeps one revision per key, all messages
up to ``end`` are such entries. Otherwise the range is read twice: first without values, to find
each key's last sequence, then those messages.

Entries that are missing need more evidence:

- A key whose revisions are all later than ``end`` was created later, or its entry as of ``end`` was
  removed. It was created later if it has fewer revisions than the bucket keeps, so that none was
  removed by history, and its first revision did not replace others (a PURGE). Otherwise its state
  as of ``end`` is unknown.
- A key that is written while it is read may lose the very revision that was to be delivered. Then
  the second read, or the first, lacks it, and the leader's list of keys shows it.
- An entry that a limit removed (``max_age``, a TTL, ``max_bytes``) leaves no trace: only where no
  sequence up to ``end`` is missing is it certain that none was removed. A missing sequence does not
  show its cause, also in a bucket whose messages have no TTL now: the message that had one is gone.

Each of these is a data loss: an error that names the keys, or with ``failOnDataLoss=false`` a
warning, without a row. A removal through the stream API (a purge, a deleted message) is not
detected, nor is a history that used to be shorter.

The keys that were created later, or may have been, are found in the messages after the range
(``catch_up``). If none was written while these were read, a key's first message and
its number of revisions are of one point in time, and decide. Otherwise the leader is requested for
each of these keys, and the order matters, since revisions may be removed at any time: a count of
revisions below the limit proves that none was removed *until then*, so it is requested after the
first revision.

All of this precedes the second read, if the range is read twice: a query that takes only a few rows
must still raise the error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.jetstream.api import JetStream, list_subjects, max_concurrent_requests
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import is_literal
from nats_stream_source.rows.base import FormatAdapter
from nats_stream_source.rows.splits import MESSAGE_TTLS, BatchSplit
from nats_stream_source.spark.reading.loss import range_frames
from nats_stream_source.spark.reading.state.catch_up import CatchUpReader, all_subjects_seen
from nats_stream_source.spark.reading.state.state_loss import (
    Cause,
    Unknown,
    has_all_messages,
    report,
    untraced_removals,
)
from nats_stream_source.spark.reading.state.subjects_seen import SubjectsSeen
from nats_stream_source.spark.runner import Runner, cached_runner
from nats_stream_source.wire.columns import header_blocks, subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.headers import MARKER_REASON

_MAX_ROWS = 1 << 20  # buffered revisions; above, they are reduced to one row per key

# Headers of a message that replaces others which were removed.
_REPLACES = tuple(f"\r\n{name}:".encode() for name in ("Nats-Rollup", MARKER_REASON))
_NO_LATE_ENTRIES = pa.schema(
    [("name", pa.string()), ("replaces", pa.bool_()), ("count", pa.int64())]
).empty_table()


def read_as_of(batch_split: BatchSplit, adapter: FormatAdapter) -> Iterator[pa.RecordBatch]:
    """Yield the rows in the order of their revisions.

    Raises:
        DataLossError: a key's entry as of ``end`` is or may be missing, and ``failOnDataLoss`` is
            set; the stream was re-created or rolled back while it was read.
        ConsumerLostError, MinLastSequenceError, ConnectError, …: see ``jetstream.ordered.reader``.
    """
    split, runner = batch_split.split, cached_runner(adapter.options.connection)
    seen, received = SubjectsSeen(), 0
    if batch_split.history == 1:
        reader = OrderedReader(runner.connection, split.range)
        with contextlib.closing(runner.iterate(range_frames(reader))) as batches:
            for frames in batches:
                received += len(frames)
                if len(frames):
                    seen.add(subjects(frames))
                yield from adapter.rows(frames, split)
        _verify_complete(runner, batch_split, adapter, reader.info, seen, received)
        return
    last, whole = _LastSequences(), replace(split.range, headers_only=True)
    reader = OrderedReader(runner.connection, whole)
    with contextlib.closing(runner.iterate(range_frames(reader))) as batches:
        for frames in batches:
            received += len(frames)
            last.add(frames)
    last.finish()
    seen.add(last.names)
    info = _verify_complete(runner, batch_split, adapter, reader.info, seen, received)
    if not last.names:
        return
    # A revision may be a key's last only because later ones, up to `end`, were removed before they
    # were delivered: then it has been removed by now as well, and is reported.
    again = replace(split.range, known=KnownStream.of(info))
    reader = OrderedReader(runner.connection, again)
    with contextlib.closing(runner.iterate(range_frames(reader))) as batches:
        for frames in batches:
            yield from adapter.rows(last.select(frames), split)
    report(batch_split, adapter, {Cause.SUPERSEDED: last.missing()}, [])


def _verify_complete(
    runner: Runner,
    batch_split: BatchSplit,
    adapter: FormatAdapter,
    info: StreamInfo,
    seen: SubjectsSeen,
    received: int,
) -> StreamInfo:
    """Report a loss if the received subjects may not be all that had a message at ``end``.

    Args:
        info: the stream after the range was read.
        received: the number of messages of the range. As many as ``end`` are all that were ever
            written up to there.

    Returns:
        The stream after the messages that follow the range were read.
    """

    def is_complete(info: StreamInfo) -> bool:
        return (
            received == batch_split.split.range.end
            or has_all_messages(info)
            or all_subjects_seen(batch_split, info, len(seen))
        )

    catch_up, late = CatchUpReader(runner, batch_split, info), _LateEntries(seen)
    for frames in catch_up.frames(is_complete, headers_only=True):
        late.add(frames)
    unknown: Unknown = {}
    if not is_complete(catch_up.info):
        if catch_up.caught_up and catch_up.ranges_read <= 1:
            unknown = late.unknown(batch_split.history)
        else:
            names = None if not catch_up.caught_up else late.names()

            async def request() -> Unknown:
                jetstream = await runner.connection.jetstream()
                return await _unknown(jetstream, batch_split, seen, names)

            unknown = runner.retry_transient(request)
    if received == batch_split.split.range.end:
        return catch_up.info
    removals = untraced_removals(catch_up.info)
    # If the range ended at the stream's last message, messages removed before the plan were not
    # part of the state, and none was removed since if as many subjects were received as planned.
    # For some keys only, that number is unknown, but limits remove the oldest messages first.
    if batch_split.subject_count is None:
        all_received = (
            catch_up.info.first_seq == batch_split.first_seq and MESSAGE_TTLS not in removals
        )
    else:
        all_received = batch_split.subject_count == len(seen)
    exact = batch_split.at_stream_end and all_received
    report(batch_split, adapter, unknown, [] if exact else removals)
    return catch_up.info


class _LateEntries:
    """The messages after the range of subjects that were not received in it."""

    def __init__(self, seen: SubjectsSeen) -> None:
        self._seen = seen
        self._parts: list[pa.Table] = []
        self._rows = 0

    def add(self, frames: Deliveries) -> None:
        """Add the next messages."""
        if not len(frames):
            return
        names, blocks = subjects(frames), header_blocks(frames)
        replaces = pc.or_(*(pc.match_substring(blocks, header) for header in _REPLACES))
        count = pa.repeat(pa.scalar(1, pa.int64()), len(frames))
        part = pa.table({"name": names, "replaces": replaces, "count": count})
        self._parts.append(part.filter(self._seen.unseen(names)))
        self._rows += self._parts[-1].num_rows
        if self._rows > _MAX_ROWS:
            self._parts, self._rows = [self._table()], 0

    def _table(self) -> pa.Table:
        table = pa.concat_tables(self._parts) if self._parts else _NO_LATE_ENTRIES
        grouped = table.group_by("name").aggregate([("replaces", "max"), ("count", "sum")])
        return grouped.rename_columns(["name", "replaces", "count"])

    def names(self) -> list[str]:
        """The subjects."""
        names: list[str] = self._table()["name"].to_pylist()
        return names

    def unknown(self, history: int) -> Unknown:
        """The subjects that may have had earlier messages, if all their messages were added."""
        table = self._table()
        purged = table["replaces"]
        unknown: Unknown = {Cause.PURGED: table["name"].filter(purged).to_pylist()}
        if history < 1:
            return unknown
        full = pc.and_not(pc.greater_equal(table["count"], history), purged)
        return {**unknown, Cause.SUPERSEDED: table["name"].filter(full).to_pylist()}


class _LastSequences:
    """The last sequence of each subject, and which of these messages the second read received.

    Attributes:
        names: the subjects, after :meth:`finish`.
    """

    def __init__(self) -> None:
        self._parts: list[pa.Table] = []
        self._rows = 0
        self.names: pa.Array = pa.array([], pa.string())
        self._sequences: NDArray[np.int64] = np.zeros(0, np.int64)
        self._received: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def add(self, frames: Deliveries) -> None:
        """Add the next messages of the first read."""
        if not len(frames):
            return
        columns = {"name": subjects(frames), "seq": pa.array(frames.stream_seq)}
        self._parts.append(pa.table(columns))
        self._rows += len(frames)
        if self._rows > _MAX_ROWS:
            self._reduce()

    def _reduce(self) -> pa.Table:
        if not self._parts:
            return pa.table({"name": self.names, "seq": pa.array(self._sequences)})
        last = pa.concat_tables(self._parts).group_by("name").aggregate([("seq", "max")])
        self._parts = [last.rename_columns(["name", "seq"])]
        self._rows = 0
        return self._parts[0]

    def finish(self) -> None:
        """End the first read, and fix the last sequence of each subject."""
        table = self._reduce().sort_by("seq").combine_chunks()
        self._parts.clear()
        self.names = table["name"].combine_chunks()
        self._sequences = table["seq"].to_numpy()
        self._received = np.zeros(len(table), np.bool_)

    def select(self, frames: Deliveries) -> Deliveries:
        """The messages of ``frames``, from the second read, that are their subject's last."""
        sequences = frames.stream_seq
        indices = np.searchsorted(self._sequences, sequences)
        within = indices < len(self._sequences)
        mask = within & (self._sequences[np.where(within, indices, 0)] == sequences)
        self._received[indices[mask]] = True
        return frames.select(mask)

    def missing(self) -> list[str]:
        """The subjects whose last message the second read did not receive."""
        names: list[str] = self.names.filter(pa.array(~self._received)).to_pylist()
        return names


async def _unknown(
    jetstream: JetStream, batch_split: BatchSplit, seen: SubjectsSeen, names: list[str] | None
) -> Unknown:
    """The subjects of ``names`` that may have had a message at ``end``.

    Args:
        names: subjects that were not received; None for all of them.
    """
    request, history = batch_split.split.range, batch_split.history
    stream = request.stream
    if names is None:
        names = seen.missing(await list_subjects(jetstream, stream, request.subject_filters))

    async def cause(name: str) -> Cause | None:
        """None if the subject was created later."""
        if not is_literal(name):
            return Cause.SUPERSEDED  # the server would match other subjects
        first = await jetstream.message(stream, seq=1, next_by_subj=name)
        if first is None or any(header in first.headers for header in _REPLACES):
            return Cause.PURGED
        if first.seq <= request.end:
            return Cause.SUPERSEDED
        if history < 1:
            return None
        counts = await jetstream.subject_counts(stream, name)
        return None if counts.get(name, history) < history else Cause.SUPERSEDED

    causes = await gather_limited(cause, names, max_concurrent_requests(jetstream))
    return {
        one: [name for name, its in zip(names, causes, strict=True) if its is one] for one in Cause
    }
