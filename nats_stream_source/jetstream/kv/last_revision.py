"""The last revision that matches key filters, from the stream leader.

It is the end of a list of keys, of a history, and of the initial values of a watch. The leader's
message get (``STREAM.MSG.GET``) returns it in one request for each filter, together with the value.
A read without values (``headers_only``) must not transfer those values: ten values of 1 MB took
13 MB for each request of the last revision. So a temporary consumer returns it: a consumer that
starts with the last matching message (deliver policy ``last``) reports the sequence before that
message as ``delivered``, before it delivers anything. The consumer has no deliver subject and is
deleted at once.

The servers place a consumer on a random replica, which may lag. On a replicated stream, consumers
are created until one is placed on the stream leader: about three, 2 ms each. Where that fails (a
replica is down, the stream allows no further consumer), the message get is used.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from nats_stream_source.errors import NatsSourceError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumers import ConsumerInfo, temporary_consumer
from nats_stream_source.jetstream.kv.bucket import ALL_KEYS, Bucket
from nats_stream_source.jetstream.retry import is_transient
from nats_stream_source.jetstream.stream_info import StreamInfo

_MAX_PLACEMENTS = 15  # consumers of a replicated stream; 1 of 400 reads fails to place one


async def last_matching_seq(
    jetstream: JetStream,
    info: StreamInfo,
    bucket: Bucket,
    keys: tuple[str, ...],
    *,
    headers_only: bool = False,
) -> int:
    """The sequence of the leader's last message that matches; 0 if no message matches.

    For all keys it is the stream's last sequence, even if the message there was removed.

    Args:
        headers_only: do not transfer values.
    """
    if info.first_seq > info.last_seq:
        return 0
    if keys == ALL_KEYS:
        return info.last_seq
    filters = bucket.filter_subjects(keys)
    if headers_only and all(replica.recently_active for replica in info.replicas):
        seq = await _start_of_last_consumer(jetstream, info, filters)
        if seq is not None:
            return seq
    # Also where the consumer found no match: without a match no value is transferred.
    return await jetstream.last_seq(info.name, filters)


async def _start_of_last_consumer(
    jetstream: JetStream, info: StreamInfo, filters: tuple[str, ...]
) -> int | None:
    """The sequence at which a consumer starts with the last message; None without a result."""
    try:
        for _ in range(_MAX_PLACEMENTS):
            async with last_message_consumer(jetstream, info.name, filters) as consumer:
                if not info.replicated or consumer.leader == info.leader:
                    return consumer.stream_seq + 1 if consumer.num_pending else None
    except NatsSourceError as error:
        # A consumer limit that a running watch uses up, or a replica that does not respond.
        if not is_transient(error):
            raise
    return None


def last_message_consumer(
    jetstream: JetStream, stream: str, filters: tuple[str, ...]
) -> AbstractAsyncContextManager[ConsumerInfo]:
    """A consumer that starts with the last matching message of its replica."""
    return temporary_consumer(
        jetstream, stream, "last", filters, deliver_policy="last", headers_only=True
    )
