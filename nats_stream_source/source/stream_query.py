"""A ``nats_stream`` query: a stream's messages.

Which stream has a subject is asked of the server (ADR-15, "Stream lookup"), once: a query stays
with its stream.

A stream's configuration says which subjects it takes. A mirror, a stream with sources or a
transform keeps subjects of elsewhere; and any stream may have messages from before its subjects
were changed. So a filter that seems to match nothing is refused only if no message is there that it
matches, and one that seems to match everything is sent to the server all the same.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from nats_stream_source.errors import (
    ConfigurationError,
    NoMatchingStreamError,
    StreamNotFoundError,
    UnsupportedStreamError,
)
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.subjects import covers, overlap
from nats_stream_source.options import DeliverPolicy, StreamOptions
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.query import Content, Query, Words
from nats_stream_source.source.rows import stream_rows
from nats_stream_source.wire.frames import Frames

# Where a stream's messages may come from, but for its own subjects.
_ORIGINS = ("mirror", "sources", "subject_transform")


class StreamQuery(Query):
    """A query of a stream, by its options."""

    words = Words(
        sequence="sequence",
        place="options 'stream' and 'subject'",
        filters="filterSubjects",
        keeps="larger limits of the stream, as max_age or max_bytes, keep them",
    )

    def __init__(self, options: StreamOptions) -> None:
        self.options = options
        self.connection = options.connection
        self.beginning = options.beginning
        self.reading = options.reading
        self.filter = options.filter_subjects
        self.last_first = options.beginning.policy is DeliverPolicy.LAST_PER_SUBJECT
        self.every_message = not self.last_first
        self.headers_only = options.headers_only
        self.min_last_seq = options.min_last_sequence
        if options.stream is None:
            self.words = replace(self.words, filters="subject")

    async def stream(self, jetstream: JetStream) -> str:
        """The option ``stream``, or the one stream that has the option ``subject``.

        Raises:
            NoMatchingStreamError: none has it, or several have.
        """
        if self.options.stream is not None:
            return self.options.stream
        (subject,) = self.options.filter_subjects
        found = await jetstream.streams_with(subject)
        if len(found) != 1:
            which = f"several streams have it: {', '.join(sorted(found))}" if found else "none has"
            raise NoMatchingStreamError(
                f"the stream of subject {subject!r} is looked up, and {which}. The option 'stream' "
                f"names one, 'filterSubjects' what to read of it"
            )
        return found[0]

    async def look(self, jetstream: JetStream, stream: str) -> StreamInfo:
        """The stream.

        Raises:
            StreamNotFoundError: there is none.
        """
        try:
            return await jetstream.stream_info(stream)
        except StreamNotFoundError as error:
            raise StreamNotFoundError(
                f"stream {stream!r} does not exist on {jetstream.connection.settings.places}. "
                f"Check the options 'stream', 'servers' and 'domain'"
            ) from error

    async def check(self, jetstream: JetStream, info: StreamInfo) -> None:
        """Each filter subject is one that the stream takes, or has a message of."""
        taken = _taken(info)
        for one in self.filter if taken else ():
            if any(overlap(one, subject) for subject in taken):
                continue
            if await jetstream.message(info.name, last_by_subj=one) is None:
                raise ConfigurationError(
                    f"stream {info.name} has no subject that {one!r} matches, it takes "
                    f"{', '.join(taken)}. Check the option {self.words.filters!r}"
                )

    def content(self, info: StreamInfo) -> Content:
        """The messages of the filter subjects."""
        retention = info.config.get("retention", "limits")
        if retention != "limits":
            raise UnsupportedStreamError(
                f"stream {info.name} has the retention {retention!r}: its messages go away when "
                f"they are consumed, so a range cannot be read again. A mirror of it with "
                f"retention 'limits' can be read"
            )
        taken = _taken(info)
        return Content(
            filters=self.filter,
            whole=bool(taken) and all(any(covers(f, one) for f in self.filter) for one in taken),
            history=info.config.get("max_msgs_per_subject", -1),
        )

    def rows(self, frames: Frames, plan: Plan) -> pa.RecordBatch:
        """Rows of ``nats_stream``."""
        return stream_rows(
            frames,
            stream=plan.stream,
            stream_created=plan.created,
            headers_only=self.options.headers_only,
            include_headers=self.reading.include_headers,
        )


def _taken(info: StreamInfo) -> tuple[str, ...]:
    """The subjects that a stream takes; none where they do not tell what it keeps."""
    if any(info.config.get(origin) for origin in _ORIGINS):
        return ()
    return tuple(info.config.get("subjects") or ())
