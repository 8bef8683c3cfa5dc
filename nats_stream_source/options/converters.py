"""Converters of option values: from the string that Spark passes to a Python value.

Each raises ValueError with the reason as a verb phrase (``is not an integer``). The reason never
contains the value, which may be a secret. A start position is a value too, in terms of the deliver
policies of JetStream consumers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic, TypeVar

from nats_stream_source.errors import ProtocolError
from nats_stream_source.jetstream.times import LONGEST_DURATION, nanoseconds
from nats_stream_source.wire.codec import KEY_CODECS, VALUE_CODECS, Chain, parse_chain


class DeliverPolicy(str, Enum):
    """JetStream's deliver policies; the value is the name in the protocol."""

    ALL = "all"
    NEW = "new"
    LAST = "last"
    LAST_PER_SUBJECT = "last_per_subject"
    BY_START_SEQUENCE = "by_start_sequence"
    BY_START_TIME = "by_start_time"


@dataclass(frozen=True, slots=True)
class StartPosition:
    """The start position of a query without a checkpoint.

    Attributes:
        sequence: the first stream sequence, with ``by_start_sequence``.
        time: nanoseconds since 1970, with ``by_start_time``: the query starts with the first
            message at or after this time.
        by_name: the positions of buckets or streams, by the names of the user; None if all have
            this one.
        time_strategy: the option ``startTimeStrategy``; None to start with the next message, and
            to refuse a time in the future.
    """

    policy: DeliverPolicy = DeliverPolicy.ALL
    sequence: int | None = None
    time: int | None = None
    by_name: Mapping[str, StartPosition] | None = None
    time_strategy: str | None = None

    def with_time_strategy(self, strategy: str | None) -> StartPosition:
        """The same position, and those that it names, with a strategy."""
        if strategy is None:
            return self
        named = self.by_name and {
            name: start.with_time_strategy(strategy) for name, start in self.by_name.items()
        }
        return replace(self, by_name=named, time_strategy=strategy)

    def of(self, name: str) -> StartPosition:
        """The position of a bucket or stream; that of its first message if it is not named."""
        return self if self.by_name is None else self.by_name.get(name, StartPosition())


START_OPTIONS = {
    DeliverPolicy.BY_START_SEQUENCE: "startSequence",
    DeliverPolicy.BY_START_TIME: "startTime",
}
"""The options that set the policies which need a value."""

START_WORDS = {
    "earliest": StartPosition(DeliverPolicy.ALL),
    "latest": StartPosition(DeliverPolicy.NEW),
}
"""The words of Spark's Kafka source for a start that is not a sequence or a time."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of values, which is called with the string that Spark passes.

    Attributes:
        name: its name in the documentation, in plain terms.
        convert: returns the value, or raises ValueError.
    """

    name: str
    convert: Callable[[str], T]

    def __call__(self, value: str) -> T:
        """The value of a string."""
        return self.convert(value)

    def named(self, name: str) -> Kind[T]:
        """The same values under another name."""
        return Kind(name, self.convert)


def kind(name: str) -> Callable[[Callable[[str], T]], Kind[T]]:
    """A decorator of a converter."""
    return lambda convert: Kind(name, convert)


# The pattern of Spark's default ``spark.redaction.regex``, applied to option names and values.
_REDACTED = re.compile(r"secret|password|token|access[.]?key", re.IGNORECASE)


@kind("string")
def string(value: str) -> str:
    """A non-empty string; surrounding spaces are removed."""
    if not value.strip():
        raise ValueError("is an empty string")
    return value.strip()


path = string.named("path")


@kind("string")
def name(value: str) -> str:
    """A name or a token on the server, unchanged: white space in it is not padding."""
    if not value:
        raise ValueError("is an empty string")
    return value


@kind("string")
def password(value: str) -> str:
    """A password, unchanged; it may be empty."""
    return value


@kind("string")
def single_name(value: str) -> str:
    """One name on the server; a list is refused, since a query reads one bucket or stream."""
    if "," in name(value):
        raise ValueError("is a list, expected one name")
    return value


@kind("regular expression")
def pattern(value: str) -> str:
    """A regular expression."""
    try:
        re.compile(name(value))
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return value


@kind("boolean")
def boolean(value: str) -> bool:
    """``true`` or ``false``."""
    lowered = value.strip().lower()
    if lowered not in ("true", "false"):
        raise ValueError("is not a boolean: neither true nor false")
    return lowered == "true"


@kind("integer")
def integer(value: str) -> int:
    """An integer from 1 to the largest stream sequence."""
    digits = value.strip()
    if not re.fullmatch(r"[+-]?[0-9]{1,30}", digits):
        raise ValueError("is not an integer")
    number = int(digits)
    if number < 1:
        raise ValueError("is smaller than 1")
    if number >= 2**63:
        raise ValueError("is larger than a sequence can be")
    return number


def integer_to(largest: int) -> Kind[int]:
    """An integer from 1 to ``largest``."""

    @kind("integer")
    def convert(value: str) -> int:
        number = integer(value)
        if number > largest:
            raise ValueError(f"is larger than {largest}")
        return number

    return convert


def one_of(*members: T) -> Kind[T]:
    """One of several strings, or members of an enumeration by their values, in any case."""
    by_name = {str(one.value if isinstance(one, Enum) else one): one for one in members}
    *first, last = [f"`{name}`" for name in by_name]

    @kind(f"{', '.join(first)} or {last}")
    def convert(value: str) -> T:
        lowered = value.strip().lower()
        if lowered not in by_name:
            raise ValueError(f"is not one of {', '.join(by_name)}")
        return by_name[lowered]

    return convert


