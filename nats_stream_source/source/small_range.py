"""A range of a few sequences, asked of the stream's leader one by one, without a consumer.

A consumer costs a dozen milliseconds, on a bucket that is mostly holes several dozens (DESIGN 3.5),
whatever it delivers: most of what a small micro-batch takes. ``STREAM.MSG.GET`` for every sequence
of the range, all under way at once, costs one or two.

A sequence that the leader does not have is a hole only if this leader has got as far as the range's
end: one that was just elected may not have yet. So it is asked for its state before and after, and
unless both times the same server answers and has the end, the range is left to a consumer, which
waits for it. So are all other doubts: no answer, a permission that is missing, messages so large
that the answers would need much memory.
"""

from __future__ import annotations

from nats_stream_source.errors import NatsSourceError, PermissionDeniedError, StreamNotFoundError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.patience import passes
from nats_stream_source.jetstream.stored import as_delivered, most_at_once
from nats_stream_source.jetstream.subjects import covers
from nats_stream_source.jetstream.together import together
from nats_stream_source.logs import field_logger
from nats_stream_source.source.plan import Plan
from nats_stream_source.wire.deliveries import deliveries
from nats_stream_source.wire.frames import Frames

MOST_SEQUENCES = 32
"""Where asking one by one ends to be cheaper than the cheapest consumer (docs/performance.md)."""

_LARGE = 64 << 10  # bytes; messages of this size on average are left to a consumer

log = field_logger(__name__)


async def small_range(
    jetstream: JetStream, plan: Plan, *, headers_only: bool = False
) -> tuple[Frames, StreamInfo] | None:
    """The messages of a small range as a consumer would deliver them; None to take a consumer.

    With them comes the stream's state after they were read. It may be of a stream that was made
    anew (``created``): there are no messages then, and the caller says so.

    Args:
        headers_only: leave payloads out.
    """
    most = min(MOST_SEQUENCES, most_at_once(jetstream))
    if plan.last_per_subject or plan.end - plan.start > most:
        return None
    try:
        return await _read(jetstream, plan, headers_only)
    except PermissionDeniedError as error:
        log.warning("a small range is read by a consumer", stream=plan.stream, error=error)
    except StreamNotFoundError:
        pass  # the consumer meets it too, if it stays so
    except NatsSourceError as error:
        if not passes(error):
            raise
        log.info("a small range is read by a consumer", stream=plan.stream, error=error)
    return None


async def _read(
    jetstream: JetStream, plan: Plan, headers_only: bool
) -> tuple[Frames, StreamInfo] | None:
    before = await jetstream.stream_info(plan.stream)
    if before.created != plan.created:
        return Frames.join([]), before
    if before.last_seq < plan.end or before.nbytes > _LARGE * before.messages:
        return None
    answers = await together(
        lambda seq: jetstream.message(plan.stream, seq=seq), range(plan.start + 1, plan.end + 1)
    )
    found = [message for message in answers if message is not None]
    after = await jetstream.stream_info(plan.stream)
    if after.created != plan.created:
        return Frames.join([]), after
    if after.leader != before.leader or after.last_seq < plan.end:
        log.info(
            "a small range is read by a consumer", stream=plan.stream, error="the leader changed"
        )
        return None
    if any("\ufffd" in message.subject for message in found):
        return None  # may be the server's stand-in for bytes that are not UTF-8
    matching = [
        as_delivered(message, headers_only=headers_only)
        for message in found
        if not plan.filters or any(covers(one, message.subject) for one in plan.filters)
    ]
    return deliveries(plan.stream, matching), after
