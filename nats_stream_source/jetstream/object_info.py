"""What an object store keeps of an object beside its bytes: its meta message, and its digest. Pure.

An object's bytes are messages on a chunk subject with a random last token; the meta message, sent
after them, names that token, their number, their size and their SHA-256. It is a JSON object on the
object's own subject, which holds one message only (it rolls up). So an object exists from one
moment on, and an old one stays whole until the new one is there.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nats_stream_source.errors import BadObjectInfoError, ObjectDamagedError
from nats_stream_source.jetstream.api import StoredMessage
from nats_stream_source.jetstream.times import nanoseconds

CHUNK_SIZE = 128 * 1024

_DIGEST = "SHA-256="


def store_stream(bucket: str) -> str:
    """The name of the store's stream."""
    return f"OBJ_{bucket}"


def chunk_subject(bucket: str, nuid: str) -> str:
    """The subject of one object's chunks; ``>`` for all objects'."""
    return f"$O.{bucket}.C.{nuid}"


def meta_subject(bucket: str, name: str) -> str:
    """The subject of an object's meta message. Names are not restricted, so they are encoded."""
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def all_meta(bucket: str) -> str:
    """The subject of all meta messages."""
    return f"$O.{bucket}.M.>"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as its meta message has it.

    Attributes:
        bucket, name: where it is.
        nuid: the last token of its chunks' subject.
        size: bytes. ``chunks``: messages.
        digest: ``SHA-256=`` and the Base64 of it; empty for links and for what was deleted.
        sequence: of the meta message, the highest of the object: read with this as
            ``min_last_seq`` to see what was written (ADR-53, "Object Store").
        modified_ns: when the stream stored the meta message, nanoseconds since 1970, UTC; 0 as
            :meth:`ObjectStore.put` returns it, which the server does not tell.
        deleted: only the fact that it was there is left.
        description, headers, metadata: the user's own.
        link: the bucket and the name of what it is a link to; no name for a whole bucket.
        chunk_size: bytes of each chunk but the last.
    """

    bucket: str
    name: str
    nuid: str = ""
    size: int = 0
    chunks: int = 0
    digest: str = ""
    sequence: int = 0
    modified_ns: int = 0
    deleted: bool = False
    description: str = ""
    headers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    link: tuple[str, str] | None = None
    chunk_size: int | None = None

    def encoded(self) -> bytes:
        """The meta message's payload. Its time and sequence are the server's."""
        options: dict[str, Any] = {}
        if self.link is not None:
            bucket, name = self.link
            options["link"] = {"bucket": bucket, "name": name} if name else {"bucket": bucket}
        if self.chunk_size is not None:
            options["max_chunk_size"] = self.chunk_size
        fields: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "headers": {name: list(values) for name, values in self.headers.items()},
            "metadata": dict(self.metadata),
            "options": options,
        }
        fields = {name: value for name, value in fields.items() if value or name == "name"}
        fields |= {"bucket": self.bucket, "nuid": self.nuid, "size": self.size}
        fields |= {"chunks": self.chunks, "digest": self.digest, "deleted": self.deleted}
        return json.dumps(fields).encode()

    @classmethod
    def parse(cls, data: bytes, sequence: int, modified_ns: int) -> ObjectInfo:
        """From a meta message's payload.

        Raises:
            BadObjectInfoError: it is not what a client of an object store writes.
        """
        try:
            raw = json.loads(data)
            options = raw.get("options") or {}
            link = options.get("link")
            return cls(
                bucket=_text(raw["bucket"]),
                name=_text(raw["name"]),
                nuid=_token(raw.get("nuid")),
                size=_count(raw.get("size")),
                chunks=_count(raw.get("chunks")),
                digest=_text(raw.get("digest")),
                sequence=sequence,
                modified_ns=modified_ns,
                deleted=bool(raw.get("deleted")),
                description=_text(raw.get("description")),
                headers={
                    name: [value] if isinstance(value, str) else list(value)
                    for name, value in (raw.get("headers") or {}).items()
                },
                metadata=dict(raw.get("metadata") or {}),
                link=(_text(link["bucket"]), _text(link.get("name"))) if link else None,
                chunk_size=_count(options.get("max_chunk_size")) or None,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadObjectInfoError(
                f"the meta message at sequence {sequence} is none of an object store: {error!r}"
            ) from None

    @classmethod
    def of(cls, message: StoredMessage) -> ObjectInfo:
        """From the stored meta message."""
        return cls.parse(message.data, message.seq, nanoseconds(message.time))


def _text(value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value or ""


def _token(value: object) -> str:
    # What the chunks are purged and read by: a wildcard here would be all objects' chunks.
    if {".", "*", ">", " "} & set(text := _text(value)):
        raise TypeError(f"{text!r} is no subject token")
    return text


def _count(value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


class Digest:
    """Number, size and SHA-256 of chunks, as they are written or read."""

    def __init__(self) -> None:
        self.chunks = 0
        self.size = 0
        self._sha = hashlib.sha256()

    def __repr__(self) -> str:
        return f"<Digest of {self.size} bytes in {self.chunks} chunks>"

    def add(self, chunk: bytes) -> None:
        """Take the next chunk."""
        self.chunks += 1
        self.size += len(chunk)
        self._sha.update(chunk)

    @property
    def text(self) -> str:
        """``SHA-256=`` and the URL-safe Base64 of the digest."""
        return _DIGEST + base64.urlsafe_b64encode(self._sha.digest()).decode()

    def check(self, info: ObjectInfo) -> None:
        """Compare with what the meta message says.

        Raises:
            ObjectDamagedError: number, size or digest differ.
            BadObjectInfoError: the digest is none that object stores have.
        """
        what = f"object {info.name!r} of the store {info.bucket!r}"
        if (self.chunks, self.size) != (info.chunks, info.size):
            raise ObjectDamagedError(
                f"{what}: the stream has {self.size} bytes in {self.chunks} chunks, written were "
                f"{info.size} in {info.chunks}: chunks were deleted, or aged out"
            )
        algorithm, encoded = info.digest[: len(_DIGEST)], info.digest[len(_DIGEST) :]
        try:
            # Some write it without padding.
            told = base64.urlsafe_b64decode(
                encoded.rstrip("=") + "=" * (-len(encoded.rstrip("=")) % 4)
            )
        except (binascii.Error, ValueError):
            told = b""
        if algorithm.upper() != _DIGEST or len(told) != self._sha.digest_size:
            raise BadObjectInfoError(f"{what}: {info.digest!r} is no SHA-256 digest")
        if told != self._sha.digest():
            raise ObjectDamagedError(f"{what}: its bytes do not have the digest {info.digest}")
