"""The options that both formats have, and the checks that both formats use.

They set the size of micro-batches and partitions, the reaction to data loss, and what is read.

An option may apply to one mode only: the limits of a micro-batch do not apply to ``spark.read``, an
end does not apply to ``spark.readStream``. In the other mode the option is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nats_stream_source.errors import OptionError
from nats_stream_source.options import converters
from nats_stream_source.options.advice import create_view
from nats_stream_source.options.converters import START_WORDS, DeliverPolicy, StartPosition
from nats_stream_source.options.table import Mode, Option, Values

COMMON: tuple[Option, ...] = (
    Option(
        "maxRowsPerTrigger",
        converters.integer,
        "Maximum number of rows in one micro-batch. Default: no limit.",
        only=Mode.STREAMING,
    ),
    Option(
        "maxBytesPerTrigger",
        converters.byte_size,
        "Approximate maximum size of one micro-batch, by the stream's mean message size. Default: "
        "no limit. A number, or a number with the suffix `k`, `m` or `g` (powers of 1024). With "
        "`maxRowsPerTrigger`, both limits apply.",
        only=Mode.STREAMING,
    ),
    Option(
        "minRowsPerTrigger",
        converters.integer,
        "Minimum number of rows in one micro-batch, or `maxTriggerDelay` passes. The first "
        "micro-batch of a run, `availableNow` and `once` do not wait. Default: 1.",
        only=Mode.STREAMING,
    ),
    Option(
        "maxTriggerDelay",
        converters.long_duration,
        "Maximum time in seconds from one micro-batch to the next one, while fewer than "
        "`minRowsPerTrigger` rows are available. {default}.",
        default=900.0,  # as Spark's Kafka source
        only=Mode.STREAMING,
    ),
    Option(
        "outageTimeout",
        converters.seconds(0, 86_400),
        "Maximum time that a running query waits for unavailable servers, or a stream without "
        "a leader, and for progress of a mirror that lacks what the query has read. At the start "
        "of a query `connectTimeout` applies to servers. {default}; 0 fails after "
        "`connectTimeout`.",
        default=300.0,
        only=Mode.STREAMING,
    ),
    Option(
        "minPartitions",
        converters.integer_to(10_000),
        "Minimum number of partitions per batch. Default: one per 500,000 rows or 128 MiB, at most "
        "the driver's cores. At most 10,000; a range is not split further than its sequences.",
    ),
    Option(
        "discoveryInterval",
        converters.long_duration,
        "Maximum time in seconds until a query with a pattern finds a new match. {default}.",
        default=30.0,
        only=Mode.STREAMING,
    ),
    Option(
        "startTimeStrategy",
        converters.one_of("error", "latest"),
        "What happens if all messages of a stream are older than `startTime`: `error` refuses to "
        "start, `latest` starts with the next message, also if the time is in the future. Default: "
        "the query starts with the next message, and a time in the future is an error.",
    ),
    Option(
        "failOnDataLoss",
        converters.boolean,
        "Whether the query fails when messages were removed before it read them. {default}; with "
        "`false` it logs a warning and continues.",
        default=True,
    ),
    Option(
        "includeHeaders",
        converters.boolean,
        "Whether rows have the column `headers`. {default}.",
        default=False,
    ),
    Option(
        "includeOrigin",
        converters.boolean,
        "Whether rows have the columns `origin_stream` and `origin_sequence`, which name the "
        "message that a stream with sources copied. {default}.",
        default=False,
    ),
)


# The end of an error for a start with the next message.
STREAMING_ONLY = (
    "is for spark.readStream: spark.read ends with the present last sequence, so it would return "
    "nothing"
)


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The parsed options of :data:`COMMON`."""

    max_rows_per_trigger: int | None
    max_bytes_per_trigger: int | None
    min_rows_per_trigger: int | None
    max_trigger_delay: float
    outage_timeout: float
    min_partitions: int | None
    fail_on_data_loss: bool

    @classmethod
    def of(cls, values: Values) -> CommonOptions:
        """From parsed values; raises OptionError if two options contradict each other."""
        options = values.build(cls)
        most, least = options.max_rows_per_trigger, options.min_rows_per_trigger
        if most is not None and (options.min_partitions or 0) > most:
            raise OptionError(
                f"options 'minPartitions' and 'maxRowsPerTrigger' contradict each other: "
                f"{most} rows do not make {options.min_partitions} partitions"
            )
        if most is not None and least is not None and least > most:
            raise OptionError(
                f"options 'minRowsPerTrigger' and 'maxRowsPerTrigger' contradict each other: "
                f"{least} is more than {most}"
            )
        values.validate_effect("maxTriggerDelay", "minRowsPerTrigger")
        return options


def added_columns(values: Values) -> frozenset[str]:
    """The options that add a column and are set."""
    return frozenset(filter(values.get, ("includeHeaders", "includeOrigin", "includeRawKey")))


