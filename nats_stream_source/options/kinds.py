"""What the value of an option may be: from Spark's text to a value.

Each function raises ValueError with the reason, which never repeats the value: it may be a secret.
"""

from __future__ import annotations

import re

from nats_stream_source.errors import ProtocolError
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.options.beginning import DeliverPolicy

# What Spark's default ``spark.redaction.regex`` looks for, in an option's name and in its value.
_REDACTED = re.compile(r"secret|password|token|access[.]?key", re.IGNORECASE)


def text(value: str) -> str:
    """Any text but an empty one, without the spaces around it."""
    if not value.strip():
        raise ValueError("an empty text")
    return value.strip()


def boolean(value: str) -> bool:
    """``true`` or ``false``."""
    lowered = value.strip().lower()
    if lowered not in ("true", "false"):
        raise ValueError("neither true nor false")
    return lowered == "true"


def integer(value: str) -> int:
    """A whole number from 1 to the largest sequence."""
    digits = value.strip()
    if not re.fullmatch(r"[+-]?[0-9]{1,30}", digits):
        raise ValueError("not a whole number")
    number = int(digits)
    if number < 1:
        raise ValueError("smaller than 1")
    if number >= 2**63:
        raise ValueError("larger than a sequence can be")
    return number


def partitions(value: str) -> int:
    """A number of tasks."""
    number = integer(value)
    if number > 10_000:
        raise ValueError("larger than 10000")
    return number


def size(value: str) -> int:
    """A number of bytes; ``k``, ``m`` or ``g`` behind it stand for powers of 1024."""
    digits, unit = value.strip().lower(), 1
    for shift, suffix in ((10, "k"), (20, "m"), (30, "g")):
        if digits.endswith(suffix):
            digits, unit = digits[:-1], 1 << shift
    return integer(str(integer(digits) * unit))


def seconds(value: str) -> float:
    """A duration."""
    try:
        number = float(value.strip())
    except ValueError:
        raise ValueError("not a number") from None
    if not 0.05 <= number <= 3600:
        raise ValueError("not between 0.05 and 3600")
    return number


def moment(value: str) -> int:
    """Nanoseconds since 1970 of an RFC 3339 time, which says its zone."""
    try:
        return nanoseconds(value.strip())
    except (ProtocolError, ValueError):
        raise ValueError("for example 2026-11-21T08:00:00Z, or with +01:00 for Z") from None


def names(value: str) -> tuple[str, ...]:
    """A list, separated by commas."""
    parts = tuple(part.strip() for part in value.split(","))
    if not all(parts):
        raise ValueError("a list with an empty element")
    return parts


def servers(value: str) -> tuple[str, ...]:
    """URLs without credentials."""
    if "@" in value:
        raise ValueError(
            "it holds credentials, which Spark would show in plans: use the options 'user' and "
            "'password', or 'token'"
        )
    return names(value)


def credentials(value: str) -> str:
    """A credentials file's text, in which Spark recognises a secret."""
    if not _REDACTED.search(value):
        raise ValueError(
            "Spark hides the value of an option with this name only where the value itself has a "
            "word like 'secret', and would show this one in plans: give the whole file as nsc "
            "writes it, comments included, or add a last line '# secret'"
        )
    return value


def token(value: str) -> str:
    """One token of a subject."""
    if not value or set(value) & set(" \t\r\n.*>"):
        raise ValueError("not one token: no dots, wildcards or spaces")
    return value


def subject(value: str) -> str:
    """A subject without wildcards."""
    for one in value.split("."):
        token(one)
    return value


def policy(value: str) -> DeliverPolicy:
    """One of JetStream's deliver policies."""
    try:
        return DeliverPolicy(value.strip().lower())
    except ValueError:
        raise ValueError(f"one of {', '.join(one.value for one in DeliverPolicy)}") from None
