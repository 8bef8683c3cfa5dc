"""The options of ``nats_kv``, and of ``lookup``, which reads entries by their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.kv.codec import KvCodec, OnUndecodable
from nats_stream_source.jetstream.subjects import validate_bucket
from nats_stream_source.options import converters
from nats_stream_source.options.advice import KV_ADVICE
from nats_stream_source.options.common import (
    COMMON,
    CommonOptions,
    require_options,
    validate_mode,
)
from nats_stream_source.options.connection import CONNECTION, connection_settings
from nats_stream_source.options.start_position import DeliverPolicy, StartPosition
from nats_stream_source.options.stream_set import StreamSet, validated_stream_set
from nats_stream_source.options.table import Mode, Option, Values, option_hints, option_names, parse

CODECS: tuple[Option, ...] = (
    Option(
        "keyCodec",
        converters.key_codec,
        "How keys are encoded (ADR-54): `base64`, `path`, or several in the order in which they "
        "encode, such as `path,base64`. Default: keys are stored as they are.",
        default=(),
        advice="write 'base64', 'path' or 'path,base64'",
    ),
    Option(
        "valueCodec",
        converters.value_codec,
        "How values are encoded (ADR-54): `base64`. Default: values are stored as they are.",
        default=(),
        advice="write 'base64'",
    ),
)

READ_CODECS: tuple[Option, ...] = (
    *CODECS,
    Option(
        "onUndecodable",
        converters.one_of(*OnUndecodable),
        "What happens to an entry that `keyCodec` or `valueCodec` cannot decode. {default}; "
        "`skip` leaves out the row and logs the number of such rows, `null` sets the key or value "
        "to null.",
        default=OnUndecodable.FAIL,
    ),
    Option(
        "includeRawKey",
        converters.boolean,
        "Whether rows have the column `raw_key`, the key as it is stored. {default}. Requires "
        "`keyCodec`.",
        default=False,
    ),
)

KV: tuple[Option, ...] = (
    Option(
        "bucket",
        converters.single_name,
        "Name of the key-value bucket. One of `bucket`, `buckets` and `bucketPattern` is required.",
        advice="write the name of one bucket, or set 'buckets' to read several",
    ),
    Option(
        "buckets", converters.string_list, "Names of the buckets that one query reads.", default=()
    ),
    Option(
        "bucketPattern",
        converters.pattern,
        "The query reads each bucket whose whole name it matches (syntax of Python's `re`), also "
        "those that are created while it runs.",
    ),
    Option(
        "keys",
        converters.string_list.named("list of key filters"),
        "Keys to read; `*` matches one token and `>` the rest. Default: all keys. The filters must "
        "not overlap.",
        default=(),
    ),
    Option(
        "includeHistory",
        converters.boolean,
        "Whether the query starts with all revisions that the bucket has, instead of the last of "
        "each key. {default}.",
        default=False,
    ),
    Option(
        "updatesOnly",
        converters.boolean,
        "Whether the query starts with the next write. {default}. Streaming only.",
        default=False,
    ),
    Option(
        "ignoreDeletes",
        converters.boolean,
        "Whether DEL and PURGE markers are left out. {default}.",
        default=False,
    ),
    Option(
        "metaOnly",
        converters.boolean,
        "Whether values are left out, so that `value` is null. {default}.",
        default=False,
    ),
    *READ_CODECS,
    Option(
        "startSequence",
        converters.start_sequence,
        "First revision to read. Default: the last revision of each key. With several buckets a "
        'JSON object with a revision, `"earliest"` or `"latest"` for each: `{"a": 17, "b": '
        '"earliest"}`.',
        advice="write 1 or higher for the first revision to read, or updatesOnly=true for "
        "later writes only",
    ),
    Option(
        "startTime",
        converters.start_time,
        "The query starts with the first revision at or after this time. RFC 3339 with a time "
        "zone. Excludes `startSequence`. With several buckets also a JSON object, as for "
        "`startSequence`.",
    ),
    Option(
        "minLastRevision",
        converters.integer,
        "Wait up to `requestTimeout` for this revision before the first read (ADR-53), for example "
        "for that of the program's own last write. Default: no wait.",
    ),
    Option(
        "asOfSequence",
        converters.integer,
        "Read the bucket as it was at this revision. Limited by the bucket's history.",
        only=Mode.BATCH,
    ),
    Option(
        "asOfTime",
        converters.timestamp,
        "Read the bucket as it was at this time. RFC 3339 with a time zone; limited by the "
        "bucket's history. Excludes `asOfSequence`.",
        only=Mode.BATCH,
    ),
    *COMMON,
)


@dataclass(frozen=True, slots=True)
class KvOptions:
    """The parsed and validated options of ``nats_kv``.

    Attributes:
        start_position: the start; ``last_per_subject`` stands for the last entry of each key.
        bucket: the name; None if the query reads several buckets, which are ``buckets``.
        keys: the filters of stored keys: those of the option, encoded by ``codec``.
        as_of_sequence, as_of_time: the state that a batch reads instead of the present one; the
            time in nanoseconds since 1970.
    """

    connection: ConnectionSettings
    bucket: str | None
    keys: tuple[str, ...]
    include_history: bool
    ignore_deletes: bool
    meta_only: bool
    start_position: StartPosition
    min_last_revision: int | None
    as_of_sequence: int | None
    as_of_time: int | None
    common: CommonOptions
    buckets: StreamSet | None
    codec: KvCodec
    include_raw_key: bool

    @property
    def added_columns(self) -> frozenset[str]:
        """The options that add a column and are set."""
        raw_key = frozenset({"includeRawKey"}) if self.include_raw_key else frozenset()
        return self.common.added_columns | raw_key


def codec_of(values: Values) -> KvCodec:
    """The codec of a read, from parsed values."""
    return KvCodec(values["keyCodec"], values["valueCodec"], values["onUndecodable"])


def kv_options(given: Mapping[str, str], mode: Mode | None = None) -> KvOptions:
    """Parse and validate the options of ``nats_kv``; ``mode`` is None if it is not known yet."""
    with option_hints(option_names(CONNECTION + KV)):
        require_options(given, "nats_kv", "bucket")
        return _validate(parse(given, CONNECTION + KV, KV_ADVICE), mode)


def _validate(values: Values, mode: Mode | None) -> KvOptions:
    buckets = validated_stream_set(
        values, "bucket", mode, "startSequence", "minLastRevision", "asOfSequence"
    )
    if values["bucket"] is None and buckets is None:
        raise OptionError(
            "option 'bucket' is missing: the name of the key-value bucket; or 'buckets' or "
            "'bucketPattern' for several"
        )
    for name in () if buckets is None else buckets.names:
        validate_bucket(name)
    validate_mode(values, KV, mode)
    values.validate_exclusive("asOfSequence", "asOfTime", reason="they name two states")
    for start in ("updatesOnly", "startSequence", "startTime", "includeHistory"):
        for state in ("asOfSequence", "asOfTime"):
            values.validate_exclusive(
                start, state, reason="a state of the bucket does not have a start position"
            )
    two_starts = "they name two start positions"
    for start in ("startSequence", "startTime", "includeHistory"):
        values.validate_exclusive("updatesOnly", start, reason=two_starts)
    if mode is Mode.BATCH and values["updatesOnly"]:
        raise OptionError(
            "option 'updatesOnly' is for spark.readStream: spark.read ends with the present last "
            "sequence, so it would return nothing"
        )
    values.validate_effect("onUndecodable", "keyCodec", "valueCodec")
    values.validate_effect("includeRawKey", "keyCodec")
    codec = codec_of(values)
    return values.build(
        KvOptions,
        connection=connection_settings(values),
        bucket=None if buckets else validate_bucket(values["bucket"]),
        keys=() if values["keys"] == (">",) else tuple(sorted(codec.raw_filters(values["keys"]))),
        start_position=_start_position(values),
        common=CommonOptions.of(values),
        buckets=buckets,
        codec=codec,
    )


def _start_position(values: Values) -> StartPosition:
    explicit: StartPosition | None = values["startSequence"] or values["startTime"]
    if explicit is not None:
        return explicit.with_time_strategy(values["startTimeStrategy"])
    if values["updatesOnly"]:
        return StartPosition(DeliverPolicy.NEW)
    history = values["includeHistory"]
    return StartPosition(DeliverPolicy.ALL if history else DeliverPolicy.LAST_PER_SUBJECT)


# -- lookup ----------------------------------------------------------------------------------------

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
    """Parse and validate the options of ``lookup``."""
    with option_hints(option_names(CONNECTION + LOOKUP)):
        values = parse(given, CONNECTION + LOOKUP)
        values.validate_effect("onUndecodable", "valueCodec")
        return values.build(
            LookupOptions,
            connection=connection_settings(values),
            bucket=validate_bucket(bucket),
            codec=codec_of(values),
        )
