"""The options that both formats have, and the checks that both formats use.

They set the size of micro-batches and partitions, the reaction to data loss, and what is read.

An option may apply to one mode only: the limits of a micro-batch do not apply to ``spark.read``, an
end does not apply to ``spark.readStream``. In the other mode the option is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import OptionError
from nats_stream_source.options import converters
from nats_stream_source.options.advice import create_view
from nats_stream_source.options.table import Mode, Option

MAX_TRIGGER_DELAY = 900.0  # seconds; the default of Spark's Kafka source
OUTAGE_TIMEOUT = 300.0  # seconds
DISCOVERY_INTERVAL = 30.0  # seconds

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
        f"`minRowsPerTrigger` rows are available. Default: {MAX_TRIGGER_DELAY:g}.",
        only=Mode.STREAMING,
    ),
    Option(
        "outageTimeout",
        converters.outage,
        "Maximum time that a running query waits for unavailable servers, or a stream without "
        "a leader, and for progress of a mirror that lacks what the query has read. At the start "
        "of a query `connectTimeout` applies to servers. Default: "
        f"{OUTAGE_TIMEOUT:g}; 0 fails after `connectTimeout`.",
        only=Mode.STREAMING,
    ),
    Option(
        "minPartitions",
        converters.partition_count,
        "Minimum number of partitions per batch. Default: one per 500,000 rows or 128 MiB, at most "
        "the driver's cores. At most 10,000; a range is not split further than its sequences.",
    ),
    Option(
        "discoveryInterval",
        converters.long_duration,
        "Maximum time in seconds until a query with a pattern finds a new match. Default: "
        f"{DISCOVERY_INTERVAL:g}.",
        only=Mode.STREAMING,
    ),
    Option(
        "startTimeStrategy",
        converters.start_time_strategy,
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


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The parsed options of :data:`COMMON`."""

    max_rows: int | None = None
    max_bytes: int | None = None
    min_rows: int | None = None
    max_trigger_delay: float = MAX_TRIGGER_DELAY
    outage_timeout: float = OUTAGE_TIMEOUT
    min_partitions: int | None = None
    fail_on_data_loss: bool = True
    include_headers: bool = False
    include_origin: bool = False

    @property
    def added_columns(self) -> frozenset[str]:
        """The options that add a column and are set."""
        set_options = {"includeHeaders": self.include_headers, "includeOrigin": self.include_origin}
        return frozenset(name for name, is_set in set_options.items() if is_set)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CommonOptions:
        """From parsed values; raises OptionError if two options contradict each other."""
        max_rows, min_partitions = values["maxRowsPerTrigger"], values["minPartitions"]
        if max_rows is not None and min_partitions is not None and min_partitions > max_rows:
            raise OptionError(
                f"options 'minPartitions' and 'maxRowsPerTrigger' contradict each other: "
                f"{max_rows} rows do not make {min_partitions} partitions"
            )
        min_rows, delay = values["minRowsPerTrigger"], values["maxTriggerDelay"]
        if max_rows is not None and min_rows is not None and min_rows > max_rows:
            raise OptionError(
                f"options 'minRowsPerTrigger' and 'maxRowsPerTrigger' contradict each other: "
                f"{min_rows} is more than {max_rows}"
            )
        if delay is not None and min_rows is None:
            raise OptionError("option 'maxTriggerDelay' has no effect without 'minRowsPerTrigger'")
        return cls(
            outage_timeout=outage_timeout(values),
            max_rows=max_rows,
            max_bytes=values["maxBytesPerTrigger"],
            min_rows=min_rows,
            max_trigger_delay=MAX_TRIGGER_DELAY if delay is None else delay,
            min_partitions=min_partitions,
            fail_on_data_loss=values["failOnDataLoss"],
            include_headers=values["includeHeaders"],
            include_origin=values["includeOrigin"],
        )


def outage_timeout(values: Mapping[str, Any]) -> float:
    """The value of ``outageTimeout``, in seconds."""
    given: float | None = values["outageTimeout"]
    return OUTAGE_TIMEOUT if given is None else given


def _is_set(value: object) -> bool:
    # By identity: a timestamp may be 0.
    return value is not None and value is not False and value != ()


def require_options(given: Mapping[str, str], format_name: str, stream_option: str) -> None:
    """Raise OptionError without a single option, as for a table that CREATE TABLE made."""
    if not given:
        raise OptionError(
            f"could not read format {format_name!r}: no option is set, expected 'servers' and "
            f"{stream_option!r}; set them with .option(...), and instead of a table of CREATE "
            f"TABLE, whose options Spark does not pass to a Python source, use "
            f"{create_view(format_name, stream_option)}"
        )


def validate_mode(values: Mapping[str, Any], table: Sequence[Option], mode: Mode | None) -> None:
    """Raise OptionError for an option that does not apply to ``mode``.

    Args:
        mode: None if it is not known yet; then all options are accepted.
    """
    for option in table:
        only = option.only
        if mode and only and mode is not only and _is_set(values[option.name]):
            raise OptionError(f"option {option.name!r} is for {only.value}, this is {mode.value}")


def validate_effect(values: Mapping[str, Any], name: str, *required: str) -> None:
    """Raise OptionError if ``name`` is set and none of the options that it depends on."""
    if _is_set(values[name]) and not any(_is_set(values[one]) for one in required):
        others = " or ".join(map(repr, required))
        raise OptionError(f"option {name!r} has no effect without {others}; set it, or remove it")


def validate_exclusive(values: Mapping[str, Any], *names: str, reason: str) -> None:
    """Raise OptionError if more than one of the options ``names`` is set."""
    given = [name for name in names if _is_set(values[name])]
    if len(given) > 1:
        raise OptionError(f"options {given[0]!r} and {given[1]!r} contradict each other: {reason}")
