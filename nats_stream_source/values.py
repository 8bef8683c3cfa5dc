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

import functools
import operator
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

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

_ID, _GUID, _FIRST_MESSAGE = b"\x00", b"\x01", b"\x00"
_ID_BYTES, _GUID_BYTES = 4, 16
_MOST_ID = 2**32 - 1
_MOST_INDEX_BYTES = 64  # bounds the expression; a nested message has about as many bytes as levels
_VARINT_BASE = 128
_VARINT_BYTES = 5  # of a number of 32 bits
_VARINT = rf"\G[\x80-\xff]{{0,{_VARINT_BYTES - 1}}}[\x00-\x7f]"  # \G: where the last one ended


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
    parts = _Prefix(_column(value))
    if not message_indexes:
        return sf.struct(
            parts.schema_id.alias("schema_id"),
            parts.schema_guid.alias("schema_guid"),
            parts.rest.alias("body"),
        )

    def split(message: Column) -> Column:
        found = message.isNotNull()
        return sf.struct(
            sf.when(found, parts.schema_id).alias("schema_id"),
            sf.when(found, parts.schema_guid).alias("schema_guid"),
            message["message_indexes"].alias("message_indexes"),
            message["body"].alias("body"),
        )

    return _once(_message(parts.rest), split)


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
    column = _column(value)
    decoded: Column | None = None
    for key, schema in zip(keys, schemas.values(), strict=True):
        body = _body(column, _prefixes(*key))
        found, result = body.isNotNull(), decode(body, schema)
        decoded = sf.when(found, result) if decoded is None else decoded.when(found, result)
    assert decoded is not None
    return decoded


def _column(value: Column | str) -> Column:
    return sf.col(value) if isinstance(value, str) else value


_Key = tuple[int | uuid.UUID, tuple[int, ...] | None]


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
    return cast("int | uuid.UUID", name), indexes


def _prefixes(name: int | uuid.UUID, indexes: tuple[int, ...] | None) -> list[bytes]:
    """The bytes before a body; two forms of them for the first message of a Protobuf schema."""
    if isinstance(name, uuid.UUID):
        prefix = _GUID + name.bytes
    else:
        prefix = _ID + name.to_bytes(_ID_BYTES, "big")
    if indexes is None:
        return [prefix]
    long = prefix + b"".join(_varint(number) for number in (len(indexes), *indexes))
    return [long, prefix + _FIRST_MESSAGE] if indexes == (0,) else [long]


def _body(value: Column, prefixes: list[bytes]) -> Column:
    """What follows one of the prefixes; null where the value has another one."""
    bodies = [
        sf.when(sf.startswith(value, sf.lit(prefix)), _from(value, len(prefix) + 1))
        for prefix in prefixes
    ]
    return bodies[0] if len(bodies) == 1 else sf.coalesce(*bodies)


def _varint(number: int) -> bytes:
    """A number from 0 on as a zigzag varint."""
    octets, rest = [], number * 2
    while rest >= _VARINT_BASE:
        octets.append(rest % _VARINT_BASE + _VARINT_BASE)
        rest //= _VARINT_BASE
    return bytes([*octets, rest])


class _Prefix:
    """The parts of a value: each is null where the value does not have it."""

    def __init__(self, value: Column) -> None:
        is_id = self._begins(value, _ID, _ID_BYTES)
        is_guid = self._begins(value, _GUID, _GUID_BYTES)
        guid = sf.lower(sf.hex(sf.substring(value, 2, _GUID_BYTES)))
        groups = [(1, 8), (9, 4), (13, 4), (17, 4), (21, 12)]
        octets = _characters(sf.substring(value, 2, _ID_BYTES))
        self.schema_id = sf.when(
            is_id,
            _sum(
                _octet(octets, 1 + place) * 256 ** (_ID_BYTES - 1 - place)
                for place in range(_ID_BYTES)
            ),
        )
        self.schema_guid = sf.when(
            is_guid, sf.concat_ws("-", *(sf.substring(guid, *group) for group in groups))
        )
        self.rest = sf.when(is_id, _from(value, 2 + _ID_BYTES)).when(
            is_guid, _from(value, 2 + _GUID_BYTES)
        )

    @staticmethod
    def _begins(value: Column, mark: bytes, id_bytes: int) -> Column:
        return (sf.substring(value, 1, 1) == sf.lit(mark)) & (sf.length(value) > sf.lit(id_bytes))


def _characters(binary: Column) -> Column:
    """A STRING with a character for each byte, from U+0000 to U+00FF."""
    return sf.decode(binary, "ISO-8859-1")


def _octet(characters: Column, position: int) -> Column:
    """The byte at a position, which counts from 1, as a BIGINT; 0 after the end."""
    return sf.ascii(sf.substring(characters, position, 1)).cast("bigint")


def _from(binary: Column, position: int | Column) -> Column:
    """The bytes from a position on, which counts from 1."""
    start = sf.lit(position) if isinstance(position, int) else position
    return sf.substr(binary, start)


def _once(column: Column, function: Callable[[Column], Column]) -> Column:
    """``function`` of a column that Spark evaluates once, however often the function uses it."""
    return sf.transform(sf.array(column), function)[0]


def _message(rest: Column) -> Column:
    """STRUCT<message_indexes, body> of what follows an id; null if indexes are not found."""

    def message(indexes: Column, body: Column) -> Column:
        return sf.struct(indexes.alias("message_indexes"), body.alias("body"))

    def parse(varints: Column) -> Column:
        return _once(_number(sf.get(varints, sf.lit(0))), lambda count: listed(varints, count))

    def listed(varints: Column, count: Column) -> Column:
        after = (count + 1).cast("int")
        indexes = sf.transform(sf.slice(varints, sf.lit(2), count.cast("int")), _number)
        used = sf.length(sf.array_join(sf.slice(varints, sf.lit(1), after), ""))
        body = _from(rest, used + 1)
        return sf.when(
            (count > 0) & (sf.size(varints) > count),
            _once(
                indexes,
                lambda found: sf.when(
                    sf.forall(found, lambda index: index >= 0), message(found, body)
                ),
            ),
        )

    first = sf.substring(rest, 1, 1)
    return sf.when(
        first == sf.lit(_FIRST_MESSAGE),
        message(sf.array(sf.lit(0)).cast("array<bigint>"), _from(rest, 2)),
    ).otherwise(_once(_varints(rest), parse))


def _varints(rest: Column) -> Column:
    """The varints that a binary begins with: an ARRAY<STRING> with a character for each byte."""
    characters = _characters(sf.substring(rest, 1, _MOST_INDEX_BYTES))
    return sf.regexp_extract_all(characters, sf.lit(_VARINT), 0)


def _number(varint: Column) -> Column:
    """The number of a zigzag varint."""
    number = _sum(
        _octet(varint, 1 + place) % _VARINT_BASE * _VARINT_BASE**place
        for place in range(_VARINT_BYTES)
    )
    return _once(
        number,
        lambda number: sf.when(number % 2 == 0, sf.shiftright(number, 1)).otherwise(
            -sf.shiftright(number, 1) - 1
        ),
    )


def _sum(columns: Iterable[Column]) -> Column:
    return functools.reduce(operator.add, columns)
