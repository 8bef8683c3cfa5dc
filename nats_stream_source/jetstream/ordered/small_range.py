"""Reads a range of a few sequences with single requests to the stream leader, without a consumer.

A consumer takes a dozen milliseconds, on a bucket whose sequences are mostly gaps several dozens
(docs/internals/measurements.md, "Servers"), for any number of messages: most of the time of a small
micro-batch. A ``STREAM.MSG.GET`` for every sequence of the range, all in parallel, takes one or
two.

A sequence that the leader does not have is a gap only if the leader has reached the range's end: a
leader that was just elected may not have. So its state is requested before and after, and unless
the same server responds both times and has the end, the range is left to a consumer, which waits
for it. A consumer also reads the range if a response is missing, a permission is missing, or
messages are so large that the responses would need much memory.
"""

from __future__ import annotations

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.errors import NatsSourceError, PermissionDeniedError, StreamNotFoundError
from nats_stream_source.jetstream.api import JetStream, as_deliveries, max_concurrent_requests
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.retry import is_transient
from nats_stream_source.jetstream.stream_identity import verify_created
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import covers
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.consumer.deliveries import Deliveries

MAX_SEQUENCES = 32
"""Above, a consumer is cheaper than single requests (docs/internals/performance_method.md)."""

_MAX_MEAN_SIZE = 64 << 10  # bytes; above, a consumer reads the range

log = field_logger(__name__)


def is_small(request: RangeRequest) -> bool:
    """Whether single requests to the leader may be cheaper than a consumer."""
    length = request.end - request.start
    return request.at_leader and not request.last_per_subject and 0 < length <= MAX_SEQUENCES


async def small_range(
    jetstream: JetStream, request: RangeRequest
) -> tuple[Deliveries, StreamInfo] | None:
    """The messages of a small range as a consumer would deliver them; None to use a consumer.

    The second element is the stream's state after the read.
    """
    if request.end - request.start > max_concurrent_requests(jetstream):
        return None
    try:
        return await _read(jetstream, request)
    except PermissionDeniedError as error:
        log.warning("a small range is read by a consumer", stream=request.stream, error=error)
    except StreamNotFoundError:
        pass  # the consumer raises the error if it persists
    except NatsSourceError as error:
        if not is_transient(error):
            raise
        log.info("a small range is read by a consumer", stream=request.stream, error=error)
    return None


async def _read(
    jetstream: JetStream, request: RangeRequest
) -> tuple[Deliveries, StreamInfo] | None:
    stream, end = request.stream, request.end
    before = await jetstream.stream_info(stream)
    verify_created(request.known, before)
    if before.last_seq < end or before.nbytes > _MAX_MEAN_SIZE * before.messages:
        return None
    responses = await gather_limited(
        lambda seq: jetstream.message(stream, seq=seq), range(request.start + 1, end + 1)
    )
    messages = [message for message in responses if message is not None]
    after = await jetstream.stream_info(stream)
    verify_created(request.known, after)
    if not before.is_same_leader(after, end):
        log.info("a small range is read by a consumer", stream=stream, error="the leader changed")
        return None
    if any("\ufffd" in message.subject for message in messages):
        return None  # possibly the server's replacement of bytes that are not UTF-8
    filters = request.filters
    if not filters and not all(one.subject.startswith(request.prefix) for one in messages):
        return None  # the verification of what is left out compares a consumer's deliveries
    matching = [
        message
        for message in messages
        if not filters or any(covers(f, message.subject) for f in filters)
    ]
    return as_deliveries(stream, matching, headers_only=request.headers_only), after
