"""Reads and validates the fields of a JetStream API response. Pure.

A response may come from an unknown server version, or from a peer that is not a NATS server. Each
field is returned with the expected type, or :class:`ProtocolError` names the field. So the callers
never get a string where they calculate with an integer.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from nats_stream_source.errors import ProtocolError
from nats_stream_source.jetstream.times import nanoseconds

Json = Mapping[str, Any]

_MAX_INT64 = (1 << 63) - 1

# The properties of a stream that the package uses; null is the same as absent.
_CONFIG_TYPES: dict[str, type] = {
    "name": str,
    "retention": str,
    "discard": str,
    "subjects": list,
    "sources": list,
    "mirror": dict,
    "subject_transform": dict,
    "max_msgs": int,
    "max_bytes": int,
    "max_age": int,
    "max_msgs_per_subject": int,
    "subject_delete_marker_ttl": int,
    "max_consumers": int,
    "num_replicas": int,
    "allow_msg_ttl": bool,
    "allow_direct": bool,
    "mirror_direct": bool,
    "no_ack": bool,
}
_JSON_TYPES = {
    str: "a string",
    list: "an array",
    dict: "an object",
    int: "an integer",
    bool: "a boolean",
}


def decode_response(data: bytes, subject: str) -> dict[str, Any]:
    """The JSON object of a response to a request on ``subject``; ProtocolError if it is not one."""
    try:
        response = json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: nested a thousand levels deep
        response = None
    if not isinstance(response, dict):
        raise ProtocolError(f"invalid JetStream response on {subject!r}: not a JSON object")
    return response


def integer(response: Json, *path: str, default: int | None = None) -> int:
    """The integer at ``path``, from 0 to 2**63 - 1; ``default`` if the field is absent.

    Raises:
        ProtocolError: the field has another type, or is absent without a default.
    """
    value = _field(response, path, default)
    if type(value) is not int or not 0 <= value <= _MAX_INT64:
        raise _type_error(path, "an integer from 0 to 2^63-1")
    return value


def string(response: Json, *path: str, default: str | None = None) -> str:
    """The string at ``path``; otherwise as :func:`integer`."""
    value = _field(response, path, default)
    if not isinstance(value, str):
        raise _type_error(path, "a string")
    return value


def timestamp(response: Json, *path: str) -> str:
    """The timestamp at ``path`` as the server formats it; otherwise as :func:`integer`."""
    value = string(response, *path)
    nanoseconds(value)
    return value


def object_(response: Json, *path: str, default: Json | None = None) -> dict[str, Any]:
    """The object at ``path``; otherwise as :func:`integer`."""
    value = _field(response, path, default)
    if not isinstance(value, dict):
        raise _type_error(path, "an object")
    return value


def array(response: Json, *path: str) -> list[Any]:
    """The array at ``path``; empty if the field is absent; otherwise as :func:`integer`."""
    value = _field(response, path, [])
    if not isinstance(value, list):
        raise _type_error(path, "an array")
    return value


def base64_bytes(response: Json, *path: str) -> bytes:
    """The bytes at ``path``, which JSON contains in base64; empty if the field is absent."""
    try:
        return base64.b64decode(string(response, *path, default=""))
    except (binascii.Error, ValueError):
        raise _type_error(path, "base64") from None


def stream_config(response: Json, *path: str) -> dict[str, Any]:
    """The configuration of a stream; the properties that the package uses have their types."""
    config = {k: v for k, v in object_(response, *path).items() if v is not None}
    for name, kind in _CONFIG_TYPES.items():
        if name in config and type(config[name]) is not kind:
            raise _type_error((*path, name), _JSON_TYPES[kind])
    if not all(isinstance(subject, str) for subject in config.get("subjects", ())):
        raise _type_error((*path, "subjects"), "an array of strings")
    if mirror := config.get("mirror"):
        string(mirror, "name")
        string(object_(mirror, "external", default={}), "api", default="")
    return config


def _field(value: Any, path: tuple[str, ...], default: Any) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return default if value is None else value


def _type_error(path: tuple[str, ...], expected: str) -> ProtocolError:
    return ProtocolError(f"invalid JetStream response: field '{'.'.join(path)}' must be {expected}")
