"""Values that a schema registry's client wrote: the schema's id as a prefix, then the body.

Confluent's serializers, and clients of other registries in the same format, write:

- ``00``, the id of the schema (4 bytes, big endian), the body;
- ``01``, the GUID of the schema (16 bytes), the body;
- for Protobuf, between prefix and body, the message's indexes in the schema: their number, then
  each index, as zigzag varints. A ``00`` byte stands for the first message of the schema, ``[0]``.

An Avro body has no mark of its own. A decoder that gets the prefix too reads it as the first fields
and returns wrong values without an error. Here a body is decoded only with the schema that its
prefix names.

The functions build expressions of Spark SQL: they run in the JVM without a Python step, over Spark
Connect too.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.extras import import_failure

try:
    from pyspark.sql import functions as sf
except ModuleNotFoundError as error:
    raise import_failure(error, "spark") from error

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["decode_by_schema", "split_prefix"]

S = TypeVar("S")

SchemaId = int | str | uuid.UUID
"""The id of a schema in its registry; a text is a GUID."""

_ID, _GUID = b"\x00", b"\x01"
_ID_BYTES, _GUID_BYTES = 4, 16
_MOST_ID = 2**32 - 1
_MOST_INDEX_BYTES = 64  # bounds the expression; a nested message has about as many bytes as levels
_VARINT_BASE = 128
_MOST_FACTOR = _VARINT_BASE**4  # of the fifth byte, the last one of a varint of 32 bits


def split_prefix(value: Column | str, *, message_indexes: bool = False) -> Column:
    """Split a value into the id of its schema and its body.

    ``rows.select("key", split_prefix("value").alias("v")).select("key", "v.*")``

    The column is a STRUCT of

    - ``schema_id BIGINT``: the id after ``00``, otherwise null;
    - ``schema_guid STRING``: the GUID after ``01``, otherwise null;
    - ``message_indexes ARRAY<BIGINT>``: only with the argument ``message_indexes``;
    - ``body BINARY``: what follows.

    All are null for a null, and for a value without a prefix: another first byte, or too few
    bytes. A value that was written without a prefix can begin as one with a prefix does; its id is
    then hardly one that the registry has.

    Args:
        value: a BINARY column.
        message_indexes: whether the indexes of a Protobuf message are part of the prefix.
    """
    column = _column(value)
    parts = _Prefix(column)
    if not message_indexes:
        return sf.struct(
            parts.schema_id.alias("schema_id"),
            parts.schema_guid.alias("schema_guid"),
            parts.rest.alias("body"),
        )
    indexes, body = _message_indexes(parts.rest)
    found = indexes.isNotNull()
    return sf.struct(
        sf.when(found, parts.schema_id).alias("schema_id"),
        sf.when(found, parts.schema_guid).alias("schema_guid"),
        indexes.alias("message_indexes"),
        body.alias("body"),
    )


def decode_by_schema(
    value: Column | str,
    schemas: Mapping[SchemaId, S] | Mapping[tuple[SchemaId, Sequence[int]], S],
    decode: Callable[[Column, S], Column],
) -> Column:
    """Decode each value with the schema that its prefix names.

    ``decode_by_schema("value", {7: old, 9: new}, lambda body, schema: from_avro(body, schema))``

    The column is null for a value whose schema is not one of ``schemas``, and for a value without a
    prefix: such a body is not decoded. ``split_prefix`` has the id of these values.

    Args:
        value: a BINARY column.
        schemas: the schema of each id (``int``) or GUID. For Protobuf the key is a tuple of the id
            and the message's indexes: ``(7, (0,))`` is the first message of schema 7.
        decode: returns the column that decodes a body; the body is null for values with another
            schema. The type of the column is the same for all schemas: for Avro, pass the reader's
            schema as the option ``avroSchema``.

    Raises:
        ConfigurationError: ``schemas`` is empty or has an id twice, a key is not an id, or only
            some keys have indexes.
    """
    keys = [_key(key) for key in schemas]
    _validate(keys)
    split = split_prefix(value, message_indexes=keys[0][1] is not None)
    decoded: Column | None = None
    for (name, indexes), schema in zip(keys, schemas.values(), strict=True):
        field = "schema_id" if isinstance(name, int) else "schema_guid"
        condition = split[field] == sf.lit(name)
        if indexes is not None:
            expected = sf.array(*(sf.lit(index) for index in indexes)).cast("array<bigint>")
            condition = condition & (split["message_indexes"] == expected)
        # Spark may evaluate a branch before its condition, and a Python function always does.
        body = decode(sf.when(condition, split["body"]), schema)
        decoded = sf.when(condition, body) if decoded is None else decoded.when(condition, body)
    assert decoded is not None
    return decoded


def _column(value: Column | str) -> Column:
    return sf.col(value) if isinstance(value, str) else value


_Key = tuple[int | str, tuple[int, ...] | None]


def _validate(keys: list[_Key]) -> None:
    if not keys:
        problem = "empty"
    elif len({indexes is None for _, indexes in keys}) != 1:
        problem = "a mix of ids and of tuples (id, message indexes)"
    elif len(set(keys)) != len(keys):
        problem = "ambiguous, it has a GUID twice"
    else:
        return
    raise ConfigurationError(
        f"could not decode by schema: schemas is {problem}; pass a mapping from each id to its "
        "schema"
    )


def _key(key: object) -> _Key:
    """The id or GUID of a key of ``schemas``, as in the columns, and its message indexes."""
    indexes = None
    name = key
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[1], Sequence):
        name, indexes = key[0], tuple(key[1])
    if isinstance(name, str):
        try:
            name = uuid.UUID(name)
        except ValueError:
            name = None
    valid_id = type(name) is int and 0 <= name <= _MOST_ID
    valid_indexes = indexes is None or (
        indexes and all(type(index) is int and index >= 0 for index in indexes)
    )
    if not valid_indexes or not (valid_id or isinstance(name, uuid.UUID)):
        raise ConfigurationError(
            f"could not decode by schema: {key!r} is not the id of a schema; pass an int from 0 to "
            f"{_MOST_ID}, a GUID, or for Protobuf a tuple (id, (index, …))"
        )
    return (name if isinstance(name, int) else str(name)), indexes


class _Prefix:
    """The parts of a value: each is null where the value does not have it."""

    def __init__(self, value: Column) -> None:
        is_id = self._begins(value, _ID, _ID_BYTES)
        is_guid = self._begins(value, _GUID, _GUID_BYTES)
        guid = sf.lower(sf.hex(sf.substring(value, 2, _GUID_BYTES)))
        groups = [(1, 8), (9, 4), (13, 4), (17, 4), (21, 12)]
        self.schema_id = sf.when(is_id, _unsigned(sf.substring(value, 2, _ID_BYTES)))
        self.schema_guid = sf.when(
            is_guid, sf.concat_ws("-", *(sf.substring(guid, *group) for group in groups))
        )
        self.rest = sf.when(is_id, _from(value, 2 + _ID_BYTES)).when(
            is_guid, _from(value, 2 + _GUID_BYTES)
        )

    @staticmethod
    def _begins(value: Column, mark: bytes, id_bytes: int) -> Column:
        return (sf.substring(value, 1, 1) == sf.lit(mark)) & (sf.length(value) > sf.lit(id_bytes))


def _unsigned(binary: Column) -> Column:
    """Up to 7 bytes, big endian, as a BIGINT."""
    return sf.conv(sf.hex(binary), 16, 10).cast("bigint")


def _from(binary: Column, position: int | Column) -> Column:
    """The bytes from a position on, which counts from 1."""
    start = sf.lit(position) if isinstance(position, int) else position
    return sf.substr(binary, start)


def _message_indexes(rest: Column) -> tuple[Column, Column]:
    """The message indexes that a binary begins with, and what follows; null if it does not."""
    first = sf.substring(rest, 1, 1)
    short = first == sf.lit(b"\x00")
    parsed = _varints(rest)
    numbers = parsed["numbers"]
    count = sf.get(numbers, sf.lit(0))
    valid = (
        (sf.length(rest) > 0)
        & (count > 0)
        & (sf.size(numbers) > count)
        & sf.forall(numbers, lambda number: number >= 0)
    )
    indexes = sf.slice(numbers, sf.lit(2), count.cast("int"))
    return (
        sf.when(short, sf.array(sf.lit(0)).cast("array<bigint>")).when(valid, indexes),
        sf.when(short, _from(rest, 2)).when(valid, _from(rest, parsed["used"] + 1)),
    )


def _varints(rest: Column) -> Column:
    """Zigzag varints up to the end of the list whose length is the first of them.

    Returns:
        STRUCT<numbers ARRAY<BIGINT>, used INT, …>: the length with the numbers, and the bytes that
        they have. A varint of more than 5 bytes ends the list with the length -1.
    """
    positions = sf.sequence(
        sf.lit(1), sf.greatest(sf.lit(1), sf.least(sf.length(rest), sf.lit(_MOST_INDEX_BYTES)))
    )
    octets = sf.transform(
        positions, lambda position: _unsigned(sf.substr(rest, position, sf.lit(1)))
    )

    def state(numbers: Column, current: Column, factor: Column, used: Column) -> Column:
        return sf.struct(
            numbers.alias("numbers"),
            current.alias("current"),
            factor.alias("factor"),
            used.alias("used"),
        )

    def step(before: Column, octet: Column) -> Column:
        numbers, current, factor = before["numbers"], before["current"], before["factor"]
        used = before["used"] + sf.lit(1)
        value = current + (octet % _VARINT_BASE) * factor
        half = sf.shiftright(value, 1)
        signed = sf.when(value % 2 == 0, half).otherwise(-half - 1)
        zero, one = _bigint(0), _bigint(1)
        complete = (sf.size(numbers) > 0) & (sf.size(numbers) > sf.get(numbers, sf.lit(0)))
        return (
            sf.when(complete, before)
            .when(octet < _VARINT_BASE, state(sf.array_append(numbers, signed), zero, one, used))
            .when(factor < _MOST_FACTOR, state(numbers, value, factor * _VARINT_BASE, used))
            .otherwise(state(sf.array(_bigint(-1)), zero, one, used))
        )

    empty = sf.array().cast("array<bigint>")
    return sf.aggregate(octets, state(empty, _bigint(0), _bigint(1), sf.lit(0)), step)


def _bigint(number: int) -> Column:
    return sf.lit(number).cast("bigint")
