"""The options of ``nats_stream``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.subjects import validate_stream, validate_subject_filters
from nats_stream_source.options import converters
from nats_stream_source.options.advice import STREAM_ADVICE
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
        "The query starts with the first message at or after this time. RFC 3339 with a time zone. "
        "Excludes `startSequence`. With several streams also a JSON object, as for "
        "`startSequence`.",
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
        "adjoin. RFC 3339 with a time zone. Excludes `endSequence`.",
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
        "Wait up to `requestTimeout` for this sequence before the first read (ADR-53), for example "
        "for that of the program's own last publish. Default: no wait.",
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

    @property
    def added_columns(self) -> frozenset[str]:
        """The options that add a column and are set."""
        return self.common.added_columns


def stream_options(given: Mapping[str, str], mode: Mode | None = None) -> StreamOptions:
    """Parse and validate the options of ``nats_stream``; ``mode`` is None if not known yet."""
    with option_hints(option_names(CONNECTION + STREAM)):
        require_options(given, "nats_stream", "stream")
        return _validate(parse(given, CONNECTION + STREAM, STREAM_ADVICE), mode)


def _validate(values: Values, mode: Mode | None) -> StreamOptions:
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
        start_position=_start_position(values, mode),
        common=CommonOptions.of(values),
        streams=streams,
    )


def _start_position(values: Values, mode: Mode | None) -> StartPosition:
    policy: DeliverPolicy | None = values["deliverPolicy"]
    explicit: StartPosition | None = values["startSequence"] or values["startTime"]
    required = {
        DeliverPolicy.BY_START_SEQUENCE: "startSequence",
        DeliverPolicy.BY_START_TIME: "startTime",
    }
    if explicit is None:
        if policy in required:
            raise OptionError(
                f"option {required[policy]!r} is missing: deliverPolicy={policy.value} requires it"
            )
        if policy is DeliverPolicy.NEW and mode is Mode.BATCH:
            raise OptionError(
                "deliverPolicy=new is for spark.readStream: spark.read ends with the present last "
                "sequence, so it would return nothing"
            )
        ends = [name for name in ("endSequence", "endTime") if values[name] is not None]
        if ends and policy in (DeliverPolicy.LAST, DeliverPolicy.LAST_PER_SUBJECT):
            raise OptionError(
                f"option {ends[0]!r} and deliverPolicy={policy.value} contradict each other: the "
                f"server determines last messages for the present state only"
            )
        return StartPosition(policy or DeliverPolicy.ALL)
    if policy not in (None, explicit.policy):
        raise OptionError(
            f"options 'deliverPolicy' and {required[explicit.policy]!r} contradict each other: "
            f"{policy.value} has another start position"
        )
    first, last = explicit.sequence, values["endSequence"]
    if first is not None and last is not None and last < first:
        raise OptionError(f"option 'endSequence': {last} lies before startSequence={first}")
    until = values["endTime"]
    for start in (explicit, *(explicit.by_name or {}).values()):
        if start.time is not None and until is not None and until <= start.time:
            raise OptionError("option 'endTime' does not lie after 'startTime'")
    return explicit.with_time_strategy(values["startTimeStrategy"])
