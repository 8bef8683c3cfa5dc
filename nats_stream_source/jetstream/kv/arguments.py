"""Validates the arguments of key-value calls, before a request is sent. Pure.

A revision becomes a header of the write or a field of the request. Without validation, None would
make a conditional write unconditional, and the server would parse or ignore what other types turn
into.
"""

from __future__ import annotations

from nats_stream_source.errors import ConfigurationError

_MAX_REVISION = (1 << 64) - 1  # stream sequences are unsigned 64-bit integers


def validate_revision(action: str, name: str, revision: object, *, first: int = 0) -> int:
    """Return ``revision`` if it is an integer from ``first`` to 2**64 - 1.

    Args:
        action: the failed operation, for the error: ``write key 'a'``.
        name: the argument's name.

    Raises:
        ConfigurationError: it is of another type, also a bool, or out of range.
    """
    if type(revision) is not int or not first <= revision <= _MAX_REVISION:
        raise ConfigurationError(
            f"could not {action}: {name} is {revision!r}, expected an integer from {first} to "
            f"2^64-1; change {name}",
            settings=(name,),
        )
    return revision


def validate_optional_revision(action: str, name: str, revision: object) -> None:
    """:func:`validate_revision` if ``revision`` is not None."""
    if revision is not None:
        validate_revision(action, name, revision)


def validate_value(key: str, value: object) -> bytes:
    """Return ``value`` as bytes; ConfigurationError if it is not bytes-like."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise ConfigurationError(
            f"could not write key {key!r}: value is of type {type(value).__name__}, expected "
            f"bytes; encode it",
            settings=("value",),
        )
    return bytes(value)
