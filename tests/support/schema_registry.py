"""Values as the clients of a schema registry write them, and the parts that they consist of.

Confluent's format: ``00`` and an id or ``01`` and a GUID; for Protobuf the message's indexes.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.values import split_prefix

GUID = uuid.UUID("89791762-2336-4186-9674-299b90a802e2")

Split = tuple[int | None, str | None, bytes | None]
ProtobufSplit = tuple[int | None, str | None, list[int] | None, bytes | None]

_NOTHING = (None, None, None)
_NO_MESSAGE = (None, None, None, None)


def by_id(schema_id: int, body: bytes) -> bytes:
    """A value whose prefix has the id of its schema."""
    return b"\x00" + schema_id.to_bytes(4, "big") + body


def by_guid(body: bytes) -> bytes:
    """A value whose prefix has the GUID of its schema."""
    return b"\x01" + GUID.bytes + body


def varint(number: int) -> bytes:
    """A number as Avro and the message indexes have it: a zigzag varint."""
    rest = (number << 1) ^ (number >> 63)
    octets = []
    while rest > 127:
        octets.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*octets, rest])


def indexed(indexes: Sequence[int], body: bytes) -> bytes:
    """A Protobuf body behind its message indexes, in their long form."""
    return b"".join(map(varint, [len(indexes), *indexes])) + body


SPLITS: list[tuple[bytes | None, Split]] = [
    (by_id(7, b"abc"), (7, None, b"abc")),
    (by_id(7, b""), (7, None, b"")),
    (by_id(2**32 - 1, b"\x00"), (2**32 - 1, None, b"\x00")),
    (by_guid(b"xy"), (None, str(GUID), b"xy")),
    (by_guid(b""), (None, str(GUID), b"")),
    (None, _NOTHING),
    (b"", _NOTHING),
    (b"\x00\x00\x00\x07", _NOTHING),
    (by_guid(b"")[:-1], _NOTHING),
    (b"\x02" + b"x" * 20, _NOTHING),
    (b'{"plate": "M-1"}', _NOTHING),
]
"""Values, and their schema id, GUID and body."""

PROTOBUF_SPLITS: list[tuple[bytes | None, ProtobufSplit]] = [
    (by_id(7, b"\x00abc"), (7, None, [0], b"abc")),
    (by_id(7, b"\x00"), (7, None, [0], b"")),
    (by_id(7, indexed([0], b"abc")), (7, None, [0], b"abc")),
    (by_id(7, indexed([1, 300], b"abc")), (7, None, [1, 300], b"abc")),
    (by_id(7, indexed([2**31 - 1], b"")), (7, None, [2**31 - 1], b"")),
    (by_guid(indexed([3], b"xy")), (None, str(GUID), [3], b"xy")),
    (by_id(7, b""), _NO_MESSAGE),
    (by_id(7, indexed([1, 2], b"")[:-1]), _NO_MESSAGE),
    (by_id(7, b"\x80"), _NO_MESSAGE),
    (by_id(7, b"\xff" * 100), _NO_MESSAGE),
    (by_id(7, varint(-1) + b"abc"), _NO_MESSAGE),
    (by_id(7, indexed([-1], b"abc")), _NO_MESSAGE),
    (by_id(7, indexed(range(90), b"abc")), _NO_MESSAGE),
    (by_id(7, varint(2**31) + b"abc"), _NO_MESSAGE),
    (b"\x02" + b"x" * 20, _NO_MESSAGE),
    (None, _NO_MESSAGE),
]
"""Protobuf values, and their schema id, GUID, message indexes and body."""


def values_frame(spark: SparkSession, values: Sequence[bytes | None]) -> DataFrame:
    """Rows ``row INT, value BINARY``."""
    return spark.createDataFrame(list(enumerate(values)), "row INT, value BINARY")


def splits_of(
    spark: SparkSession, values: Sequence[bytes | None], *, message_indexes: bool = False
) -> list[tuple[object, ...]]:
    """What ``split_prefix`` returns for these values."""
    split = split_prefix("value", message_indexes=message_indexes)
    frame = values_frame(spark, values).select("row", split.alias("v")).select("row", "v.*")
    return [
        tuple(bytes(part) if isinstance(part, bytearray) else part for part in row[1:])
        for row in frame.orderBy("row").collect()
    ]
