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

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.spark.formats.base import FormatAdapter
from nats_stream_source.spark.formats.splits import BatchSplit
from nats_stream_source.spark.reading.read_verifier import verified_stream_info, verify_fingerprint
from nats_stream_source.spark.reading.split_reader import read_range
from nats_stream_source.spark.runner import Runner
from nats_stream_source.wire.framing.frames import Frames


class CatchUpReader:
    """Reads the messages after a split's range.

    The constructor requests the stream's state.

    Attributes:
        info: the stream as its leader last reported it.
        ranges_read: the number of ranges that were read.
        caught_up: whether no message followed the last of them, or the split's range.
    """

    def __init__(self, runner: Runner, batch_split: BatchSplit, adapter: FormatAdapter) -> None:
        self._runner = runner
        self._split = batch_split.split
        self._adapter = adapter
        self._known_last_seq = self._split.known_last_seq
        self._fingerprint = self._split.fingerprint
        self.info = self.verified_stream_info()
        self.ranges_read = 0
        self.caught_up = False

    def frames(
        self, is_complete: Callable[[StreamInfo], bool], *, headers_only: bool
    ) -> Iterator[Frames]:
        """Yield the messages in the order of their sequences.

        Args:
            is_complete: called with each stream info; True if no subject is missing.
            headers_only: read without payloads.

        Raises:
            DataLossError: the stream was re-created or rolled back.
        """
        position = self._split.range.end
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
            following = replace(
                self._split.range,
                start=position,
                end=info.last_seq,
                last_per_subject=False,
                headers_only=headers_only,
            )
            with contextlib.closing(read_range(self._runner, following)) as batches:
                yield from batches
            position = info.last_seq
            self.ranges_read += 1
            self.info = self.verified_stream_info()

    def verified_stream_info(self) -> StreamInfo:
        """The stream's present state, verified to be the stream that was read.

        Raises:
            DataLossError: the stream was re-created, or rolled back since the last call or the
                plan. If it has grown again, rows from before and after may be mixed.
        """
        split, runner = self._split, self._runner
        info = runner.run(
            verified_stream_info(
                runner.connection, split, self._adapter, known_last_seq=self._known_last_seq
            )
        )
        runner.run(verify_fingerprint(info, split, runner.connection, self._fingerprint))
        self._known_last_seq = info.last_seq
        if info.last_time is not None:  # otherwise the last message was deleted
            self._fingerprint = info.last_seq, info.last_time
        return info


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
