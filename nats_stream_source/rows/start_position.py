"""The sequence at which a deliver policy starts, resolved when the query starts.

A query that has a checkpoint resumes from it, whatever its start options are:
:func:`report_ignored_start` logs it where they differ from those of the first start.

A consumer would resolve it on the replica that serves it; here the stream leader does, so that a
lagging replica does not move the start position. A start time is resolved by bisection, since
servers before 2.11 cannot be queried by time: two dozen requests for ten million messages, once per
query.
"""

from __future__ import annotations

from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.times import nanoseconds, rfc3339
from nats_stream_source.logs import field_logger
from nats_stream_source.options import DeliverPolicy, StartPosition
from nats_stream_source.rows.base import FormatAdapter, StreamView
from nats_stream_source.rows.offsets import Position

log = field_logger(__name__)


async def resolve_start(view: StreamView, position: StartPosition) -> int:
    """The sequence after which ``position`` starts."""
    jetstream, info, policy = view.jetstream, view.info, position.policy
    if policy is DeliverPolicy.NEW:
        return info.last_seq
    if policy is DeliverPolicy.LAST:
        last = await jetstream.last_seq(info.name, view.scope.filters)
        # Without a match the query starts with the first message that will match.
        return last - 1 if last else info.last_seq
    if policy is DeliverPolicy.BY_START_SEQUENCE:
        assert position.sequence is not None
        return position.sequence - 1
    if policy is DeliverPolicy.BY_START_TIME:
        assert position.time is not None
        if position.time_strategy is None:
            validate_past(info, position.time, "startTime")
        before = await seq_before_time(jetstream, info, position.time)
        if position.time_strategy == "error" and before >= info.last_seq:
            late = f"the last message of stream {info.name} is of {info.last_time}"
            raise OptionError(
                f"could not resolve option 'startTime': "
                f"{late if info.last_time else f'stream {info.name} is empty'}, expected a message "
                f"of {rfc3339(position.time)} or later; set an earlier time, or "
                f"'startTimeStrategy' to 'latest' to start with the next message"
            )
        return before
    return 0


def validate_past(info: StreamInfo, time: int, option: str) -> None:
    """Raise OptionError for a ``time`` (nanoseconds since 1970) later than the server's clock."""
    if info.now is not None and time > nanoseconds(info.now):
        raise OptionError(
            f"could not resolve option {option!r}: {rfc3339(time)} is in the future, expected the "
            f"server's time {info.now} or earlier; set an earlier time"
        )


async def seq_before_time(jetstream: JetStream, info: StreamInfo, time: int) -> int:
    """The sequence before the first message of ``time`` (nanoseconds since 1970) or later.

    As on the server, the search requires that timestamps grow with sequences. Where a server's
    clock was set back, the result is one of the sequences where a message of an earlier timestamp
    precedes one of a later timestamp.
    """
    low, high = info.first_seq, info.last_seq + 1
    while low < high:
        middle = (low + high) // 2
        message = await jetstream.message(info.name, seq=middle, next_by_subj=">")
        if message is None or nanoseconds(message.time) >= time:
            high = middle
        else:
            low = middle + 1
    return max(0, low - 1)


async def report_ignored_start(view: StreamView, adapter: FormatAdapter, resumed: Position) -> None:
    """Log that a start option does not apply to a query that resumes at ``resumed``.

    A warning if the query started elsewhere. Where the offset cannot show that (``includeHistory``
    and the default start at the same sequence), the line is for information only.
    """
    if adapter.start_option is None:
        return
    other = await _started_elsewhere(view, adapter.start_of(view.info.name), resumed)
    if other is False:
        return
    (log.warning if other else log.info)(
        "start option ignored: the query resumes from its checkpoint; to start elsewhere, use "
        "another checkpoint location",
        stream=view.info.name,
        option=adapter.start_option,
        resumes_after=resumed.stream_seq,
        started_after=resumed.origin,
    )


async def _started_elsewhere(
    view: StreamView, position: StartPosition, resumed: Position
) -> bool | None:
    """Whether the query of a position did not start at ``position``; None if that is unknown."""
    policy, origin = position.policy, resumed.origin
    if resumed.epoch or policy is DeliverPolicy.LAST:
        return None
    if policy is DeliverPolicy.BY_START_SEQUENCE:
        return origin + 1 != position.sequence
    if policy is DeliverPolicy.NEW:
        return origin != resumed.initial_through
    if policy is not DeliverPolicy.BY_START_TIME:
        return True if origin else None
    assert position.time is not None
    for seq in (max(origin, 1), origin + 1):
        message = await view.jetstream.message(view.info.name, seq=seq, next_by_subj=">")
        if message is None:
            continue
        # The query skipped this message for its age, or it did not.
        if (message.seq > origin) == (nanoseconds(message.time) < position.time):
            return True
    return False