def require_options(given: Mapping[str, object], format_name: str, stream_option: str) -> None:
    """Raise OptionError without a single option, as for a table that CREATE TABLE made."""
    if not given:
        raise OptionError(
            f"could not read format {format_name!r}: no option is set, expected 'servers' and "
            f"{stream_option!r}; set them with .option(...), and instead of a table of CREATE "
            f"TABLE, whose options Spark does not pass to a Python source, use "
            f"{create_view(format_name, stream_option)}"
        )


def validate_mode(values: Values, table: Sequence[Option], mode: Mode | None) -> None:
    """Raise OptionError for an option that does not apply to ``mode``, unless that is unknown."""
    for option in table:
        only = option.only
        if mode and only and mode is not only and values.is_set(option.name):
            raise OptionError(f"option {option.name!r} is for {only.value}, this is {mode.value}")


@dataclass(frozen=True, slots=True)
class StreamSet:
    """A list of names, or a pattern.

    Attributes:
        option: the option that was set, for errors and the log.
        names: the names, sorted; empty with a pattern.
        pattern: a regular expression that matches a whole name; None with names.
        discovery_interval: seconds between two searches for new names that the pattern matches.
    """

    option: str
    names: tuple[str, ...] = ()
    pattern: str | None = None
    discovery_interval: float = math.inf

    def __str__(self) -> str:
        return f"{self.option}={self.pattern or ','.join(self.names)}"

    def selects(self, name: str) -> bool:
        """Whether the query reads ``name``."""
        if self.pattern is None:
            return name in self.names
        return re.fullmatch(self.pattern, name) is not None


def validated_stream_set(
    values: Values, one: str, mode: Mode | None, *sequences: str
) -> StreamSet | None:
    """The set of names that the options describe; None if they name one bucket or stream.

    Args:
        one: the option that names one, ``bucket`` or ``stream``; the others are its plural, and
            its name followed by ``Pattern``.
        sequences: the options that are a sequence of one stream.

    Raises:
        OptionError: the options do not fit each other, or the streams of the query.
    """
    several = _stream_set(values, one)
    given = [
        name for name in sequences if values[name] is not None and _by_name(values[name]) is None
    ]
    if several is not None and given:
        each = """write one for each, such as {"<name>": 17, "<name>": "earliest"}, """
        raise OptionError(
            f"options {given[0]!r} and {several.option!r} contradict each other: a "
            f"sequence belongs to one stream, and the query reads several; "
            f"{each if given[0] == 'startSequence' else ''}set a time, or start one query for "
            f"each stream"
        )
    for option in ("startSequence", "startTime"):
        if (starts := _by_name(values[option])) is not None:
            if several is None:
                raise OptionError(
                    f"option {option!r} is a JSON object, and the query reads one {one}; write the "
                    f"start itself, or set '{one}s'"
                )
            _validate_starts(option, starts, several, mode)
    values.validate_effect("startTimeStrategy", "startTime")
    values.validate_exclusive("startSequence", "startTime", reason="they name two start positions")
    return several


def _stream_set(values: Values, one: str) -> StreamSet | None:
    several, pattern = f"{one}s", f"{one}Pattern"
    values.validate_exclusive(
        one, several, pattern, reason=f"they name the {one}s of the query in two ways"
    )
    values.validate_effect("discoveryInterval", pattern)
    if values[pattern] is not None:
        interval = values["discoveryInterval"]
        return StreamSet(pattern, pattern=values[pattern], discovery_interval=interval)
    names: tuple[str, ...] = values[several]
    if not names:
        return None
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise OptionError(f"invalid value for option {several!r}: {repeated!r} is named twice")
    return StreamSet(several, tuple(sorted(names)))


def _by_name(start: object) -> Mapping[str, StartPosition] | None:
    return start.by_name if isinstance(start, StartPosition) else None


def _validate_starts(
    option: str, starts: Mapping[str, StartPosition], several: StreamSet, mode: Mode | None
) -> None:
    invalid = f"invalid value for option {option!r}"
    unknown = [name for name in starts if not several.selects(name)]
    if unknown:
        raise OptionError(
            f"{invalid}: it names {unknown[0]!r}, which {several} does not select; remove it"
        )
    missing = [name for name in several.names if name not in starts]
    if missing:
        words = " or ".join(map(repr, START_WORDS))
        raise OptionError(
            f"{invalid}: {missing[0]!r} of {several} is missing; add its start, which may be "
            f"{words}"
        )
    new = [name for name, start in starts.items() if start.policy is DeliverPolicy.NEW]
    if new and mode is Mode.BATCH:
        raise OptionError(f"{invalid}: it has 'latest' for {new[0]!r}, which {STREAMING_ONLY}")
