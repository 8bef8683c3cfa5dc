"""The message with which a conditional write is in conflict."""

from __future__ import annotations

import contextlib

from nats_stream_source.errors import (
    MessageNotFoundError,
    PermissionDeniedError,
    WrongLastSequenceError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_get.client import DirectGet
from nats_stream_source.jetstream.kv.bucket import Bucket
from nats_stream_source.jetstream.subjects import stream_of


async def last_message_after(
    jetstream: JetStream,
    bucket: Bucket,
    key: str,
    conflict: WrongLastSequenceError,
    direct_get: DirectGet | None = None,
) -> StoredMessage | None:
    """The key's last message, not older than the one that ``conflict`` reports; or None.

    The leader usually includes its sequence in the conflict, which a Direct Get must then reach
    (ADR-53). Without it, the leader's message is new enough; a user who may not request it reads
    the one of a replica, and a stale one costs another attempt.

    Args:
        direct_get: the client for the bucket's own stream, if the caller has one.
    """
    # The stream that stores the writes, or its mirror if only that is reachable from here.
    stream = bucket.stream if bucket.write_api_prefix else stream_of(bucket.write_bucket)
    subject = bucket.prefix + key
    if conflict.last_seq is None:
        with contextlib.suppress(PermissionDeniedError):
            return await jetstream.message(stream, last_by_subj=subject)
    if direct_get is None or stream != bucket.stream:
        direct_get = DirectGet(jetstream, stream)
    with contextlib.suppress(MessageNotFoundError):
        return await direct_get.last(subject, min_last_seq=conflict.last_seq)
    return None
