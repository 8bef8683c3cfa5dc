"""Codecs of keys and values (ADR-54), as orbit.go's ``kvcodec`` v0.1.2 has them.

ADR-54 is a proposal, and its text differs from the code; the code counts. A *chain* is the names of
codecs in the order in which they encode; decoding runs from the last one to the first.

``base64`` encodes each token of a key on its own: URL alphabet, no padding, dots stay. A value is
one token. ``path`` writes a path as tokens: ``/a/b`` as ``_root_.a.b``, ``a/b`` as ``a.b``, ``/``
as ``_root_``; one trailing slash is dropped. It does not change values.

A stored key is decodable if it is exactly the encoding of the key that it decodes to. So two stored
keys never decode to one key. (``kvcodec`` also decodes other forms, and returns a key that it
cannot decode as it is.) A value is decodable if ``kvcodec`` decodes it: bits that the last
character has to spare, and line ends within the text, do not matter.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

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
