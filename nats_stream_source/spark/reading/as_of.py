"""Reads a bucket as of a revision, as far as its history reaches.

The state as of revision ``end`` is each key's last entry up to ``end``. For entries in the stream
this is exact: history removes a key's oldest revisions first, so the last revision up to ``end``
that is left is the last one that existed. The range is read twice: first without values, to find
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
(``latest_values.CatchUpReader``), and the leader is requested for each of them. The order matters,
since revisions may be removed at any time: a count of revisions below the limit proves that none
was removed *until then*, so it is requested after the first revision.

All of this precedes the second read: a query that takes only a few rows must still raise the error.
The error names the keys by the cause for which their entries are missing, since each cause has its
own action: a deeper history keeps superseded revisions and does not keep purged ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.errors import DataLossError
from nats_stream_source.jetstream.api import JetStream, list_subjects, max_concurrent_requests
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.stream_identity import KnownStream, has_older_messages
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import is_literal
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.logs import field_logger
from nats_stream_source.rows.base import MESSAGE_TTLS, FormatAdapter, StateSplit, removal_settings
from nats_stream_source.spark.reading.latest_values import CatchUpReader, SubjectsSeen
from nats_stream_source.spark.reading.split_reader import range_frames
from nats_stream_source.spark.runner import Runner, cached_runner
from nats_stream_source.wire.columns import subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.headers import MARKER_REASON

_MAX_ROWS = 1 << 20  # buffered revisions; above, they are reduced to one row per key

# Headers of a message that replaces others which were removed.
_REPLACES = tuple(f"\r\n{name}:".encode() for name in ("Nats-Rollup", MARKER_REASON))
_MAX_NAMED = 10

log = field_logger(__name__)


class Cause(Enum):
    """Why a key's entry is missing."""

    SUPERSEDED = "superseded"
    PURGED = "purged"


Unknown = Mapping[Cause, Sequence[str]]
"""The subjects whose entries are missing, by cause."""


def read_as_of(split: StateSplit, adapter: FormatAdapter) -> Iterator[pa.RecordBatch]:
    """Yield the rows in the order of their revisions."""
    runner = cached_runner(adapter.options.connection)
    received = 0
    last, whole = _LastSequences(), replace(split.range, headers_only=True)
    reader = OrderedReader(runner.connection, whole)
    with contextlib.closing(runner.iterate(range_frames(reader))) as batches:
        for frames in batches:
            received += len(frames)
            last.add(frames)
    last.finish()
    info = _verify_complete(runner, split, adapter, reader.info, last.names, received)
    if not last.names:
        return
    # A revision may be a key's last only because later ones, up to `end`, were removed before they
    # were delivered: then it has been removed by now as well, and is reported.
    again = replace(split.range, known=KnownStream.of(info))
    reader = OrderedReader(runner.connection, again)
    with contextlib.closing(runner.iterate(range_frames(reader))) as batches:
        for frames in batches:
            yield from adapter.rows(last.select(frames), split)
    _report(split, adapter, {Cause.SUPERSEDED: last.missing()}, [])


def _verify_complete(
    runner: Runner,
    split: StateSplit,
    adapter: FormatAdapter,
    info: StreamInfo,
    names: pa.Array,
    received: int,
) -> StreamInfo:
    """Report a loss if the received subjects may not be all that had a message at ``end``.

    As many messages as ``end`` are all that were ever written up to there. Returns the stream after
    the messages that follow the range were read.
    """
    request, seen = split.range, SubjectsSeen()
    seen.add(names)

    def has_all(info: StreamInfo) -> bool:
        return received == request.end or info.messages == info.last_seq

    catch_up, late = CatchUpReader(runner, split, info, seen, has_all), list[str]()
    for frames in catch_up.first_messages(headers_only=True):
        late += subjects(frames, replace=True).to_pylist()

    async def unknown() -> Unknown:
        jetstream = await runner.connection.jetstream()
        missing: list[str] = []
        if not (catch_up.caught_up or catch_up.is_complete):
            listed = await list_subjects(jetstream, request.stream, request.subject_filters)
            missing = seen.missing(listed)
        return await _unknown(jetstream, split, late + missing)

    found = {} if has_all(catch_up.info) else runner.retry_transient(unknown)
    if received == request.end:
        return catch_up.info
    removals = _untraced_removals(catch_up.info)
    # If the range ended at the stream's last message, messages removed before the plan were not
    # part of the state, and none was removed since if as many subjects were received as planned.
    # For some keys only, that number is unknown, but limits remove the oldest messages first.
    if split.subject_count is None:
        all_received = (
            catch_up.info.first_seq == split.planned.first_seq and MESSAGE_TTLS not in removals
        )
    else:
        all_received = split.subject_count == len(names)
    exact = request.end >= split.planned.last_seq and all_received
    _report(split, adapter, found, [] if exact else removals)
    return catch_up.info


