"""The query of options of either format, for tests that run with both."""

from __future__ import annotations

from nats_stream_source.options import KvOptions, StreamOptions
from nats_stream_source.rows.base import FormatAdapter
from nats_stream_source.rows.kv import KvFormat
from nats_stream_source.rows.stream import StreamFormat


def format_adapter(options: KvOptions | StreamOptions) -> FormatAdapter:
    """The adapter for the query that ``options`` describe."""
    return KvFormat(options) if isinstance(options, KvOptions) else StreamFormat(options)
