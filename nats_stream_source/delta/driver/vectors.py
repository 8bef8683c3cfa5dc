"""Deletion vectors: the removed rows of a data file (Delta protocol, "Deletion Vector Format").

A vector is the magic number, little endian, and a 64-bit Roaring bitmap of row positions in the
portable format. A file of vectors is a version byte, then for each vector its size (4 bytes, big
endian), the vector, and the vector's CRC-32 (big endian). The log names a vector by a descriptor::

    {"storageType": "u", "pathOrInlineDv": Z85 of the file's UUID, "offset": of the size field,
     "sizeInBytes": of the vector, "cardinality": removed rows}

``storageType`` "i" has the vector itself in Z85, and "p" an absolute path: the tables of shallow
clones have those, and Spark changes these tables. Pure: bytes in, bitmaps out.
"""

from __future__ import annotations

import base64
import posixpath
import struct
import uuid
import zlib
from collections.abc import Mapping
from typing import Any

from pyroaring import BitMap64

from nats_stream_source.delta.tables import EngineRefusedError

_MAGIC = struct.pack("<I", 1681511377)
_VERSION = b"\x01"
_UUID_LENGTH = 20  # characters of 16 bytes in Z85

_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_TO_Z85, _FROM_Z85 = bytes.maketrans(_B85, _Z85), bytes.maketrans(_Z85, _B85)

Descriptor = Mapping[str, Any]


class VectorError(Exception):
    """A deletion vector is damaged, or of a kind that this module does not read."""


class VectorFile:
    """Builds the file with the vectors of one commit."""

    def __init__(self) -> None:
        self._id = uuid.uuid4()
        self._encoded_id = _encode(self._id.bytes)
        self._parts = bytearray(_VERSION)

    @property
    def name(self) -> str:
        """The file's path within the table."""
        return _file_name("", self._id)

    def add(self, rows: BitMap64) -> dict[str, Any]:
        """Append the vector of these rows; its descriptor."""
        vector = _MAGIC + rows.serialize()
        offset = len(self._parts)
        self._parts += struct.pack(">I", len(vector)) + vector
        self._parts += struct.pack(">I", zlib.crc32(vector))
        return {
            "storageType": "u",
            "pathOrInlineDv": self._encoded_id,
            "offset": offset,
            "sizeInBytes": len(vector),
            "cardinality": len(rows),
        }

    def content(self) -> bytes:
        """The file's bytes; empty if it does not have a vector."""
        return bytes(self._parts) if len(self._parts) > len(_VERSION) else b""


def vector_path(descriptor: Descriptor) -> str | None:
    """The path within the table of the file with a vector; None if the descriptor contains it.

    Raises:
        EngineRefusedError: the file can lie outside of the table.
    """
    kind, text = descriptor["storageType"], descriptor["pathOrInlineDv"]
    if kind == "i":
        return None
    if kind != "u":
        raise EngineRefusedError(f"a deletion vector is outside of the table ({text})")
    prefix, name = text[:-_UUID_LENGTH], text[-_UUID_LENGTH:]
    return _file_name(prefix, uuid.UUID(bytes=_decode(name)))


def vector_file_name(descriptor: Descriptor) -> str | None:
    """The name of the file with a vector, in whatever directory; None if there is none."""
    if descriptor["storageType"] == "p":
        return posixpath.basename(str(descriptor["pathOrInlineDv"]))
    path = vector_path(descriptor)
    return None if path is None else posixpath.basename(path)


def vector_rows(descriptor: Descriptor, content: bytes, rows: int) -> BitMap64:
    """The removed rows.

    Args:
        content: of the file that :func:`vector_path` names; ignored for an inline vector.
        rows: the number of rows of the data file.

    Raises:
        VectorError: the vector is damaged, or names a row that the file does not have.
    """
    size = descriptor["sizeInBytes"]
    if descriptor["storageType"] == "i":
        vector = _decode(descriptor["pathOrInlineDv"])[:size]
        intact = len(vector) == size
    else:
        start = descriptor["offset"] + 4
        vector, check = content[start : start + size], content[start + size : start + size + 4]
        intact = (
            content[start - 4 : start] == struct.pack(">I", size)
            and len(vector) == size
            and check == struct.pack(">I", zlib.crc32(vector))
        )
    if not intact or vector[:4] != _MAGIC:
        raise VectorError("the deletion vector is damaged (its size, magic number or CRC-32)")
    try:
        removed = BitMap64.deserialize(vector[4:])
    except ValueError as error:
        raise VectorError(f"the deletion vector is damaged ({error})") from error
    if len(removed) != descriptor["cardinality"]:
        raise VectorError(
            f"the deletion vector is damaged: it has {len(removed)} rows, expected "
            f"{descriptor['cardinality']}"
        )
    if removed and removed.max() >= rows:
        raise VectorError(
            f"the deletion vector names row {removed.max()}, and the data file has {rows} rows"
        )
    return removed


def is_vector_path(path: str) -> bool:
    """Whether an object's path is one that :func:`vector_path` returns."""
    name = path.rpartition("/")[2]
    return name.startswith("deletion_vector_") and name.endswith(".bin")


def _file_name(prefix: str, name: uuid.UUID) -> str:
    return f"{prefix}/deletion_vector_{name}.bin" if prefix else f"deletion_vector_{name}.bin"


def _encode(data: bytes) -> str:
    return base64.b85encode(data).translate(_TO_Z85).decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b85decode(text.encode().translate(_FROM_Z85))
    except ValueError as error:
        raise VectorError(f"{text!r} is not Z85") from error
