"""Creates the format adapter for parsed options: ``nats_kv`` or ``nats_stream``."""

from __future__ import annotations

from nats_stream_source.options import KvOptions, StreamOptions
from nats_stream_source.spark.formats.base import FormatAdapter


def format_adapter(options: KvOptions | StreamOptions) -> FormatAdapter:
    """The adapter for the query that ``options`` describe."""
    # Deferred imports: each process that Spark starts to find the formats would load nats-py.
    if isinstance(options, KvOptions):
        from nats_stream_source.spark.formats.kv import KvFormat

        return KvFormat(options)
    from nats_stream_source.spark.formats.stream import StreamFormat

    return StreamFormat(options)
