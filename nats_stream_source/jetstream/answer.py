"""What stands in an answer of JetStream's API, checked on the way in. Pure.

An answer may come from a server of a version that nobody knows yet, or from something that is no
server at all. What is taken from it is of the expected kind, or there is a :class:`ProtocolError`
that names the place; so nothing further in meets a text where it counts with a number.
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

# The properties of a stream that something is decided by; null is as good as absent.
_CONFIG: dict[str, type] = {
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
}


def decoded(data: bytes, subject: str) -> dict[str, Any]:
    """The JSON object of the answer on ``subject``; ProtocolError when it is none."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: nested a thousand deep
        answer = None
    if not isinstance(answer, dict):
        raise ProtocolError(f"the answer on {subject!r} is not a JSON object")
    return answer


def number(found: Json, *path: str, default: int | None = None) -> int:
    """The number at ``path``, from 0 to 2**63 - 1; ``default`` where nothing stands there.

    Raises:
        ProtocolError: something else stands there, or nothing and there is no default.
    """
    value = _at(found, path, default)
    if type(value) is not int or not 0 <= value <= _MAX_INT64:
        raise _wrong(path, "a number")
    return value


def text(found: Json, *path: str, default: str | None = None) -> str:
    """The text at ``path``; as :func:`number`."""
    value = _at(found, path, default)
    if not isinstance(value, str):
        raise _wrong(path, "a text")
    return value


def moment(found: Json, *path: str) -> str:
    """The time at ``path`` as the server wrote it; as :func:`number`."""
    value = text(found, *path)
    nanoseconds(value)
    return value


def table(found: Json, *path: str, default: Json | None = None) -> dict[str, Any]:
    """The object at ``path``; as :func:`number`."""
    value = _at(found, path, default)
    if not isinstance(value, dict):
        raise _wrong(path, "an object")
    return value


def items(found: Json, *path: str) -> list[Any]:
    """The list at ``path``; empty where nothing stands there; as :func:`number`."""
    value = _at(found, path, [])
    if not isinstance(value, list):
        raise _wrong(path, "a list")
    return value


def octets(found: Json, *path: str) -> bytes:
    """The bytes at ``path``, which JSON has in base64; none where nothing stands there."""
    try:
        return base64.b64decode(text(found, *path, default=""))
    except (binascii.Error, ValueError):
        raise _wrong(path, "base64") from None


def stream_config(found: Json, *path: str) -> dict[str, Any]:
    """A stream's configuration, whose properties are of the kinds that this package relies on."""
    config = {k: v for k, v in table(found, *path).items() if v is not None}
    for name, kind in _CONFIG.items():
        if name in config and type(config[name]) is not kind:
            raise _wrong((*path, name), f"what it should be ({kind.__name__})")
    if not all(isinstance(subject, str) for subject in config.get("subjects", ())):
        raise _wrong((*path, "subjects"), "a list of texts")
    if mirror := config.get("mirror"):
        text(mirror, "name")
        text(table(mirror, "external", default={}), "api", default="")
    return config


def _at(found: Any, path: tuple[str, ...], default: Any) -> Any:
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return default if found is None else found


def _wrong(path: tuple[str, ...], kind: str) -> ProtocolError:
    return ProtocolError(f"the server's answer is no answer: '{'.'.join(path)}' is not {kind}")
