"""Reads the last message of each subject as of now: complete, one row per subject, and finite.

The plan covers the last message of each subject up to ``end``, the stream's last sequence at that
time. A consumer of the stream leader delivers each message that is still its subject's last, once:
the messages up to ``end`` do not change, they can only be removed. (A lagging replica would deliver
an older message of a subject first, and then its last one.)

A message that was superseded before it was delivered is missing: 7 to 8 % of 100,000 keys under
steady writes, at any history (docs/internals/measurements.md, "Servers"). Its successor is beyond
``end``. So unless as many subjects were received as the plan counted, :class:`CatchUpReader` reads
the messages written since, from ``end`` to the stream's present end, and again from there, as long
as each such range is shorter than the one before. Of subjects not yet received the first message is
kept. If the last range was followed by no message, every subject that has a message was received:
its last message was in one of the ranges when that was read.

Writers that never pause prevent this. Then the leader lists the subjects, and returns the last
message of each that is missing; a subject without a message by then was removed meanwhile. That
list is the last resort: with 1,000,000 keys the server counts all of them for each page of 100,000,
which takes half a minute in all.

The guarantee: one row for each subject that had a message both when the read was planned and when
it ended; the row is the subject's last message at some time in between. So it is at least as new as
the plan, and rows of different subjects may be of different times. A subject that is created, or of
which messages are removed, meanwhile may or may not have a row. A repeated task gives the same
guarantee, possibly with later rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.jetstream.api import (
    StoredMessage,
    as_deliveries,
    list_subjects,
    max_concurrent_requests,
)
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.retry import retry_transient
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import is_literal
from nats_stream_source.logs import field_logger
from nats_stream_source.rows.base import FormatAdapter, StateSplit, removal_settings
from nats_stream_source.spark.reading.split_reader import range_frames
from nats_stream_source.spark.runner import Runner, cached_runner
from nats_stream_source.wire.columns import subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries

log = field_logger(__name__)


def read_latest_values(split: StateSplit, adapter: FormatAdapter) -> Iterator[pa.RecordBatch]:
    """Yield the rows: those of the planned range in the order of their sequences, then others."""
    runner = cached_runner(adapter.options.connection)
    seen = SubjectsSeen()
    reader = OrderedReader(runner.connection, split.range)
    with contextlib.closing(runner.iterate(range_frames(reader))) as batches:
        for frames in batches:
            if len(frames):
                seen.add(subjects(frames, replace=True))
            yield from adapter.rows(frames, split)
    # The range delivers each subject once, so this count is exact.
    all_in_range = len(seen) == split.subject_count
    catch_up = CatchUpReader(runner, split, reader.info, seen, lambda _: all_in_range)
    for frames in catch_up.first_messages(headers_only=split.range.headers_only):
        yield from adapter.rows(frames, split)
    # A TTL that removes a message may uncover an older one, without a new message.
    uncovers = split.history != 1 and catch_up.info.config.get("allow_msg_ttl")
    if catch_up.is_complete or (catch_up.caught_up and not uncovers):
        return
    missing = _missing_messages(runner.connection, split, adapter, seen)
    with contextlib.closing(runner.iterate(missing)) as batches:
        for frames in batches:
            yield from adapter.rows(frames, split)
    catch_up.verify()


async def _missing_messages(
    connection: ReusableConnection,
    split: StateSplit,
    adapter: FormatAdapter,
    seen: SubjectsSeen,
) -> AsyncIterator[Deliveries]:
    """The last message of each subject that the leader lists and that was not received."""
    request, timeout = split.range, adapter.options.connection.connect_timeout
    stream = request.stream

    async def leader_subjects() -> set[str]:
        return await list_subjects(await connection.jetstream(), stream, request.subject_filters)

    # A subject with wildcard tokens cannot be requested: the server would match others.
    missing = seen.missing(filter(is_literal, await retry_transient(leader_subjects, timeout)))
    log.info("requesting superseded subjects", stream=stream, subjects=len(missing))
    size = max_concurrent_requests(await connection.jetstream())
    for index in range(0, len(missing), size):
        some = missing[index : index + size]

        async def last_messages(names: Sequence[str] = some) -> list[StoredMessage]:
            return await (await connection.jetstream()).last_messages(stream, names)

        if messages := await retry_transient(last_messages, timeout):
            yield as_deliveries(stream, messages, headers_only=request.headers_only)


class SubjectsSeen:
    """A set of subjects, stored as Arrow strings without a Python object per subject."""

    def __init__(self) -> None:
        self._names: list[pa.Array] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, names: pa.Array) -> None:
        """Add subjects (``pa.string()``) that differ from each other and from all in the set."""
        self._names.append(names)
        self._count += len(names)

    def unseen(self, names: pa.Array) -> pa.Array:
        """For each of ``names``, whether it is not in the set: ``pa.bool_()``."""
        seen = pa.chunked_array(self._names, pa.string())
        # Look the few names up in the set: the reverse would build a hash table of the set each
        # time.
        few = seen.filter(pc.is_in(seen, value_set=names))
        return pc.invert(pc.is_in(names, value_set=few))

    def first_messages(self, frames: Deliveries) -> Deliveries:
        """The first message of each subject that is not in the set; adds these subjects."""
        if not len(frames):
            return frames
        encoded = subjects(frames, replace=True).dictionary_encode()
        names = encoded.dictionary
        new = self.unseen(names)
        self.add(names.filter(new))
        _, first = np.unique(encoded.indices.to_numpy(), return_index=True)
        rows: NDArray[np.intp] = np.sort(first[new.to_numpy(zero_copy_only=False)])
        return frames.select(rows)

    def missing(self, listed: Iterable[str]) -> list[str]:
        """The subjects of ``listed`` that are not in the set, sorted."""
        names = pa.array(sorted(listed), pa.string())
        unseen: list[str] = names.filter(self.unseen(names)).to_pylist()
        return unseen


class CatchUpReader:
    """Reads the messages that were written after a split's range.

    Args:
        info: the stream after that range was read.
        seen: the subjects that were received.
        has_all: whether a stream info shows otherwise that no subject is missing.

    Attributes:
        info: the stream as its leader last reported it.
        caught_up: whether no message followed the last of them, or the split's range.
    """

    def __init__(
        self,
        runner: Runner,
        split: StateSplit,
        info: StreamInfo,
        seen: SubjectsSeen,
        has_all: Callable[[StreamInfo], bool],
    ) -> None:
        self._runner = runner
        self._split = split
        self._seen = seen
        self._has_all = has_all
        self.info = info
        self.caught_up = False

    @property
    def is_complete(self) -> bool:
        """Whether no subject is missing: as many were received as the stream has.

        The number is sufficient where a subject is never removed: the plan rules out limits that
        remove one, and after a purge through the stream API the stream has fewer. It does not
        detect a subject that was purged while another one was created.
        """
        if self._has_all(self.info):
            return True
        planned = self._split.subject_count
        if planned is None or removal_settings(self._split.planned.config):
            return False
        return planned <= self.info.subjects == len(self._seen)

    def first_messages(self, *, headers_only: bool) -> Iterator[Deliveries]:
        """Yield the first message of each subject that was not received, until none is missing."""
        position = self._split.range.end
        previous_length: int | None = None
        while True:
            length = self.info.last_seq - position
            self.caught_up = not length
            longer = previous_length is not None and length >= previous_length
            if self.caught_up or longer or self.is_complete:
                return
            previous_length, end = length, self.info.last_seq
            for frames in self._read(position, headers_only):
                yield self._seen.first_messages(frames)
            position = end

    def verify(self) -> None:
        """Raise DataLossError if the stream was re-created or rolled back since :attr:`info`."""
        for _ in self._read(self.info.last_seq, headers_only=True):  # an empty range
            pass

    def _read(self, start: int, headers_only: bool) -> Iterator[Deliveries]:
        """The messages from ``start`` to the last sequence of :attr:`info`, which is renewed."""
        request = replace(
            self._split.range,
            known=KnownStream.of(self.info),
            start=start,
            end=self.info.last_seq,
            last_per_subject=False,
            headers_only=headers_only,
        )
        reader = OrderedReader(self._runner.connection, request)
        yield from self._runner.iterate(range_frames(reader))
        self.info = reader.info
