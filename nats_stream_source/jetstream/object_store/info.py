"""Meta message and digest of an object in an object store. Pure.

An object's bytes are messages on a chunk subject with a random last token. The meta message is sent
after them. It contains that token and the number, size and SHA-256 digest of the chunks. It is a
JSON object on the object's own subject, which keeps one message only (roll-up). So an object is
created atomically, and the old object stays complete until the new one exists.
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
    """The subject of one object's chunks; ``>`` for the chunks of all objects."""
    return f"$O.{bucket}.C.{nuid}"


def meta_subject(bucket: str, name: str) -> str:
    """The subject of an object's meta message. The name is encoded because any name is valid."""
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def all_meta_subject(bucket: str) -> str:
    """The subject of all meta messages."""
    return f"$O.{bucket}.M.>"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Meta data of an object, as in its meta message.

    Attributes:
        bucket, name: the store and the object's name.
        nuid: the last token of the subject of its chunks.
        size: bytes. ``chunks``: number of messages.
        digest: ``SHA-256=`` and the digest in Base64; empty for links and deleted objects.
        sequence: of the meta message, the highest of the object. Pass it as ``min_last_seq`` to
            read what was written (ADR-53, "Object Store").
        modified_ns: time at which the stream stored the meta message, nanoseconds since 1970, UTC;
            0 in the result of :meth:`ObjectStore.put`, because a PubAck does not contain it.
        deleted: the object was deleted; only its meta message exists.
        description, headers, metadata: set by the user.
        link: bucket and name of the target of a link; the name is empty for a whole bucket.
        chunk_size: bytes of each chunk except the last.
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
        """The payload of the meta message. Its time and sequence are set by the server."""
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
        """Parse the payload of a meta message.

        Raises:
            BadObjectInfoError: the payload is not a valid meta message.
        """
        try:
            raw = json.loads(data)
            options = raw.get("options") or {}
            link = options.get("link")
            return cls(
                bucket=_string(raw["bucket"]),
                name=_string(raw["name"]),
                nuid=_subject_token(raw.get("nuid")),
                size=_count(raw.get("size")),
                chunks=_count(raw.get("chunks")),
                digest=_string(raw.get("digest")),
                sequence=sequence,
                modified_ns=modified_ns,
                deleted=bool(raw.get("deleted")),
                description=_string(raw.get("description")),
                headers={
                    name: [value] if isinstance(value, str) else list(value)
                    for name, value in (raw.get("headers") or {}).items()
                },
                metadata=dict(raw.get("metadata") or {}),
                link=(_string(link["bucket"]), _string(link.get("name"))) if link else None,
                chunk_size=_count(options.get("max_chunk_size")) or None,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadObjectInfoError(
                f"could not parse the object meta message at sequence {sequence}: {error!r}; write "
                f"the object again"
            ) from None

    @classmethod
    def of(cls, message: StoredMessage) -> ObjectInfo:
        """Create from the stored meta message."""
        return cls.parse(message.data, message.seq, nanoseconds(message.time))


def _string(value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value or ""


def _subject_token(value: object) -> str:
    # Chunks are purged and read by this token: a wildcard would select the chunks of all objects.
    if {".", "*", ">", " "} & set(text := _string(value)):
        raise TypeError(f"{text!r} is not a subject token")
    return text


def _count(value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a non-negative integer")
    return value


class Digest:
    """Number, size and SHA-256 of the chunks that were written or read."""

    def __init__(self) -> None:
        self.chunks = 0
        self.size = 0
        self._sha256 = hashlib.sha256()

    def add(self, chunk: bytes) -> None:
        """Add the next chunk."""
        self.chunks += 1
        self.size += len(chunk)
        self._sha256.update(chunk)

    @property
    def text(self) -> str:
        """``SHA-256=`` and the digest in URL-safe Base64."""
        return _DIGEST + base64.urlsafe_b64encode(self._sha256.digest()).decode()

    def verify(self, info: ObjectInfo) -> None:
        """Compare with the meta message.

        Raises:
            ObjectDamagedError: number, size or digest differ.
            BadObjectInfoError: the meta message's digest is not a SHA-256 digest.
        """
        label = f"object {info.name!r} of store {info.bucket!r}"
        if (self.chunks, self.size) != (info.chunks, info.size):
            raise ObjectDamagedError(
                f"could not read {label}: observed {self.size} bytes in {self.chunks} chunks, "
                f"expected {info.size} in {info.chunks}, chunks were deleted or aged out; write "
                f"the object again"
            )
        algorithm, encoded = info.digest[: len(_DIGEST)], info.digest[len(_DIGEST) :]
        try:
            # Some clients omit the padding.
            expected = base64.urlsafe_b64decode(
                encoded.rstrip("=") + "=" * (-len(encoded.rstrip("=")) % 4)
            )
        except (binascii.Error, ValueError):
            expected = b""
        if algorithm.upper() != _DIGEST or len(expected) != self._sha256.digest_size:
            raise BadObjectInfoError(
                f"could not verify {label}: {info.digest!r} is not a SHA-256 digest; write the "
                f"object again"
            )
        if expected != self._sha256.digest():
            raise ObjectDamagedError(
                f"could not read {label}: its bytes do not have the digest {info.digest}; write "
                f"the object again"
            )