class _LastSequences:
    """The last sequence of each subject, and which of these messages the second read received."""

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


async def _unknown(jetstream: JetStream, split: StateSplit, names: Sequence[str]) -> Unknown:
    """The subjects of ``names``, not received, that may have had a message at ``end``."""
    request, history = split.range, split.history
    stream = request.stream

    async def cause(name: str) -> Cause | None:
        """None if the subject was created later."""
        if not is_literal(name):
            return Cause.SUPERSEDED  # the server would match other subjects
        first = await jetstream.message(stream, seq=1, next_by_subj=name)
        if first is None or any(header in first.headers for header in _REPLACES):
            return Cause.PURGED
        if first.seq <= request.end or history == 1:
            return Cause.SUPERSEDED  # of one revision, an earlier one leaves no trace
        if history < 1:
            return None
        counts = await jetstream.subject_counts(stream, name)
        return None if counts.get(name, history) < history else Cause.SUPERSEDED

    causes = await gather_limited(cause, names, max_concurrent_requests(jetstream))
    return {
        one: [name for name, its in zip(names, causes, strict=True) if its is one] for one in Cause
    }


def _untraced_removals(info: StreamInfo) -> list[str]:
    """The settings that may have removed entries without a trace; empty if none is missing."""
    if info.messages == info.last_seq:
        return []
    settings = list(removal_settings(info.config))
    now = info.now and nanoseconds(info.now)
    young = now and now - nanoseconds(info.created) < (info.config.get("max_age") or 0)
    if "max_age" in settings and young and not has_older_messages(info):
        settings.remove("max_age")  # the stream is younger than the limit
    # The limits remove the oldest messages first, a TTL any message.
    return settings if info.first_seq > 1 else [name for name in settings if name == MESSAGE_TTLS]


def _report(
    split: StateSplit, adapter: FormatAdapter, unknown: Unknown, removals: Sequence[str]
) -> None:
    """Raise DataLossError, or log a warning, if a part of the state is unknown."""
    history, stream, prefix = split.history, split.range.stream, split.range.prefix
    observed = []
    actions = ["set failOnDataLoss=false to leave out the unknown entries"]
    if superseded := unknown.get(Cause.SUPERSEDED):
        kept = "" if history < 1 else f", of which the bucket keeps {history} per key"
        observed.append(
            f"the entries of {_named(superseded, prefix)} were superseded by later revisions{kept}"
        )
        actions.append("keep more with a deeper history of the bucket")
    if purged := unknown.get(Cause.PURGED):
        observed.append(
            f"the entries of {_named(purged, prefix)} were removed by a later purge or expiry"
        )
        actions.append("delete keys with a DEL marker, which keeps their revisions")
    if removals:
        observed.append(f"entries may have been removed without a trace ({', '.join(removals)})")
        if MESSAGE_TTLS in removals:
            actions[0] = (
                f"set failOnDataLoss=false if no writer sets a TTL: {MESSAGE_TTLS} only allows "
                f"TTLs, and nats-py's create_key_value always sets it"
            )
            actions.append(f"create the bucket without {MESSAGE_TTLS}")
        else:
            actions.append("use a bucket without limits")
    if not observed:
        return
    state = f"as of {adapter.terms.sequence} {split.range.end}: {'; '.join(observed)}"
    if adapter.options.common.fail_on_data_loss:
        raise DataLossError(f"data loss in stream {stream} {state}; {', or '.join(actions)}")
    log.warning(
        f"data loss accepted: stream {stream} {state}; failOnDataLoss=false: leave out the unknown "
        f"entries",
        stream=stream,
    )


def _named(subjects: Sequence[str], prefix: str) -> str:
    """The number of keys, and the first of them."""
    names = sorted(name[len(prefix) :] for name in subjects)
    listed = ", ".join(repr(name) for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{len(names)} keys ({listed}{more})"
