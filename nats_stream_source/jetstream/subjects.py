"""Names and subjects: ADR-8's rules for buckets, keys and filters, ADR-19's API prefixes.

A bucket ``fleet`` is the stream ``KV_fleet`` with the subjects ``$KV.fleet.<key>``. A filter is a
key in which whole tokens may be wildcards: ``*`` for one token, ``>`` at the end for the rest.
Keys that start with ``_kv`` are reserved for internal use: they can be read, but are not written
and not listed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from nats_stream_source.connection.settings import DEFAULT_API_PREFIX
from nats_stream_source.errors import ConfigurationError, InvalidNameError

_BUCKET = re.compile(r"[a-zA-Z0-9_-]+")
KEY_PATTERN = r"[-/_=a-zA-Z0-9]+(?:\.[-/_=a-zA-Z0-9]+)*"
"""A key of ADR-8, without empty tokens: a regular expression without anchors (Python, RE2)."""

_KEY = re.compile(KEY_PATTERN)

_TOKEN_PATTERNS = {"*": r"[^.]+", ">": r".+"}

RESERVED = "_kv"
"""Prefix of the keys that ADR-8 reserves for internal use."""


def _valid(name: str, valid: object, problem: str) -> str:
    """Return ``name`` if it is valid; raise InvalidNameError otherwise."""
    if not valid:
        raise InvalidNameError(f"{name!r} {problem}")
    return name


def validate_bucket(bucket: str) -> str:
    """Return ``bucket`` if ADR-8 allows it; raise InvalidNameError otherwise."""
    valid = isinstance(bucket, str) and _BUCKET.fullmatch(bucket)
    return _valid(bucket, valid, "is not a bucket name: letters, digits, '_' and '-' only (ADR-8)")


def validate_key(key: str) -> str:
    """Return ``key`` if ADR-8 allows it; raise InvalidNameError otherwise.

    In addition to ADR-8's pattern, consecutive dots are refused: a subject cannot have an empty
    token.
    """
    return _valid(
        key,
        isinstance(key, str) and _KEY.fullmatch(key),
        "is not a key: letters, digits and '-/_=.' only, not starting or ending with '.', no '..' "
        "(ADR-8)",
    )


def validate_written_key(key: str) -> str:
    """Return ``key`` if users may write it; raise InvalidNameError otherwise."""
    if validate_key(key).startswith(RESERVED):
        raise InvalidNameError(f"{key!r}: keys that start with {RESERVED!r} are reserved (ADR-8)")
    return key


def _is_filter(pattern: object, is_token: Callable[[str], bool]) -> bool:
    """Whether each token is ``*``, a final ``>``, or one for which ``is_token`` is true."""
    tokens = pattern.split(".") if isinstance(pattern, str) else [""]
    last = len(tokens) - 1
    return all(
        token == "*" or (token == ">" and index == last) or is_token(token)
        for index, token in enumerate(tokens)
    )


def validate_filter(pattern: str) -> str:
    """Return ``pattern`` if it is a key or a key with wildcard tokens; InvalidNameError if not."""
    return _valid(
        pattern,
        _is_filter(pattern, lambda token: bool(_KEY.fullmatch(token))),
        "is not a key filter: a key (ADR-8) whose tokens may be '*', and the last one '>'",
    )


def is_literal(subject: str) -> bool:
    """Whether a subject matches only itself, so that a request can name it.

    Servers also store messages that were published to ``$KV.fleet.>``. In a request that subject
    would be a filter: a purge of the one subject would purge the bucket.
    """
    return not {"*", ">"} & set(subject.split("."))


def covering(filters: Sequence[str]) -> str:
    """The narrowest single filter that matches every subject that one of ``filters`` matches."""
    found: list[str] = []
    for tokens in itertools.zip_longest(*(one.split(".") for one in filters)):
        if None in tokens:
            return ".".join([*found[:-1], ">"])  # ``a.>`` does not match ``a``
        if ">" in tokens:
            return ".".join([*found, ">"])
        found.append(tokens[0] if len(set(tokens)) == 1 else "*")
    return ".".join(found)


def filter_pattern(filters: Iterable[str]) -> str:
    """The regular expression (RE2) of the subjects that match one of ``filters``."""
    patterns = (
        r"\.".join(_TOKEN_PATTERNS.get(token) or re.escape(token) for token in one.split("."))
        for one in filters
    )
    return f"(?s)^(?:{'|'.join(patterns)})$"


def stream_of(bucket: str) -> str:
    """The name of the bucket's stream."""
    return f"KV_{validate_bucket(bucket)}"


