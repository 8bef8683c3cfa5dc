"""Reads the messages that are written after a planned range while it is read.

A subject that is written again loses, if its history is full, the message that was planned. Its
last message is always in the stream, beyond the range. So the messages after the range are read
too, from its end to the stream's present end, and again from there, as long as others write
meanwhile and each such range is shorter than the one before. If the last range was followed by no
message, every subject that has a message was received: its last message was in one of the ranges
when that was read. Writers that never pause prevent this; then the leader's list of subjects shows
the missing ones (``list_subjects``). That list is the last resort: with 1,000,000 keys the server
counts all of them for each page of 100,000, which takes half a minute in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.rows.splits import BatchSplit
from nats_stream_source.spark.reading.loss import range_frames
from nats_stream_source.spark.runner import Runner
from nats_stream_source.wire.consumer.deliveries import Deliveries


class CatchUpReader:
    """Reads the messages after a split's range.

    Args:
        info: the stream after that range was read.

    Attributes:
        info: the stream as its leader last reported it.
        ranges_read: the number of ranges that were read.
        caught_up: whether no message followed the last of them, or the split's range.
    """

    def __init__(self, runner: Runner, batch_split: BatchSplit, info: StreamInfo) -> None:
        self._runner = runner
        self._range = batch_split.split.range
        self.info = info
        self.ranges_read = 0
        self.caught_up = False

    def frames(
        self, is_complete: Callable[[StreamInfo], bool], *, headers_only: bool
    ) -> Iterator[Deliveries]:
        """Yield the messages in the order of their sequences.

        Args:
            is_complete: called with each stream info; True if no subject is missing.
            headers_only: read without payloads.

        Raises:
            DataLossError: the stream was re-created or rolled back.
        """
        position = self._range.end
        previous_length: int | None = None
        while True:
            info = self.info
            length = info.last_seq - position
            self.caught_up = not length
            if (
                self.caught_up
                or is_complete(info)
                or (previous_length is not None and length >= previous_length)
            ):
                return
            previous_length = length
            yield from self._read(position, headers_only)
            position = info.last_seq
            self.ranges_read += 1

    def verify(self) -> None:
        """Raise DataLossError if the stream was re-created or rolled back since :attr:`info`."""
        for _ in self._read(self.info.last_seq, headers_only=True):  # an empty range
            pass

    def _read(self, start: int, headers_only: bool) -> Iterator[Deliveries]:
        """The messages from ``start`` to the last sequence of :attr:`info`, which is renewed."""
        request = replace(
            self._range,
            known=KnownStream.of(self.info),
            start=start,
            end=self.info.last_seq,
            last_per_subject=False,
            headers_only=headers_only,
        )
        reader = OrderedReader(self._runner.connection, request)
        yield from self._runner.iterate(range_frames(reader))
        self.info = reader.info


def all_subjects_seen(batch_split: BatchSplit, info: StreamInfo, seen: int) -> bool:
    """Whether as many subjects were received as the stream has.

    The number is sufficient where a subject is never removed: the plan rules out limits that remove
    one, and after a purge through the stream API the stream has fewer. It does not detect a subject
    that was purged while another one was created.
    """
    planned = batch_split.subject_count
    return (
        batch_split.keeps_last_messages and planned is not None and planned <= info.subjects == seen
    )
