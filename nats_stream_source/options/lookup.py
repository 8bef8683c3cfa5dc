"""The options of ``lookup``: those of the connection, and of a read of entries by their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.jetstream.kv.codec import KvCodec, OnUndecodable
from nats_stream_source.jetstream.subjects import validate_bucket
from nats_stream_source.options import converters
from nats_stream_source.options.common import COMMON
from nats_stream_source.options.connection import CONNECTION, connection_settings
from nats_stream_source.options.hints import option_hints, option_names
from nats_stream_source.options.kv import CODECS, KV, codec_of
from nats_stream_source.options.table import Option, parse

ENTRY_COLUMNS = ("value", "revision", "created")
"""The columns of ``nats_kv`` that ``lookup`` can add."""

LOOKUP: tuple[Option, ...] = (
    *CODECS,
    Option(
        "onUndecodable",
        converters.one_of(OnUndecodable.FAIL, OnUndecodable.NULL),
        "What happens to a value that `valueCodec` cannot decode. {default}; `null` sets it to "
        "null.",
        default=OnUndecodable.FAIL,
    ),
    *(option for option in KV if option.name == "minLastRevision"),
    *(option for option in COMMON if option.name == "outageTimeout"),
)


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """The parsed options of ``lookup``.

    Attributes:
        min_last_revision: the bucket has this revision before entries are read (ADR-53).
        outage_timeout: seconds to wait for unavailable servers.
    """

    connection: ConnectionSettings
    bucket: str
    codec: KvCodec
    min_last_revision: int | None
    outage_timeout: float


def lookup_options(bucket: str, given: Mapping[str, str]) -> LookupOptions:
    """Parse and validate the options of ``lookup``.

    Raises:
        OptionError: an option is unknown, missing, of the wrong type, or without an effect.
        InvalidNameError: ADR-8 does not allow the name of the bucket.
    """
    with option_hints(option_names(CONNECTION + LOOKUP)):
        values = parse(given, CONNECTION + LOOKUP)
        values.validate_effect("onUndecodable", "valueCodec")
        return values.build(
            LookupOptions,
            connection=connection_settings(values),
            bucket=validate_bucket(bucket),
            codec=codec_of(values),
        )
