"""Validates the arguments of Direct Get calls, before a request is sent. Pure.

A server responds to an invalid subject with 404, as if no message matched, and an invalid number or
time with 408 or an API error. The checks name the argument instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime

from nats_stream_source.errors import (
    BadRequestError,
    ConfigurationError,
    InvalidNameError,
    ProtocolError,
)
from nats_stream_source.jetstream.subjects import validate_subject_filter
from nats_stream_source.jetstream.times import nanoseconds, rfc3339

Time = str | int | datetime
"""An RFC 3339 string, nanoseconds since 1970, or an aware ``datetime``."""

_MAX_INTEGER = (1 << 64) - 1  # stream sequences are unsigned 64-bit integers


def validate_integer(name: str, value: object, first: int = 1) -> None:
    """Raise BadRequestError if ``value`` is not an integer from ``first`` to 2**64 - 1.

    A bool is not an integer.
    """
    if type(value) is not int or not first <= value <= _MAX_INTEGER:
        raise BadRequestError(
            f"invalid argument {name!r}: {value!r}, expected an integer of {first} or more"
        )


def validate_optional_integer(name: str, value: object, first: int = 1) -> None:
    """:func:`validate_integer` if ``value`` is not None."""
    if value is not None:
        validate_integer(name, value, first)


def validate_read_after_write(min_last_seq: object, timeout: object) -> None:
    """Raise BadRequestError for a ``min_last_seq`` or ``timeout`` of another type or below 0."""
    validate_optional_integer("min_last_seq", min_last_seq, 0)
    if timeout is None:
        return
    if type(timeout) not in (int, float) or not 0 <= timeout < math.inf:  # type: ignore[operator]
        raise BadRequestError(f"invalid argument 'timeout': {timeout!r}, expected seconds")


def validate_subject(subject: object) -> None:
    """Raise BadRequestError if ``subject`` is not a subject; whole tokens may be wildcards."""
    try:
        validate_subject_filter(subject)  # type: ignore[arg-type]
    except InvalidNameError as error:
        raise BadRequestError(f"invalid subject {subject!r}: {error}") from None


def validate_subjects(subjects: object) -> tuple[str, ...]:
    """The subjects of a multi-subject request; BadRequestError if one is invalid, or none given."""
    if isinstance(subjects, str):
        subjects = (subjects,)
    if not isinstance(subjects, Iterable) or not (names := tuple(subjects)):
        raise BadRequestError(
            f"invalid multi-subject request: subjects are {subjects!r}, expected one or more"
        )
    for name in names:
        validate_subject(name)
    return names


def validate_time(name: str, value: object) -> str:
    """The argument ``name`` as an RFC 3339 timestamp; BadRequestError if it is not a time.

    Raises:
        ConfigurationError: a ``datetime`` does not have a time zone.
    """
    try:
        if type(value) is int or isinstance(value, (str, datetime)):
            text = rfc3339(value)
            nanoseconds(text)  # four digits of the year, as servers require
            return text
    except ConfigurationError:
        raise
    except (ProtocolError, OverflowError, ValueError, OSError):
        pass  # the last three: a year that the platform cannot represent
    raise BadRequestError(
        f"invalid argument {name!r}: {value!r}, expected an RFC 3339 timestamp with a time zone, "
        f"nanoseconds since 1970, or an aware datetime"
    )
