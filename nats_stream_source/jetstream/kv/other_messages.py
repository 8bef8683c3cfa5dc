"""Messages in a bucket's stream that are not entries of the bucket.

A source without a subject transform stores messages under the subjects of its origin; a stream can
have further subjects, or have had them; a mirror copies all of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.direct_get.count import count_messages
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import covers


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
