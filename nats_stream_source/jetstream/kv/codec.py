"""How the keys and values of a bucket are encoded (ADR-54), with the errors of both directions.

The codecs are those of orbit.go's ``kvcodec`` v0.1.2. ADR-54 is a proposal, and its text differs
from the code; the code counts. A *chain* is the names of codecs in the order in which they encode;
decoding runs from the last one to the first. A key is encoded where a subject or filter is made of
it, and decoded where an entry is returned; in between, everything works on the stored key. A value
codec applies to values: a marker does not have one.

``base64`` encodes each token of a key on its own: URL alphabet, no padding, dots stay. A value is
one token. ``path`` writes a path as tokens: ``/a/b`` as ``_root_.a.b``, ``a/b`` as ``a.b``, ``/``
as ``_root_``; one trailing slash is dropped. It does not change values.

A stored key is decodable if it is exactly the encoding of the key that it decodes to. So two stored
keys never decode to one key. (``kvcodec`` also decodes other forms, and returns a key that it
cannot decode as it is.) A value is decodable if ``kvcodec`` decodes it: bits that the last
character has to spare, and line ends within the text, do not matter.
"""

from __future__ import annotations

import functools
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias, TypedDict, TypeVar

from nats_stream_source.errors import (
    ConfigurationError,
    InvalidNameError,
    KeyNotEncodableError,
    UndecodableError,
)
from nats_stream_source.jetstream.subjects import validate_filters, validate_key
from nats_stream_source.logs import field_logger

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T", str, bytes)
Chain: TypeAlias = tuple[str, ...]
"""Names of codecs in the order in which they encode; empty for keys or values as they are."""

BASE64, PATH = "base64", "path"
KEY_CODECS: Chain = (BASE64, PATH)
VALUE_CODECS: Chain = (BASE64,)

ROOT = "_root_"
_LINE_ENDS = b"\r\n"
_IN_VALUES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_" + _LINE_ENDS
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), bytes.maketrans(b"-_", b"+/")
_WILDCARDS = ("*", ">")

log = field_logger(__name__)


def parse_chain(text: str, names: Chain) -> Chain:
    """Parse ``path,base64``.

    Raises:
        ValueError: the chain is empty, or has a codec that is not in ``names``, or ``path`` twice;
            the text is a verb phrase.
    """
    chain = tuple(name.strip().lower() for name in text.split(","))
    if not set(chain) <= set(names):
        raise ValueError(f"is not a codec, or several in their order, of {', '.join(names)}")
    if chain.count(PATH) > 1:
        raise ValueError(f"has {PATH} twice")
    return chain


def encode_key(chain: Chain, key: str) -> str:
    """Return the key as it is stored."""
    for codec in chain:
        key = _ENCODERS[codec](key)
    return key


def decode_key(chain: Chain, raw: str) -> str | None:
    """Return the key of a stored one; None if it is not the encoding of a key."""
    for codec in reversed(chain):
        try:
            key = _DECODERS[codec](raw)
        except ValueError:
            return None
        if _ENCODERS[codec](key) != raw:
            return None
        raw = key
    return raw


def encode_filter(chain: Chain, pattern: str) -> str:
    """Return a key filter as the server matches it with stored keys.

    Raises:
        ValueError: a wildcard is not a whole token, where the codec needs whole tokens.
    """
    for codec in chain:
        if codec == PATH:
            pattern = _encode_path(pattern)
            continue
        tokens = pattern.split(".")
        if any(token not in _WILDCARDS and {*token} & {*_WILDCARDS} for token in tokens):
            raise ValueError("a wildcard is not a whole token")
        pattern = ".".join(t if t in _WILDCARDS else _encode_tokens(t) for t in tokens)
    return pattern


def encode_value(chain: Chain, value: bytes) -> bytes:
    """Return the value as it is stored."""
    for _ in chain:
        value = _encode(value).translate(_TO_URL)
    return value


def decode_value(chain: Chain, value: bytes) -> bytes | None:
    """Return the value of a stored one; None if it is not the encoding of a value."""
    for _ in chain:
        text = value.translate(_FROM_URL, _LINE_ENDS)
        if len(text) % 4 == 1 or value.translate(None, _IN_VALUES):
            return None
        value = _decode(text)
    return value


def each(function: Callable[[Chain, T], T | None], chain: Chain, column: pa.Array) -> pa.Array:
    """Encode or decode each key or value of a column; null for null and for None."""
    # Not at the top: options are read in processes without Arrow.
    import pyarrow as pa

    values = (None if value is None else function(chain, value) for value in column.to_pylist())
    return pa.array(values, column.type, size=len(column))


def _encode(data: bytes) -> bytes:
    return b2a_base64(data, newline=False).rstrip(b"=")


def _decode(text: bytes) -> bytes:
    return a2b_base64(text + b"=" * (-len(text) % 4))


# The alphabet is translated once for all tokens: the functions of ``base64`` take three times as
# long for a key.
def _encode_tokens(key: str) -> str:
    return b".".join(map(_encode, key.encode().split(b"."))).translate(_TO_URL).decode()


def _decode_tokens(raw: str) -> str:
    return b".".join(map(_decode, raw.encode().translate(_FROM_URL).split(b"."))).decode()


def _encode_path(key: str) -> str:
    if key == "/":
        return ROOT
    key = key.removesuffix("/")
    if key.startswith("/"):
        key = ROOT + key
    return key.replace("/", ".")


def _decode_path(raw: str) -> str:
    if raw == ROOT or raw.startswith(f"{ROOT}."):
        raw = raw.removeprefix(ROOT) or "/"
    return raw.replace(".", "/")


_ENCODERS: dict[str, Callable[[str], str]] = {BASE64: _encode_tokens, PATH: _encode_path}


_DECODERS: dict[str, Callable[[str], str]] = {BASE64: _decode_tokens, PATH: _decode_path}


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
    """Parse the arguments of Python functions.

    Raises:
        ConfigurationError: a codec is unknown, or ``on_undecodable`` is not ``fail`` or ``skip``.
    """

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
