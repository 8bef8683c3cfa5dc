"""The options of ``spark.read`` and ``spark.readStream`` for both formats, and of ``lookup``.

The checks that both formats have are in ``common``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.kv.codec import KvCodec, OnUndecodable
from nats_stream_source.jetstream.subjects import (
    validate_bucket,
    validate_stream,
    validate_subject_filters,
)
from nats_stream_source.options import converters
from nats_stream_source.options.advice import KV_ADVICE, STREAM_ADVICE
from nats_stream_source.options.common import (
    COMMON,
    STREAMING_ONLY,
    CommonOptions,
    StreamSet,
    added_columns,
    require_options,
    validate_mode,
    validated_stream_set,
)
from nats_stream_source.options.connection import CONNECTION, connection_settings
from nats_stream_source.options.converters import START_OPTIONS, DeliverPolicy, StartPosition
from nats_stream_source.options.table import Mode, Option, Values, option_hints, parse

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
        "The query starts with the first revision at or after this time. Excludes `startSequence`. "
        "With several buckets also a JSON object, as for `startSequence`.",
    ),
    Option(
        "minLastRevision",
        converters.integer,
        "Wait up to `requestTimeout` for this revision before the first read (ADR-53), as for that "
        "of the program's own last write. Default: no wait.",
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
        "Read the bucket as it was at this time. Limited by the bucket's history. Excludes "
        "`asOfSequence`.",
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
        added_columns: the options that add a column and are set.
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
    added_columns: frozenset[str]


def codec_of(values: Values) -> KvCodec:
    """The codec of a read, from parsed values."""
    return KvCodec(values["keyCodec"], values["valueCodec"], values["onUndecodable"])


def kv_options(given: Mapping[str, object], mode: Mode | None = None) -> KvOptions:
    """Parse and validate the options of ``nats_kv``; ``mode`` is None if it is not known yet."""
    with option_hints(CONNECTION + KV):
        require_options(given, "nats_kv", "bucket")
        return _validate_kv(parse(given, CONNECTION + KV, KV_ADVICE), mode)


def _validate_kv(values: Values, mode: Mode | None) -> KvOptions:
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
        raise OptionError(f"option 'updatesOnly' {STREAMING_ONLY}")
    values.validate_effect("onUndecodable", "keyCodec", "valueCodec")
    values.validate_effect("includeRawKey", "keyCodec")
    codec = codec_of(values)
    return values.build(
        KvOptions,
        connection=connection_settings(values),
        bucket=None if buckets else validate_bucket(values["bucket"]),
        keys=() if values["keys"] == (">",) else tuple(sorted(codec.raw_filters(values["keys"]))),
        start_position=_kv_start_position(values),
        common=CommonOptions.of(values),
        buckets=buckets,
        codec=codec,
        added_columns=added_columns(values),
    )


def _kv_start_position(values: Values) -> StartPosition:
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


def lookup_options(bucket: str, given: Mapping[str, object]) -> LookupOptions:
    """Parse and validate the options of ``lookup``."""
    with option_hints(CONNECTION + LOOKUP):
        values = parse(given, CONNECTION + LOOKUP)
        values.validate_effect("onUndecodable", "valueCodec")
        return values.build(
            LookupOptions,
            connection=connection_settings(values),
            bucket=validate_bucket(bucket),
            codec=codec_of(values),
        )


# -- nats_stream -----------------------------------------------------------------------------------

STREAM: tuple[Option, ...] = (
    Option(
        "stream",
        converters.single_name,
        "Name of the stream. One of `stream`, `streams`, `streamPattern` and `subject` is "
        "required.",
        advice="write the name of one stream, or set 'streams' to read several",
    ),
    Option(
        "streams", converters.string_list, "Names of the streams that one query reads.", default=()
    ),
    Option(
        "streamPattern",
        converters.pattern,
        "The query reads each stream whose whole name it matches (syntax of Python's `re`), also "
        "those that are created while it runs.",
    ),
    Option(
        "subject",
        converters.name.named("subject filter"),
        "Subject to read; `*` matches one token and `>` the rest. The source looks up the stream "
        "that has the subject.",
    ),
    Option(
        "filterSubjects",
        converters.string_list.named("list of subject filters"),
        "Subjects of the streams to read. Default: all subjects. The filters must not overlap.",
        default=(),
    ),
    Option(
        "deliverPolicy",
        converters.one_of(*DeliverPolicy).named("deliver policy"),
        "Start position: `all`, `new`, `last`, `last_per_subject`, `by_start_sequence` or "
        "`by_start_time`. Default: `all`, or the policy of `startSequence` or `startTime`.",
    ),
    Option(
        "startSequence",
        converters.start_sequence,
        "First sequence to read. The query waits for a sequence that the stream has not reached. "
        'With several streams a JSON object with a sequence, `"earliest"` or `"latest"` for each: '
        '`{"A": 17, "B": "earliest"}`.',
        advice="write 1 or higher for the first sequence to read, or deliverPolicy=new for "
        "later messages only",
    ),
    Option(
        "startTime",
        converters.start_time,
        "The query starts with the first message at or after this time. Excludes `startSequence`. "
        "With several streams also a JSON object, as for `startSequence`.",
    ),
    Option(
        "endSequence",
        converters.integer,
        "Last sequence to read. Default: the last sequence of the stream.",
        only=Mode.BATCH,
    ),
    Option(
        "endTime",
        converters.timestamp,
        "The query ends before the first message at or after this time, so that ranges of time "
        "adjoin. Excludes `endSequence`.",
        only=Mode.BATCH,
    ),
    Option(
        "headersOnly",
        converters.boolean,
        "Whether payloads are left out, so that `data` is null. {default}.",
        default=False,
    ),
    Option(
        "minLastSequence",
        converters.integer,
        "Wait up to `requestTimeout` for this sequence before the first read (ADR-53), as for that "
        "of the program's own last publish. Default: no wait.",
    ),
    *COMMON,
)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The parsed and validated options of ``nats_stream``.

    Attributes:
        stream: the name; None if the stream is looked up by ``filter_subjects``, which then has
            one element, or if the query reads several streams, which are ``streams``.
        end_time: nanoseconds since 1970.
        added_columns: the options that add a column and are set.
    """

    connection: ConnectionSettings
    stream: str | None
    filter_subjects: tuple[str, ...]
    start_position: StartPosition
    end_sequence: int | None
    end_time: int | None
    headers_only: bool
    min_last_sequence: int | None
    common: CommonOptions
    streams: StreamSet | None
    added_columns: frozenset[str]


