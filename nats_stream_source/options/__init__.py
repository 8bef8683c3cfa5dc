"""The options of the formats: one table for each, and the values that are made of it.

Every option has one row: its name as Spark users write it, its type, its default, what it means.
Parsing, the error for an unknown name and the tables of the documentation come from it.
"""

from nats_stream_source.options.beginning import Beginning, DeliverPolicy
from nats_stream_source.options.connection import CONNECTION, connection_settings
from nats_stream_source.options.kv import KV, KvOptions, kv_options
from nats_stream_source.options.reading import READING, Reading
from nats_stream_source.options.stream import STREAM, StreamOptions, stream_options
from nats_stream_source.options.table import Mode, Option, markdown_table, parse

__all__ = [
    "CONNECTION",
    "KV",
    "READING",
    "STREAM",
    "Beginning",
    "DeliverPolicy",
    "KvOptions",
    "Mode",
    "Option",
    "Reading",
    "StreamOptions",
    "connection_settings",
    "kv_options",
    "markdown_table",
    "parse",
    "stream_options",
]
