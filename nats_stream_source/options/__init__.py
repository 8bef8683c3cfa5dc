"""The options of the formats: one table for each format, and the parsed values.

Each option has one row: its name in Spark, its type, its default and its description. The parser,
the errors, the flags of the command line and the documentation use the same rows.

The functions that parse raise OptionError for an option that is unknown, missing, of the wrong type
or contradicts another, InvalidNameError for a name that a server would refuse, and
ConfigurationError for filters that overlap and for invalid properties of a bucket to create.
"""

from nats_stream_source.options.common import COMMON, CommonOptions, StreamSet
from nats_stream_source.options.connection import CONNECTION, connection_settings
from nats_stream_source.options.converters import DeliverPolicy, StartPosition
from nats_stream_source.options.reading import (
    KV,
    STREAM,
    KvOptions,
    StreamOptions,
    kv_options,
    stream_options,
)
from nats_stream_source.options.table import Mode, Option, parse

__all__ = [
    "COMMON",
    "CONNECTION",
    "KV",
    "STREAM",
    "CommonOptions",
    "DeliverPolicy",
    "KvOptions",
    "Mode",
    "Option",
    "StartPosition",
    "StreamOptions",
    "StreamSet",
    "connection_settings",
    "kv_options",
    "parse",
    "stream_options",
]
