"""The buckets or streams of a query that reads several: a list of names, or a pattern."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from nats_stream_source.errors import OptionError
from nats_stream_source.options.start_position import START_WORDS, DeliverPolicy, StartPosition
from nats_stream_source.options.table import Mode, Values


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
    given = [name for name in sequences if values[name] and not _by_name(values[name])]
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
        raise OptionError(
            f"{invalid}: it has 'latest' for {new[0]!r}, which is for spark.readStream: "
            f"spark.read ends with the present last sequence, so it would return nothing"
        )
