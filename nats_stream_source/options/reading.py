"""What both formats have in common: the size of micro-batches, and what a loss does.

An option may belong to one way of reading only: a micro-batch's limits mean nothing to
``spark.read``, an end means nothing to a stream. Each is refused where it would do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import OptionError
from nats_stream_source.options import kinds
from nats_stream_source.options.table import Mode, Option

READING: tuple[Option, ...] = (
    Option(
        "maxRowsPerTrigger",
        "integer",
        kinds.integer,
        None,
        "the most rows that one micro-batch reads",
        only=Mode.STREAMING,
    ),
    Option(
        "maxBytesPerTrigger",
        "number of bytes",
        kinds.size,
        None,
        "about the most bytes that one micro-batch reads, by the stream's mean message size; a "
        "number, or one with `k`, `m` or `g` behind it (of 1024); holds beside "
        "`maxRowsPerTrigger`",
        only=Mode.STREAMING,
    ),
    Option(
        "minPartitions",
        "integer",
        kinds.partitions,
        None,
        "into how many tasks a range is split at least, as far as it has sequences; without it, "
        "into one for every 500,000 rows or 128 MiB, but no more than the driver has cores",
    ),
    Option(
        "failOnDataLoss",
        "boolean",
        kinds.boolean,
        True,
        "fail when messages that were not read yet are gone; `false` warns and goes on",
    ),
    Option("includeHeaders", "boolean", kinds.boolean, False, "add the column `headers`"),
    Option(
        "filterPushdown",
        "boolean",
        kinds.boolean,
        False,
        "read only what the DataFrame's filters leave; for a DataFrame that is filtered in one way "
        "only, and with Spark's `spark.sql.python.filterPushdown.enabled`",
        only=Mode.BATCH,
    ),
)


@dataclass(frozen=True, slots=True)
class Reading:
    """The options of :data:`READING`, parsed."""

    max_rows: int | None = None
    max_bytes: int | None = None
    min_partitions: int | None = None
    fail_on_data_loss: bool = True
    include_headers: bool = False
    filter_pushdown: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Reading:
        """From parsed values; OptionError where two contradict each other."""
        most, least = values["maxRowsPerTrigger"], values["minPartitions"]
        if most is not None and least is not None and least > most:
            raise OptionError(
                f"options 'minPartitions' and 'maxRowsPerTrigger' contradict each other: {most} "
                f"rows do not make {least} tasks"
            )
        return cls(
            max_rows=most,
            max_bytes=values["maxBytesPerTrigger"],
            min_partitions=least,
            fail_on_data_loss=values["failOnDataLoss"],
            include_headers=values["includeHeaders"],
            filter_pushdown=values["filterPushdown"],
        )


def _given(value: object) -> bool:
    # By identity: a time may be 0.
    return value is not None and value is not False and value != ()


def check_mode(values: Mapping[str, Any], table: Sequence[Option], mode: Mode | None) -> None:
    """Raise OptionError for an option that does nothing in ``mode``; None: it is not known yet."""
    for option in table:
        only = option.only
        if mode and only and mode is not only and _given(values[option.name]):
            raise OptionError(f"option {option.name!r} is for {only.value}, this is {mode.value}")


def check_alone(values: Mapping[str, Any], *names: str, why: str) -> None:
    """Raise OptionError when more than one of the options ``names`` is given."""
    given = [name for name in names if _given(values[name])]
    if len(given) > 1:
        raise OptionError(f"options {given[0]!r} and {given[1]!r} contradict each other: {why}")