def stream_options(given: Mapping[str, object], mode: Mode | None = None) -> StreamOptions:
    """Parse and validate the options of ``nats_stream``; ``mode`` is None if not known yet."""
    with option_hints(CONNECTION + STREAM):
        require_options(given, "nats_stream", "stream")
        return _validate_stream(parse(given, CONNECTION + STREAM, STREAM_ADVICE), mode)


def _validate_stream(values: Values, mode: Mode | None) -> StreamOptions:
    streams = validated_stream_set(
        values, "stream", mode, "startSequence", "minLastSequence", "endSequence"
    )
    if values["stream"] is None and values["subject"] is None and streams is None:
        raise OptionError(
            "option 'stream' is missing: the name of the JetStream stream, or 'subject': a subject "
            "of the stream; or 'streams' or 'streamPattern' for several"
        )
    for name in () if streams is None else streams.names:
        validate_stream(name)
    validate_mode(values, STREAM, mode)
    for name in ("stream", "streams", "streamPattern"):
        values.validate_exclusive(
            name, "subject", reason="the stream is named, or looked up by its subject"
        )
    values.validate_exclusive("subject", "filterSubjects", reason="'subject' is the filter itself")
    values.validate_exclusive("endSequence", "endTime", reason="they name two ends")
    subjects = (values["subject"],) if values["subject"] else values["filterSubjects"]
    filters = tuple(sorted(validate_subject_filters(subjects)))
    return values.build(
        StreamOptions,
        connection=connection_settings(values),
        stream=None if values["stream"] is None else validate_stream(values["stream"]),
        filter_subjects=() if not values["subject"] and filters == (">",) else filters,
        start_position=_stream_start_position(values, mode),
        common=CommonOptions.of(values),
        streams=streams,
        added_columns=added_columns(values),
    )


def _stream_start_position(values: Values, mode: Mode | None) -> StartPosition:
    policy: DeliverPolicy | None = values["deliverPolicy"]
    explicit: StartPosition | None = values["startSequence"] or values["startTime"]
    if explicit is None:
        if policy in START_OPTIONS:
            missing = START_OPTIONS[policy]
            raise OptionError(
                f"option {missing!r} is missing: deliverPolicy={policy.value} requires it"
            )
        if policy is DeliverPolicy.NEW and mode is Mode.BATCH:
            raise OptionError(f"deliverPolicy=new {STREAMING_ONLY}")
        ends = [name for name in ("endSequence", "endTime") if values[name] is not None]
        if ends and policy in (DeliverPolicy.LAST, DeliverPolicy.LAST_PER_SUBJECT):
            raise OptionError(
                f"option {ends[0]!r} and deliverPolicy={policy.value} contradict each other: the "
                f"server determines last messages for the present state only"
            )
        return StartPosition(policy or DeliverPolicy.ALL)
    if policy not in (None, explicit.policy):
        raise OptionError(
            f"options 'deliverPolicy' and {START_OPTIONS[explicit.policy]!r} contradict each "
            f"other: {policy.value} has another start position"
        )
    first, last = explicit.sequence, values["endSequence"]
    if first is not None and last is not None and last < first:
        raise OptionError(f"option 'endSequence': {last} lies before startSequence={first}")
    until = values["endTime"]
    for start in (explicit, *(explicit.by_name or {}).values()):
        if start.time is not None and until is not None and until <= start.time:
            raise OptionError("option 'endTime' does not lie after 'startTime'")
    return explicit.with_time_strategy(values["startTimeStrategy"])
