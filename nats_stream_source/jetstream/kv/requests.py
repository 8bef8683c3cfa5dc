"""Requests to the leader of a bucket's stream: its last messages, its subjects, other messages.

A stream may have messages that are not entries of its bucket. A source without a subject transform
stores messages under the subjects of its origin; a stream can have further subjects, or have had
them; a mirror copies all of these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nats_stream_source.errors import (
    PermissionDeniedError,
    RequestTimeoutError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.direct_get.request import count_messages
from nats_stream_source.jetstream.kv.bucket import ALL_KEYS, Bucket
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import bucket_of, covers, key_subject

_MAX_VALUE_BYTES = 8 << 20  # of the last values of filters


async def last_matching_seq(
    jetstream: JetStream, info: StreamInfo, bucket: Bucket, keys: tuple[str, ...]
) -> int:
    """The sequence of the leader's last message that matches; 0 if no message matches.

    For all keys it is the stream's last sequence, even if the message there was removed; and also
    where the responses, which have the values, would be large. A heartbeat then shows the end.
    """
    if info.first_seq > info.last_seq:
        return 0
    if keys == ALL_KEYS or len(keys) * info.mean_size > _MAX_VALUE_BYTES:
        return info.last_seq
    return await jetstream.last_seq(info.name, bucket.filter_subjects(keys))


async def count_entries(jetstream: JetStream, info: StreamInfo, prefix: str) -> tuple[int, int]:
    """The messages whose subjects start with ``prefix``, and the other messages; two requests."""
    entries = await count_messages(jetstream, info.name, 1, (f"{prefix}>",))
    # Messages that were removed meanwhile are not in both numbers.
    now = await jetstream.stream_info(info.name)
    return entries.messages, max(0, min(info.messages, now.messages) - entries.messages)


def accepts_other_subjects(config: Mapping[str, Any], prefix: str) -> bool:
    """Whether a stream's own subjects, or a source without a transform, lie outside of ``prefix``.

    The configuration of a mirror does not show it.
    """
    subjects = list(config.get("subjects") or ())
    for source in config.get("sources") or ():
        transforms = source.get("subject_transforms") or [{"dest": ">"}]
        subjects += [transform.get("dest") or ">" for transform in transforms]
    return not all(covers(f"{prefix}>", subject) for subject in subjects)


async def with_origin(jetstream: JetStream, info: StreamInfo) -> StreamInfo:
    """``info`` of a bucket's stream with ``origin``, if the stream mirrors a mirror.

    Its messages have the subjects of the first bucket of the chain. The streams of the chain are
    requested only if a mirror has messages, and none with the subjects of the bucket that it
    mirrors: the others may be away, which is what a mirror is for.
    """
    mirror = info.config.get("mirror")
    if not mirror or mirror.get("external") or not info.messages:
        return info
    expected = key_subject(bucket_of(mirror["name"]), ">")
    chain = [info.name]
    with contextlib.suppress(StreamNotFoundError, PermissionDeniedError, RequestTimeoutError):
        if await jetstream.message(info.name, seq=1, next_by_subj=expected) is not None:
            return info
        while mirror and not mirror.get("external") and mirror["name"] not in chain:
            chain.append(mirror["name"])
            mirror = (await jetstream.stream_info(chain[-1])).config.get("mirror")
    return replace(info, origin=bucket_of(chain[-1])) if len(chain) > 2 else info
