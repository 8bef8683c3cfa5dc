"""One stream of a query at one point in time: the value that every method of a planning takes."""

from __future__ import annotations

from dataclasses import dataclass

from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.rows.base import ReadScope


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stream of a query as its leader reported it: what each method of a planning takes."""

    jetstream: JetStream
    info: StreamInfo
    scope: ReadScope

    async def verify_missing(self, through: int) -> None:
        """Verify that messages up to ``through`` that were not found do not exist.

        Raises:
            RequestTimeoutError: the stream leader changed, or reports a lower last sequence.
        """
        if self.info.replicated:
            now = await self.jetstream.stream_info(self.info.name)
            self.info.verify_same_leader(now, through)
