"""What is written after a planned range while it is read, until nothing is missing.

A subject that is written again loses, where its history is full, the message that was planned. Its
last message is always there, beyond the range. So what follows the range is read too, from its end
to the stream's present one, and again from there, as long as something is written meanwhile and
each such stretch is shorter than the one before. If nothing was, every subject that has a message
was seen: its last one lies in a stretch, and was there when that was read. Writers that never pause
keep it from coming to that end; then the leader's list of subjects says who is missing
(``listed_subjects``). That list is the last resort: with 1,000,000 keys the server counts them all
for each page of 100,000, for half a minute in all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from nats_stream_source.errors import DataLossError
from nats_stream_source.jetstream.api import StreamInfo
from nats_stream_source.source.batch_plan import BatchPlan
from nats_stream_source.source.query import Query
from nats_stream_source.source.reader import check_pinned, consume, stream_after
from nats_stream_source.source.runtime import Runner
from nats_stream_source.wire.frames import Frames


class Tail:
    """Reads what comes after a task's range.

    Attributes:
        info: the stream as its leader had it at the last look.
        stretches: how many stretches were read.
        settled: whether nothing had been written after the last of them, or after the range.
    """

    info: StreamInfo

    def __init__(self, runner: Runner, task: BatchPlan, query: Query) -> None:
        self._runner = runner
        self._task = task
        self._query = query
        self._known, self._pinned = task.plan.known, task.plan.pinned
        self.stretches = 0
        self.settled = False

    def frames(
        self, complete: Callable[[StreamInfo], bool], *, headers_only: bool
    ) -> Iterator[Frames]:
        """The messages, in the order of their sequences.

        Args:
            complete: asked after each look at the stream whether nothing is missing.
            headers_only: leave payloads out.

        Raises:
            DataLossError: the stream was replaced or set back.
        """
        plan, at = self._task.plan, self._task.plan.end
        before: int | None = None
        while True:
            info = self.look()
            length = info.last_seq - at
            self.settled = not length
            if self.settled or complete(info) or (before is not None and length >= before):
                return
            before = length
            stretch = replace(plan, start=at, end=info.last_seq, last_per_subject=False)
            with contextlib.closing(
                consume(self._runner, stretch, self._query, headers_only=headers_only)
            ) as batches:
                yield from batches
            at = info.last_seq
            self.stretches += 1

    def look(self) -> StreamInfo:
        """The stream now, which is still the one that was read.

        Raises:
            DataLossError: it was replaced, or set back since the look before, or since it was
                planned. Where it has grown again, rows of before and after may be mixed.
        """
        plan, known = self._task.plan, self._known
        self.info = info = stream_after(self._runner, plan, self._query, known=known)
        if info.last_seq < known:
            raise DataLossError(
                f"stream {plan.stream} was set back to {info.last_seq} while it was read, it "
                f"had {known}: rows that were read may be gone. Load the batch again"
            )
        check_pinned(info, plan, self._runner, self._pinned)
        self._known = info.last_seq
        if info.last_time is not None:  # else the last message was deleted, and nothing is there
            self._pinned = info.last_seq, info.last_time
        return info


def as_many(task: BatchPlan, info: StreamInfo, seen: int) -> bool:
    """Whether all subjects that there are were seen, by their number.

    That tells it where a subject stays for ever: a limit that removes any was ruled out when the
    task was planned, and where somebody purged some through the stream's API there are fewer now.
    What this does not find is a subject that was purged while another one was made.
    """
    planned = task.subjects
    return task.lasting and planned is not None and planned <= info.subjects == seen
