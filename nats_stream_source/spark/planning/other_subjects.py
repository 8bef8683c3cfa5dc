"""Warn of messages in a bucket's stream that are not entries of the bucket.

No read of the bucket returns such messages (``jetstream.kv.requests``), and no error reports
them.
"""

from __future__ import annotations

import math

from nats_stream_source.jetstream.kv.bucket import Bucket
from nats_stream_source.logs import field_logger
from nats_stream_source.rows.base import StreamView
from nats_stream_source.rows.data_loss import other_messages

log = field_logger(__name__)


class OtherSubjectsWarning:
    """The warning of one stream of a query: logged once.

    Only a stream that can have such messages is counted: the keys of most buckets cover theirs. A
    count takes two requests. Without such messages, the next one follows when the last sequence has
    doubled, so that the plannings of a long query share a few.
    """

    def __init__(self) -> None:
        self._next = 1.0  # the last sequence from which on the messages are counted

    async def check(self, view: StreamView) -> None:
        """Log the number of messages that a query of a bucket does not read, if it is due."""
        info, prefix = view.info, view.scope.prefix
        if not (prefix and info.messages) or info.last_seq < self._next:
            return
        if Bucket.of(info).covers_stream:
            return
        others = await other_messages(view.jetstream, info, prefix) or 0
        self._next = math.inf if others > 0 else 2.0 * info.last_seq
        if others > 0:
            log.warning(
                "the stream has messages that are not entries of the bucket and are not read",
                stream=info.name,
                messages=others,
                action=_action(view),
            )


def _action(view: StreamView) -> str:
    prefix = view.scope.prefix
    if view.info.config.get("mirror"):
        return (
            f"the entries of the mirrored bucket are expected below {prefix}>: read other messages "
            f"of the stream with nats_stream"
        )
    return (
        f"give each source of the stream a subject transform to {prefix}> and remove other "
        f"subjects, or read the stream with nats_stream"
    )
