"""``format("nats_stream")``: the messages of a NATS JetStream stream, to Spark."""

from __future__ import annotations

from nats_stream_source.options import Mode, StreamOptions, stream_options
from nats_stream_source.source.format import NatsFormat
from nats_stream_source.source.schema import stream_ddl


class NatsStreamDataSource(NatsFormat):
    """The messages of a NATS JetStream stream, as rows."""

    @classmethod
    def name(cls) -> str:
        """The name for ``format()``."""
        return "nats_stream"

    def parsed(self, mode: Mode | None = None) -> StreamOptions:
        """The options, checked for ``mode``."""
        return stream_options(self.options, mode)

    def schema(self) -> str:
        """The columns, as DDL."""
        return stream_ddl(include_headers=self.parsed().reading.include_headers)
