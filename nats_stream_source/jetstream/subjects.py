"""Names and subjects: ADR-8's rules for buckets, keys and filters, ADR-19's API prefixes.

A bucket ``fleet`` is the stream ``KV_fleet`` with the subjects ``$KV.fleet.<key>``. A filter is a
key in which whole tokens may be wildcards: ``*`` for one token, ``>`` at the end for the rest.
Keys that begin with ``_kv`` belong to whoever keeps the bucket: they can be read, but are not
written and not listed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from nats_stream_source.errors import ConfigurationError, InvalidNameError

DEFAULT_API_PREFIX = "$JS.API"

_BUCKET = re.compile(r"[a-zA-Z0-9_-]+")
_KEY = re.compile(r"[-/_=.a-zA-Z0-9]+")

RESERVED = "_kv"
"""What the keys begin with that ADR-8 keeps for internal use."""


def check_bucket(bucket: str) -> str:
    """Return ``bucket`` if ADR-8 allows it as a name; raise InvalidNameError otherwise."""
    if not _BUCKET.fullmatch(bucket):
        raise InvalidNameError(
            f"{bucket!r} is not a bucket name: letters, digits, '_' and '-' only (ADR-8)"
        )
    return bucket


def check_key(key: str) -> str:
    """Return ``key`` if ADR-8 allows it; raise InvalidNameError otherwise.

    Beyond ADR-8's pattern, two dots in a row are refused: the server has no empty tokens.
    """
    if not _KEY.fullmatch(key) or key[0] == "." or key[-1] == "." or ".." in key:
        raise InvalidNameError(
            f"{key!r} is not a key: letters, digits and '-/_=.' only, not starting or ending "
            f"with '.', no '..' (ADR-8)"
        )
    return key


def check_written_key(key: str) -> str:
    """Return ``key`` if it is a key that users may write; raise InvalidNameError otherwise."""
    if check_key(key).startswith(RESERVED):
        raise InvalidNameError(f"{key!r}: keys that begin with {RESERVED!r} are reserved (ADR-8)")
    return key


def check_filter(pattern: str) -> str:
    """Return ``pattern`` if it is a key or a key with wildcard tokens; InvalidNameError if not."""
    tokens = pattern.split(".")
    for index, token in enumerate(tokens):
        if token == "*" or (token == ">" and index == len(tokens) - 1):
            continue
        if not token or "*" in token or ">" in token or not _KEY.fullmatch(token):
            raise InvalidNameError(
                f"{pattern!r} is not a key filter: a key (ADR-8) whose tokens may be '*', "
                f"and the last one '>'"
            )
    return pattern


def is_literal(subject: str) -> bool:
    """Whether a subject stands for itself alone, so that it can be asked for by its name.

    Servers also store what somebody publishes to ``$KV.fleet.>``. In a request its name would be a
    filter: a purge of that one subject would be a purge of the bucket.
    """
    return not {"*", ">"} & set(subject.split("."))


def covering(filters: Sequence[str]) -> str:
    """The narrowest one filter that matches whatever one of ``filters`` does."""
    found: list[str] = []
    for tokens in itertools.zip_longest(*(one.split(".") for one in filters)):
        if None in tokens:
            return ".".join([*found[:-1], ">"])  # ``a.>`` does not match ``a``
        if ">" in tokens:
            return ".".join([*found, ">"])
        found.append(tokens[0] if len(set(tokens)) == 1 else "*")
    return ".".join(found)


def stream_of(bucket: str) -> str:
    """The name of the bucket's stream."""
    return f"KV_{check_bucket(bucket)}"


def bucket_of(stream: str) -> str:
    """The name of the bucket that a stream is, or would be: a mirror may be named either way."""
    return stream.removeprefix("KV_")


def key_subject(bucket: str, key: str) -> str:
    """The stream's subject for a key or key filter."""
    return f"$KV.{bucket}.{key}"


def write_subject(subject: str, api_prefix: str) -> str:
    """Where a message for ``subject`` is sent to, so that it gets to the stream (ADR-19).

    The same prefix leads to the stream as to the API, and the server takes it off again on the
    way; the stream's own subjects never have it.
    """
    return subject if api_prefix == DEFAULT_API_PREFIX else f"{api_prefix}.{subject}"


