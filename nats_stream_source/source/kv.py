"""``format("nats_kv")``: the changes of a NATS key-value bucket, to Spark."""

from __future__ import annotations

from nats_stream_source.options import KvOptions, Mode, kv_options
from nats_stream_source.source.format import NatsFormat
from nats_stream_source.source.schema import kv_ddl


class NatsKvDataSource(NatsFormat):
    """The changes of a NATS key-value bucket, as rows."""

    @classmethod
    def name(cls) -> str:
        """The name for ``format()``."""
        return "nats_kv"

    def parsed(self, mode: Mode | None = None) -> KvOptions:
        """The options, checked for ``mode``."""
        return kv_options(self.options, mode)

    def schema(self) -> str:
        """The columns, as DDL."""
        return kv_ddl(include_headers=self.parsed().reading.include_headers)