def bucket_of(stream: str) -> str:
    """The name of a stream's bucket; the name of a mirror may lack the prefix ``KV_``."""
    return stream.removeprefix("KV_")


def key_subject(bucket: str, key: str) -> str:
    """The stream's subject for a key or key filter."""
    return f"$KV.{bucket}.{key}"


def write_subject(subject: str, api_prefix: str) -> str:
    """The subject to publish to for the stream's ``subject`` (ADR-19).

    Publishes use the same prefix as the API. The server removes it on the way to the stream, whose
    subjects never have it.
    """
    return subject if api_prefix == DEFAULT_API_PREFIX else f"{api_prefix}.{subject}"


def is_account_import(api_prefix: str) -> bool:
    """Whether an API prefix is that of an account's import: neither the default nor a domain's."""
    return not re.fullmatch(r"\$JS\.(?:[^.]+\.)?API", api_prefix)


def overlap(one: str, other: str) -> bool:
    """Whether both filters match a common subject."""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if a == ">" or b == ">":
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left) == len(right)


def covers(wide: str, narrow: str) -> bool:
    """Whether ``wide`` matches every subject that ``narrow`` matches."""
    left, right = wide.split("."), narrow.split(".")
    for a, b in zip(left, right, strict=False):
        if a == ">":
            return True
        if b == ">" or (a != "*" and a != b):
            return False
    return len(left) == len(right)


def validate_subject_filter(pattern: str) -> str:
    """Return ``pattern`` if it is a subject, or one with wildcards; InvalidNameError if not."""
    # Within a token the server takes '*' and '>' literally, which users do not intend.
    return _valid(
        pattern,
        _is_filter(pattern, lambda token: bool(token) and not set(token) & set("*> \t\r\n\f\0")),
        "is not a subject filter: tokens between dots, without spaces; a token may be '*', and the "
        "last one '>'",
    )


def validate_written_subject(subject: str) -> str:
    """Return ``subject`` if messages can be published to it; raise InvalidNameError otherwise."""
    literal = is_literal(validate_subject_filter(subject))
    return _valid(subject, literal, "is not a subject to publish to: it contains a wildcard")


def validate_stream(name: str) -> str:
    """Return ``name`` if it is a valid stream name; raise InvalidNameError otherwise."""
    if not isinstance(name, str) or not name or set(name) & set(". *>/\\\t\r\n\f\0"):
        raise InvalidNameError(
            f"{name!r} is not a stream's name: it must not contain spaces, dots, slashes or "
            f"wildcards; 'subject' looks a stream up by one of its subjects",
            settings=("subject",),
        )
    return name


def validate_filters(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the key filters if they are valid and do not overlap, as one consumer requires.

    Raises:
        InvalidNameError: a filter is invalid.
        ConfigurationError: two filters overlap; the server refuses such a consumer (10138).
    """
    return _validate_overlap(tuple(validate_filter(pattern) for pattern in patterns), "key", "keys")


def validate_subject_filters(patterns: Iterable[str]) -> tuple[str, ...]:
    """:func:`validate_filters` for subjects of any stream."""
    checked = tuple(validate_subject_filter(pattern) for pattern in patterns)
    return _validate_overlap(checked, "subject", "filter_subjects")


def _validate_overlap(checked: tuple[str, ...], kind: str, setting: str) -> tuple[str, ...]:
    # Two literals overlap only if they are equal, so thousands of them cost little.
    literals: set[str] = set()
    wild: list[str] = []
    for one in checked:
        literal = is_literal(one)
        others = wild if literal else [*wild, *literals]
        for other in [one] if one in literals else others:
            if overlap(one, other):
                raise ConfigurationError(
                    f"the {kind} filters {other!r} and {one!r} overlap: a {kind} that matches both "
                    f"would be read twice; keep only the wider one in '{setting}'",
                    settings=(setting,),
                )
        if literal:
            literals.add(one)
        else:
            wild.append(one)
    return checked


def api_prefix(prefix: str | None = None, domain: str | None = None) -> str:
    """The prefix of all API subjects: ``$JS.API``, a domain's, or an account import's (ADR-19)."""
    if prefix and domain:
        raise ConfigurationError(
            "'api_prefix' and 'domain' exclude each other", settings=("api_prefix", "domain")
        )
    chosen = prefix.rstrip(".") if prefix else f"$JS.{domain}.API" if domain else DEFAULT_API_PREFIX
    tokens = chosen.split(".")
    if any(not token or set(token) & set("*> \t\r\n") for token in tokens):
        raise ConfigurationError(
            f"invalid API prefix {chosen!r}: it must be a subject without wildcards; change "
            f"'api_prefix' or 'domain'",
            settings=("api_prefix", "domain"),
        )
    return chosen
