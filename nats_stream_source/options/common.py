"""The options that both formats have, and the checks that both formats use.

They set the size of micro-batches and partitions, the reaction to data loss, and what is read.

An option may apply to one mode only: the limits of a micro-batch do not apply to ``spark.read``, an
end does not apply to ``spark.readStream``. In the other mode the option is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nats_stream_source.errors import OptionError
from nats_stream_source.options import converters
from nats_stream_source.options.advice import create_view
from nats_stream_source.options.start_position import StartTimeStrategy
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
        converters.one_of(*StartTimeStrategy),
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

    max_rows_per_trigger: int | None
    max_bytes_per_trigger: int | None
    min_rows_per_trigger: int | None
    max_trigger_delay: float
    outage_timeout: float
    min_partitions: int | None
    fail_on_data_loss: bool
    include_headers: bool
    include_origin: bool

    @property
    def added_columns(self) -> frozenset[str]:
        """The options that add a column and are set."""
        set_options = {"includeHeaders": self.include_headers, "includeOrigin": self.include_origin}
        return frozenset(name for name, is_set in set_options.items() if is_set)

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


def require_options(given: Mapping[str, str], format_name: str, stream_option: str) -> None:
    """Raise OptionError without a single option, as for a table that CREATE TABLE made."""
    if not given:
        raise OptionError(
            f"could not read format {format_name!r}: no option is set, expected 'servers' and "
            f"{stream_option!r}; set them with .option(...), and instead of a table of CREATE "
            f"TABLE, whose options Spark does not pass to a Python source, use "
            f"{create_view(format_name, stream_option)}"
        )


def validate_mode(values: Values, table: Sequence[Option], mode: Mode | None) -> None:
    """Raise OptionError for an option that does not apply to ``mode``.

    Args:
        mode: None if it is not known yet; then all options are accepted.
    """
    for option in table:
        only = option.only
        if mode and only and mode is not only and values.is_set(option.name):
            raise OptionError(f"option {option.name!r} is for {only.value}, this is {mode.value}")