def write_prefix(bucket: str, api_prefix: str) -> str:
    """What stands before the key where a write is sent: ``$KV.fleet.``, ``fromA.$KV.fleet.``."""
    return write_subject(key_subject(bucket, ""), api_prefix)


def overlap(one: str, other: str) -> bool:
    """Whether a subject exists that both filters match."""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if a == ">" or b == ">":
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left) == len(right)


def covers(wide: str, narrow: str) -> bool:
    """Whether every subject that ``narrow`` matches is matched by ``wide`` too."""
    left, right = wide.split("."), narrow.split(".")
    for a, b in zip(left, right, strict=False):
        if a == ">":
            return True
        if b == ">" or (a != "*" and a != b):
            return False
    return len(left) == len(right)


def intersection(one: str, other: str) -> str | None:
    """The filter for what both filters match; None where they do not overlap."""
    left, right = one.split("."), other.split(".")
    common: list[str] = []
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a == ">":
            return ".".join(common + right[index:])
        if b == ">":
            return ".".join(common + left[index:])
        if a != b and "*" not in (a, b):
            return None
        common.append(b if a == "*" else a)
    return ".".join(common) if len(left) == len(right) else None


def check_subject_filter(pattern: str) -> str:
    """Return ``pattern`` if it is a subject, or one with wildcards; InvalidNameError if not."""
    tokens = pattern.split(".")
    for index, token in enumerate(tokens):
        if token == "*" or (token == ">" and index == len(tokens) - 1):
            continue
        # Within a token the server takes '*' and '>' for themselves; nobody means that here.
        if not token or set(token) & set("*> \t\r\n\f\0"):
            raise InvalidNameError(
                f"{pattern!r} is not a subject filter: tokens between dots, without spaces; a "
                f"token may be '*', and the last one '>'"
            )
    return pattern


def check_stream(name: str) -> str:
    """Return ``name`` if a stream can have it; raise InvalidNameError otherwise."""
    if not name or set(name) & set(". *>/\\\t\r\n\f\0"):
        raise InvalidNameError(
            f"{name!r} is not a stream's name: no spaces, dots, slashes or wildcards. The option "
            f"'subject' looks a stream up by a subject that it has"
        )
    return name


def check_filters(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the key filters if each is valid and no two overlap, as one consumer needs them.

    Raises:
        InvalidNameError: one is no filter.
        ConfigurationError: two overlap; the server refuses such a consumer (10138).
    """
    return _apart(tuple(check_filter(pattern) for pattern in patterns), "key", "keys")


def check_subject_filters(patterns: Iterable[str]) -> tuple[str, ...]:
    """:func:`check_filters` for subjects of any stream."""
    checked = tuple(check_subject_filter(pattern) for pattern in patterns)
    return _apart(checked, "subject", "filterSubjects")


def _apart(checked: tuple[str, ...], what: str, option: str) -> tuple[str, ...]:
    # Two literals overlap only if they are the same, so thousands of them are no work.
    literals: set[str] = set()
    wild: list[str] = []
    for one in checked:
        literal = is_literal(one)
        others = wild if literal else [*wild, *literals]
        for other in [one] if one in literals else others:
            if overlap(one, other):
                raise ConfigurationError(
                    f"the {what} filters {other!r} and {one!r} overlap: a {what} that matches both "
                    f"would be read twice; keep the wider one in the option {option!r}"
                )
        if literal:
            literals.add(one)
        else:
            wild.append(one)
    return checked


def api_prefix(prefix: str | None = None, domain: str | None = None) -> str:
    """The prefix of all API subjects: ``$JS.API``, a domain's, or an account import's (ADR-19)."""
    if prefix and domain:
        raise ConfigurationError("options 'apiPrefix' and 'domain' exclude each other")
    chosen = prefix.rstrip(".") if prefix else f"$JS.{domain}.API" if domain else DEFAULT_API_PREFIX
    tokens = chosen.split(".")
    if any(not token or set(token) & set("*> \t\r\n") for token in tokens):
        raise ConfigurationError(
            f"{chosen!r} cannot be an API prefix: see options 'apiPrefix' and 'domain'"
        )
    return chosen