@kind("number of bytes")
def byte_size(value: str) -> int:
    """A number of bytes; the suffixes ``k``, ``m`` and ``g`` are powers of 1024."""
    digits, unit = value.strip().lower(), 1
    for shift, suffix in ((10, "k"), (20, "m"), (30, "g")):
        if digits.endswith(suffix):
            digits, unit = digits[:-1], 1 << shift
    if not re.fullmatch(r"[+-]?[0-9]{1,30}", digits.strip()):
        raise ValueError("is not a number of bytes, such as 1048576 or 64m")
    return integer(str(integer(digits) * unit))


def seconds(least: float, most: float) -> Kind[float]:
    """A duration in seconds."""

    @kind("duration in seconds")
    def convert(value: str) -> float:
        try:
            number = float(value.strip())
        except ValueError:
            raise ValueError("is not a duration in seconds") from None
        if not least <= number <= most:
            raise ValueError(f"is not between {least:g} and {most:,.0f} seconds")
        return number

    return convert


long_duration = seconds(0.1, LONGEST_DURATION)


@kind("timestamp")
def timestamp(value: str) -> int:
    """Nanoseconds since 1970 of an RFC 3339 timestamp with a time zone."""
    try:
        return nanoseconds(value.strip())
    except (ProtocolError, ValueError):
        raise ValueError(
            "is not an RFC 3339 timestamp with a time zone, for example 2026-11-21T08:00:00Z or "
            "2026-11-21T09:00:00+01:00"
        ) from None


@kind("integer, or JSON object")
def start_sequence(value: str) -> StartPosition:
    """A stream sequence, or a JSON object with one for each bucket or stream."""
    policy = DeliverPolicy.BY_START_SEQUENCE

    def position(number: object) -> StartPosition:
        return StartPosition(policy, sequence=integer(str(number)))

    return _start(value, int, "a sequence", policy, position)


@kind("timestamp, or JSON object")
def start_time(value: str) -> StartPosition:
    """A timestamp, or a JSON object with one for each bucket or stream."""
    policy = DeliverPolicy.BY_START_TIME

    def position(text: Any) -> StartPosition:
        return StartPosition(policy, time=timestamp(text))

    return _start(value, str, "a timestamp", policy, position)


def _start(
    value: str,
    kind: type,
    expected: str,
    policy: DeliverPolicy,
    position: Callable[[Any], StartPosition],
) -> StartPosition:
    if not value.lstrip().startswith("{"):
        return position(value)
    pairs: list[tuple[str, Any]] = _json(value, object_pairs_hook=list)
    starts: dict[str, StartPosition] = {}
    for stream, start in pairs:
        if stream in starts:
            raise ValueError(f"names {stream!r} twice")
        if isinstance(start, str) and start in START_WORDS:
            starts[stream] = START_WORDS[start]
            continue
        if type(start) is not kind:
            words = " or ".join(map(repr, START_WORDS))
            raise ValueError(f"has {start!r} for {stream!r}, expected {expected}, {words}")
        try:
            starts[stream] = position(start)
        except ValueError as error:
            raise ValueError(f"has {start!r} for {stream!r}, which {error}") from None
    return StartPosition(policy, by_name=starts)


def _json(value: str, **arguments: Any) -> Any:
    try:
        return json.loads(value, **arguments)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"is not a JSON object: {error}") from None


@kind("JSON object of strings")
def metadata(value: str) -> dict[str, str]:
    """A JSON object of strings."""
    parsed = _json(value)
    if not isinstance(parsed, dict) or not all(isinstance(text, str) for text in parsed.values()):
        raise ValueError("is not a JSON object of strings")
    if any(key.startswith("_nats.") for key in parsed):
        raise ValueError("has a name that begins with '_nats.', which the server sets itself")
    return parsed


@kind("list of strings")
def string_list(value: str) -> tuple[str, ...]:
    """Strings separated by commas."""
    elements = tuple(element.strip() for element in value.split(","))
    if not all(elements):
        raise ValueError("is a list with an empty element")
    return elements


@kind("list of URLs")
def server_urls(value: str) -> tuple[str, ...]:
    """URLs without credentials."""
    if "@" in value:
        raise ValueError(
            "contains credentials, which Spark would show in plans; set the options 'user' and "
            "'password', or 'token'"
        )
    return string_list(value)


@kind("string")
def credentials_content(value: str) -> str:
    """The content of a credentials file in which Spark recognises a secret."""
    if not _REDACTED.search(value):
        raise ValueError(
            "would be shown in plans: Spark hides the value of an option with this name only if "
            "the value itself contains a word such as 'secret'; set the whole file as nsc writes "
            "it, comments included, or append a last line '# secret'"
        )
    return value


@kind("string")
def subject_token(value: str) -> str:
    """One token of a subject."""
    if not value or set(value) & set(" \t\r\n.*>"):
        raise ValueError("is not one token: dots, wildcards and spaces are not allowed")
    return value


@kind("subject")
def subject(value: str) -> str:
    """A subject without wildcards."""
    for token in value.split("."):
        subject_token(token)
    return value


@kind("list of codecs")
def key_codec(value: str) -> Chain:
    """Codecs of keys in the order in which they encode."""
    return parse_chain(value, KEY_CODECS)


@kind("list of codecs")
def value_codec(value: str) -> Chain:
    """Codecs of values in the order in which they encode."""
    return parse_chain(value, VALUE_CODECS)
