"""The reader of one split: runs on an executor, anew for every attempt.

It reads the planned range with an ordered consumer of its own and yields record batches; a range of
a few sequences without one, where that is cheaper (``source.small_range``). After the last message
it asks the leader whether the stream is still the planned one: if it was made anew, set back or cut
off meanwhile, the rows just read are not what the offsets promise, and the task fails.

The consumer is one that the stream's leader serves. A server whose store was damaged (a flipped
bit, a block that is gone) drops what it cannot read and goes on: its replica ends where the
leader's does, counts as current, is never mended, and its consumers pass over what it lacks as they
pass over deleted messages. One that lags, or whose clock lets messages expire earlier, differs from
the leader for a while. Only what the leader has is what the stream has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import replace

import pyarrow as pa

from nats_stream_source.errors import DataLossError, PermissionDeniedError
from nats_stream_source.jetstream.api import StreamInfo
from nats_stream_source.jetstream.less import check_less
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.range_request import RangeRequest
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.logs import field_logger
from nats_stream_source.source.continuity import Continuity, was_set_back
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.query import Query
from nats_stream_source.source.runtime import Runner, kept_runner
from nats_stream_source.source.small_range import small_range
from nats_stream_source.source.unbroken import Unbroken
from nats_stream_source.wire.columns import ack_tokens
from nats_stream_source.wire.frames import Frames

log = field_logger(__name__)


def read_split(plan: Plan, query: Query) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a split in the order of their sequences.

    Raises:
        DataLossError: the stream was replaced or set back, or rows of the range were gone before
            they were read and ``failOnDataLoss`` is set.
        ConsumerLostError, MinLastSequenceError, ConnectError, …: see ``jetstream.ordered``.
    """
    runner = kept_runner(query.connection)
    came = _Came(plan)
    if (small := runner.run(_small(runner.link, plan, query))) is not None:
        frames, info = small
        _check_created(info, plan)
        came.add(frames)
        came.check(info, runner, query)
        yield from rows_of(frames, plan, query)
        return
    with contextlib.closing(consume(runner, plan, query)) as batches:
        for frames in batches:
            came.add(frames)
            yield from rows_of(frames, plan, query)
    came.check(stream_after(runner, plan, query), runner, query)


class _Came:
    """What came of a range, and whether that is what was planned."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._unbroken: Unbroken | None = None
        if plan.complete_from is not None:
            self._unbroken = Unbroken(plan.complete_from, plan.history_through)
        self._last: tuple[int, int] | None = None  # sequence and time

    def add(self, frames: Frames) -> None:
        """The next messages."""
        if not len(frames):
            return
        tokens = ack_tokens(frames)
        self._last = int(tokens.stream_seq[-1]), int(tokens.timestamp_ns[-1])
        if self._unbroken is not None:
            self._unbroken.add(tokens.stream_seq)

    def check(self, info: StreamInfo, runner: Runner, query: Query) -> None:
        """Compare with the plan; ``info`` is the stream after the last message.

        Raises:
            DataLossError: something is gone, and ``failOnDataLoss`` is set; or the stream was set
                back, and other messages may have come than were planned.
        """
        plan = self._plan
        check_pinned(info, plan, runner, plan.pinned, self._last)
        gone = self._unbroken and self._unbroken.gone(info.first_seq, plan.end)
        if gone:
            Continuity(query, runner.link).aged_out(info, *gone, filters=plan.filters)


def check_pinned(
    info: StreamInfo,
    plan: Plan,
    runner: Runner,
    pinned: tuple[int, str] | None,
    last: tuple[int, int] | None = None,
) -> None:
    """Raise DataLossError where the stream was set back, even if it has grown again since.

    Args:
        info: the stream as its leader has it now.
        pinned: sequence and time of a message that it had; None where there was none.
        last: sequence and time, in nanoseconds, of the last message that was read.
    """
    if pinned is None:
        return
    seq, time = pinned
    if last is not None and last[0] == seq <= info.last_seq:
        back = last[1] != nanoseconds(time)  # what was read says it best
    else:
        back = _was_set_back(runner, info, seq, time)
    if back:
        # Rows of before and after are mixed: no setting makes them right, only a new plan does.
        raise DataLossError(
            f"stream {plan.stream} was set back while the range ({plan.start}, {plan.end}] was "
            f"read: at {seq} it has not what it had before. A batch has to be loaded again; a "
            f"streaming query that is restarted with the option failOnDataLoss=false goes on after "
            f"the last message that is still there"
        )


def _was_set_back(runner: Runner, info: StreamInfo, seq: int, time: str) -> bool:
    """As :func:`was_set_back`; False where the leader must not be asked."""

    async def ask() -> bool:
        try:
            return await was_set_back(await runner.link.jetstream(), info, seq, time)
        except PermissionDeniedError as error:
            log.info("whether it was set back is not known", stream=info.name, error=error)
            return False

    return runner.patiently(ask)


def consume(
    runner: Runner, plan: Plan, query: Query, *, headers_only: bool | None = None
) -> Generator[Frames, None, None]:
    """The messages of the range, from an ordered consumer.

    Args:
        headers_only: leave payloads out; as the query has it where that is not said.
    """
    request = request_of(plan, query)
    if headers_only is not None:
        request = replace(request, headers_only=headers_only)
    return runner.iterate(OrderedReader(runner.link, request).batches())


def request_of(plan: Plan, query: Query) -> RangeRequest:
    """What an ordered consumer is asked for to read a split."""
    return RangeRequest(
        stream=plan.stream,
        created=plan.created,
        start=plan.start,
        end=plan.end,
        filters=plan.filters,
        last_per_subject=plan.last_per_subject,
        headers_only=query.headers_only,
        at_leader=True,
    )


def rows_of(frames: Frames, plan: Plan, query: Query) -> Iterator[pa.RecordBatch]:
    """Their rows, if there are any."""
    if not len(frames):
        return
    rows = query.rows(frames, plan)
    if rows.num_rows:
        yield rows


async def _small(link: Link, plan: Plan, query: Query) -> tuple[Frames, StreamInfo] | None:
    return await small_range(await link.jetstream(), plan, headers_only=query.headers_only)


def stream_after(runner: Runner, plan: Plan, query: Query, known: int | None = None) -> StreamInfo:
    """The stream after the read, as its leader has it; DataLossError when it is another one.

    ``known`` is the last sequence that it had, the plan's if None: a leader that has less is
    believed when it says so twice.
    """

    async def look() -> StreamInfo:
        jetstream = await runner.link.jetstream()
        info = await query.look(jetstream, plan.stream)
        had = plan.known if known is None else known
        if info.last_seq < had:
            await check_less(jetstream, info, had)
        return info

    info = runner.patiently(look)
    _check_created(info, plan)
    return info


def _check_created(info: StreamInfo, plan: Plan) -> None:
    if info.created != plan.created:
        # Rows of two streams may be mixed: no setting makes them right, only a new plan does.
        raise DataLossError(
            f"stream {plan.stream} was deleted and made again (created {info.created}) while the "
            f"range ({plan.start}, {plan.end}] of {plan.created} was read. A batch has to be "
            f"loaded again; a streaming query that is restarted with the option "
            f"failOnDataLoss=false goes on with the new stream"
        )
