"""How the keys and values of a bucket are encoded (ADR-54), with the errors of both directions.

The codecs are those of :mod:`nats_stream_source.wire.codec`. A key is encoded where a
subject or filter is made of it, and decoded where an entry is returned; in between, everything
works on the stored key. A value codec applies to values: a marker does not have one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypedDict

from nats_stream_source.errors import (
    ConfigurationError,
    InvalidNameError,
    KeyNotEncodableError,
    UndecodableError,
)
from nats_stream_source.jetstream.subjects import validate_filters, validate_key
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.codec import (
    BASE64,
    KEY_CODECS,
    PATH,
    VALUE_CODECS,
    Chain,
    decode_key,
    decode_value,
    encode_filter,
    encode_key,
    encode_value,
    parse_chain,
)

log = field_logger(__name__)


class OnUndecodable(Enum):
    """What happens to an entry whose key or value the codec cannot decode."""

    FAIL = "fail"
    SKIP = "skip"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class KvCodec:
    """The codecs of a bucket; false if keys and values are stored as they are.

    Attributes:
        key, value: the codecs in the order in which they encode.
        on_undecodable: for entries that another codec wrote, or none.
    """

    key: Chain = ()
    value: Chain = ()
    on_undecodable: OnUndecodable = OnUndecodable.FAIL

    def __post_init__(self) -> None:
        if BASE64 in self.key and PATH in self.key[self.key.index(BASE64) :]:
            _warn_of_order(self.key)

    def __bool__(self) -> bool:
        return bool(self.key or self.value)

    def raw_key(self, key: str) -> str:
        """Return the key as it is stored.

        Raises:
            InvalidNameError: ADR-8 does not allow the stored key.
            KeyNotEncodableError: the stored key would not decode to this key.
        """
        if not self.key or not isinstance(key, str):
            return validate_key(key)
        failed = f"could not encode key {key!r} with key codec {','.join(self.key)!r}: "
        try:
            raw = validate_key(encode_key(self.key, key))
        except (InvalidNameError, UnicodeEncodeError) as error:
            raise InvalidNameError(f"{failed}{error}") from None
        if decode_key(self.key, raw) != key:
            raise KeyNotEncodableError(failed + self.problem(key))
        return raw

    def problem(self, key: str) -> str:
        """Describe why the key codec cannot encode a key, and what to do."""
        raw = encode_key(self.key, key)
        found = decode_key(self.key, raw)
        if found is None:
            action = f"use {PATH!r} before {BASE64!r}, or only one of them"
            return f"it would be stored as {raw!r}, which does not decode; {action}"
        return f"it would be stored as {raw!r}, which is key {found!r}; use that key"

    def raw_filters(self, filters: Iterable[str]) -> tuple[str, ...]:
        """Return key filters as the server matches them with stored keys.

        Raises:
            InvalidNameError: a filter is invalid, or has a wildcard that is not a whole token.
            ConfigurationError: two filters overlap.
        """
        return validate_filters(self._raw_filter(one) for one in filters)

    def _raw_filter(self, pattern: str) -> str:
        if not self.key or not isinstance(pattern, str):
            return pattern
        failed = f"could not encode key filter {pattern!r} with key codec {','.join(self.key)!r}: "
        try:
            raw = encode_filter(self.key, pattern)
            validate_filters([raw])
        except (ValueError, InvalidNameError) as error:
            raise InvalidNameError(
                f"{failed}{error}; use wildcards as whole tokens, and filter the result"
            ) from None
        return raw

    def raw_value(self, value: bytes) -> bytes:
        """Return the value as it is stored."""
        return encode_value(self.value, value)

    def decoded_key(self, raw: str) -> str | None:
        """Return the key of a stored one; None if it is not decodable."""
        return decode_key(self.key, raw)

    def decoded_value(self, raw: bytes) -> bytes | None:
        """Return the value of a stored one; None if it is not decodable."""
        return decode_value(self.value, raw)

    def undecodable(self, bucket: str, raw_key: str, revision: int) -> UndecodableError:
        """Return the error for an entry that the codecs cannot decode."""
        part, chain, setting = "key", self.key, "key_codec"
        if self.decoded_key(raw_key) is not None:
            part, chain, setting = "value", self.value, "value_codec"
        return UndecodableError(
            f"could not decode the {part} of entry {raw_key!r} of bucket {bucket!r}, revision "
            f"{revision}: it is not what {','.join(chain)!r} encodes; change {setting}, or "
            f"on_undecodable to skip such entries",
            settings=(setting, "on_undecodable"),
        )


NO_CODEC = KvCodec()
"""Keys and values as they are stored."""


class Codecs(TypedDict, total=False):
    """The arguments of :func:`kv_codec`."""

    key_codec: str | None
    value_codec: str | None
    on_undecodable: str


def kv_codec(
    key_codec: str | None = None, value_codec: str | None = None, on_undecodable: str = "fail"
) -> KvCodec:
    """Parse the arguments of Python functions; ConfigurationError if one is invalid."""

    def chain(setting: str, text: str | None, names: Chain) -> Chain:
        if text is None:
            return ()
        try:
            return parse_chain(text, names)
        except ValueError as error:
            raise ConfigurationError(
                f"invalid argument: {setting} is {text!r}, which {error}", settings=(setting,)
            ) from None

    if on_undecodable not in ("fail", "skip"):
        raise ConfigurationError(
            f"invalid argument: on_undecodable is {on_undecodable!r}, expected 'fail' or 'skip'",
            settings=("on_undecodable",),
        )
    return KvCodec(
        chain("key_codec", key_codec, KEY_CODECS),
        chain("value_codec", value_codec, VALUE_CODECS),
        OnUndecodable(on_undecodable),
    )


class SkippedEntries:
    """Counts the entries that a read skips, for one warning."""

    def __init__(self) -> None:
        self._count = 0
        self._first: tuple[str, str, int] | None = None

    def add(self, bucket: str, raw_key: str, revision: int, count: int = 1) -> None:
        """Count entries, of which the arguments describe the first one."""
        self._count += count
        self._first = self._first or (bucket, raw_key, revision)

    def report(self) -> None:
        """Log the number of entries, if there are some, and count from 0 again."""
        if self._first:
            bucket, raw_key, revision = self._first
            log.warning(
                "undecodable entries were skipped",
                bucket=bucket,
                count=self._count,
                raw_key=raw_key,
                revision=revision,
            )
        self._count, self._first = 0, None


@functools.cache
def _warn_of_order(chain: Chain) -> None:
    log.warning("base64 before path: keys of several tokens do not decode", codec=",".join(chain))
