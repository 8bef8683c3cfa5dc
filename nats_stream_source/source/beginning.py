"""Where in a stream a deliver policy begins, as of now.

A consumer would decide it on whichever server it happens to be; here the stream's leader does, so
that a beginning is never earlier or later because a replica lags. A time is found by bisection,
since servers before 2.11 cannot be asked for one: two dozen requests for ten million messages, once
in a query's life.
"""

from __future__ import annotations

from collections.abc import Sequence

from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.times import nanoseconds, rfc3339
from nats_stream_source.options import Beginning, DeliverPolicy
from nats_stream_source.source.ranges import answered, first_after


async def begins_after(
    jetstream: JetStream, info: StreamInfo, beginning: Beginning, filters: Sequence[str]
) -> int:
    """The sequence after which ``beginning`` begins, in the stream as ``info`` has it.

    Args:
        filters: the query's filter subjects; none for all.

    Raises:
        OptionError: a time that has not come yet.
    """
    policy = beginning.policy
    if policy is DeliverPolicy.NEW:
        return info.last_seq
    if policy is DeliverPolicy.LAST:
        last = await jetstream.last_seq(info.name, filters)
        # Where nothing matches yet, the next one is the first.
        return last - 1 if last else info.last_seq
    if policy is DeliverPolicy.BY_START_SEQUENCE:
        assert beginning.sequence is not None
        return beginning.sequence - 1
    if policy is DeliverPolicy.BY_START_TIME:
        assert beginning.time is not None
        check_past(info, beginning.time, "startTime")
        return await before_time(jetstream, info, beginning.time)
    return 0


def check_past(info: StreamInfo, moment: int, option: str) -> None:
    """Raise OptionError for a ``moment`` (nanoseconds since 1970) that the server has not seen."""
    if info.now is not None and moment > nanoseconds(info.now):
        raise OptionError(
            f"option {option!r}: {rfc3339(moment)} lies in the future, the server has {info.now}"
        )


async def before_time(jetstream: JetStream, info: StreamInfo, moment: int) -> int:
    """The sequence before the first message of ``moment`` (nanoseconds since 1970) or later.

    As the server does it, this takes times to grow with sequences; where a server's clock was set
    back, it is one of the places where an earlier message is followed by a later one.
    """

    async def later(seq: int) -> bool:
        message = await jetstream.message(info.name, seq=seq, next_by_subj=">")
        return message is None or nanoseconds(message.time) >= moment

    return max(0, await answered(first_after(info.first_seq, info.last_seq), later) - 1)
