"""Debezium's events of a Postgres table as rows that ``merge_changes`` takes.

**Order.** The changes of one row are ordered by ``source.lsn``, the position of a change in
Postgres's log. ``ts_us``, ``txId`` and the order in the stream do not order them: a connector that
restarts publishes events again, after newer ones. The stream sequence orders the repeats of an
event. A row of a snapshot (``op`` ``"r"``) is older than every change: a transaction that was open
when the snapshot began has a smaller lsn than the snapshot.

**Unavailable values.** Postgres does not log a large value that an UPDATE left unchanged. Debezium
sends a placeholder instead, in the form of the column's type. ``_unavailable`` names these columns.

**One pass.** A message is parsed once: numbers and booleans into their types, since a JSON string
is not one, other values into their texts. A text can be a placeholder, and which texts are values
of a type is decided here. The rows are parsed below ``observe``, which Spark moves no filter
through.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from pyspark.sql import Column, DataFrame, functions as sf
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    LongType,
    MapType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from nats_stream_source.delta.spark.columns import quote
from nats_stream_source.errors import ConfigurationError

Truncate = Literal["skip", "fail"]

UNAVAILABLE_VALUE = "__debezium_unavailable_value"

CHANGE_COLUMNS = ("_operation", "_lsn", "_sequence", "_unavailable")
"""The columns that ``debezium_changes`` adds to those of the table."""

_REQUIRED_COLUMNS = ("subject", "data", "sequence")
_REASON = "_reason"
_EVENT, _KIND, _MISSING = "_debezium_event", "_debezium_kind", "_debezium_missing"
_TEXTS, _VALUES = "_debezium_texts", "_debezium_values"

_CHANGE, _SKIPPED, _TRUNCATE = "change", "skipped", "truncate"

_CORRUPT = StructField("_corrupt_record", StringType())
_JSON = {"columnNameOfCorruptRecord": _CORRUPT.name}

# Debezium's default for times is a number (of microseconds, of days), for decimals the Base64 of
# their bytes, which can consist of digits.
_DATE = r"^[+-]?\d{4,}-\d\d-\d\d"
_TIME = _DATE + r"[T ]\d\d:\d\d"
_PATTERNS: dict[type[DataType], str] = {  # of types whose texts a cast misreads
    DateType: _DATE + "$",
    TimestampNTZType: _TIME + r"(:\d\d(\.\d+)?)?$",  # a cast drops a zone
    TimestampType: _TIME,
}
_DECIMAL = r"^(?!(\d{4})+$)"
_BASE64_OR_OTHER = r"^(\d+|true)$"  # the text of a string, or of a number or boolean
_INFINITE = float("inf")


class DebeziumChanges(NamedTuple):
    """The two parts of a stream of Debezium's events.

    Attributes:
        changes: one row for each changed row.
        corrupt: the messages that are not changes of the table, with the column ``_reason``.
    """

    changes: DataFrame
    corrupt: DataFrame


def debezium_changes(
    messages: DataFrame,
    schema: StructType | str,
    *,
    keys: Sequence[str],
    truncate: Truncate = "skip",
    unavailable_value: str = UNAVAILABLE_VALUE,
) -> DebeziumChanges:
    """Turn Debezium's events of one Postgres table into changed rows.

    ``changes, corrupt = debezium_changes(messages, "id INT, name STRING", keys=["id"])``

    The payload is the JSON envelope, with or without ``schema`` and ``payload``. ``changes`` has
    the columns of ``schema``, and:

    - ``_operation STRING``: ``c`` (INSERT), ``u`` (UPDATE), ``r`` (row of a snapshot) or ``d``
      (DELETE). The row of a ``d`` has the key columns, all others are null.
    - ``_lsn BIGINT``, ``_sequence BIGINT``: the order, compared one after the other. ``_lsn`` is
      ``source.lsn``, 0 for ``r``; ``_sequence`` is the stream sequence.
    - ``_unavailable ARRAY<STRING>``: the columns whose value the event does not have and the row
      keeps; they are null in the row.

    A column that an event lacks is null. Tombstones, transaction markers, heartbeats and messages
    of ``pg_logical_emit_message`` are skipped.

    ``corrupt`` has the columns of ``messages`` and ``_reason STRING``. It has the messages that are
    not JSON or not an event, whose values are not of the declared types, whose key is null or
    absent, or that lack ``source.lsn``. ``observedMetrics`` of the query's progress has the numbers
    ``changes``, ``skipped``, ``truncates`` and ``corrupt`` as ``debezium_changes``.

    Args:
        messages: rows of ``nats_stream`` of one table, with ``subject``, ``data`` and ``sequence``.
        schema: the table's columns, as a struct or DDL. Columns that it lacks are not read.
        keys: the columns of the primary key.
        truncate: for a TRUNCATE (``op`` ``"t"``): ``"skip"`` leaves the rows, ``"fail"`` ends the
            query with an error.
        unavailable_value: the connector's ``unavailable.value.placeholder``.

    Raises:
        ConfigurationError: an argument is invalid, ``messages`` lacks a column, or ``schema`` lacks
            a key or has a column that this function adds.
    """
    columns = _struct(schema)
    _validate(messages, columns, keys, truncate)
    names = columns.names
    placeholders = _placeholders(unavailable_value)
    op = _field("op")
    parsed = {field.name: _parsed_as(field.dataType) for field in columns}
    missing = [
        sf.when(sf.col(_TEXTS)[name].isin(*placeholders), sf.lit(name))
        for name in names
        if name not in keys and isinstance(parsed[name], StringType)
    ]
    values = [
        sf.when(~sf.array_contains(sf.col(_MISSING), field.name), _value(field, keys)).alias(
            field.name
        )
        for field in columns
    ]
    rows = (
        messages.select("*", _event(parsed, keys).alias(_EVENT))
        .select("*", sf.struct(*_row(sf.col(_EVENT), names, keys)).alias(_TEXTS))
        .select("*", sf.array_compact(sf.array(*missing).cast("array<string>")).alias(_MISSING))
        .select("*", sf.struct(*values).alias(_VALUES))
        .select("*", _kind(names, keys, truncate).alias(_KIND))
    )
    observed = rows.observe(
        "debezium_changes",
        sf.count_if(_kind_is(_CHANGE)).alias("changes"),
        sf.count_if(_kind_is(_SKIPPED)).alias("skipped"),
        sf.count_if(_kind_is(_TRUNCATE)).alias("truncates"),
        sf.count_if(~_kind_is(_CHANGE, _SKIPPED, _TRUNCATE)).alias("corrupt"),
    )
    return DebeziumChanges(
        observed.filter(_kind_is(_CHANGE)).select(
            *(sf.col(_VALUES)[name].alias(name) for name in names),
            op.alias("_operation"),
            sf.when(op == "r", sf.lit(0).cast("bigint"))
            .otherwise(_field("source")["lsn"])
            .alias("_lsn"),
            sf.col("sequence").alias("_sequence"),
            sf.col(_MISSING).alias("_unavailable"),
        ),
        observed.filter(~_kind_is(_CHANGE, _SKIPPED, _TRUNCATE)).select(
            *(quote(column) for column in messages.columns), sf.col(_KIND).alias(_REASON)
        ),
    )


def _struct(schema: StructType | str) -> StructType:
    parsed = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(parsed, StructType):
        raise ConfigurationError(
            f"invalid argument: schema is {schema!r}, expected columns with their types as in "
            f"'id INT, name STRING'"
        )
    return parsed


def _validate(
    messages: DataFrame, columns: StructType, keys: Sequence[str], truncate: Truncate
) -> None:
    missing = [name for name in _REQUIRED_COLUMNS if name not in messages.columns]
    if missing:
        raise ConfigurationError(
            f"could not read Debezium's events: the DataFrame has no column '{missing[0]}'; keep "
            f"'subject', 'data' and 'sequence' as nats_stream delivers them"
        )
    problem = None
    if truncate not in get_args(Truncate):
        problem = f"truncate is {truncate!r}, expected 'skip' or 'fail'"
    elif isinstance(keys, str) or not keys:
        problem = f"keys is {keys!r}, expected a list of the primary key's columns"
    elif unknown := [key for key in keys if key not in columns.names]:
        problem = (
            f"keys has {unknown[0]!r}, expected a column of the schema ({', '.join(columns.names)})"
        )
    elif own := [name for name in CHANGE_COLUMNS if name in columns.names]:
        problem = (
            f"schema has the column '{own[0]}', which debezium_changes adds; rename the column in "
            f"Postgres, or leave it out of the schema"
        )
    if problem is not None:
        raise ConfigurationError(f"invalid argument: {problem}")


def _event(kinds: Mapping[str, DataType], keys: Sequence[str]) -> Column:
    """The envelope of a message, with values as these types; null if it is not an object."""
    fields = [StructField(name, kind) for name, kind in kinds.items()]
    envelope = [
        StructField("before", StructType([field for field in fields if field.name in keys])),
        StructField("after", StructType(fields)),
        StructField("source", StructType([StructField("lsn", LongType())])),
        StructField("op", StringType()),
        StructField("ts_ms", LongType()),
    ]
    schema = StructType([*envelope, StructField("payload", StructType(envelope)), _CORRUPT])
    return sf.from_json(sf.col("data").cast("string"), schema, _JSON)


def _field(name: str, event: Column | None = None) -> Column:
    """A field of the envelope, with or without schema."""
    event = sf.col(_EVENT) if event is None else event
    return sf.coalesce(event["payload"][name], event[name])


def _row(event: Column, names: Sequence[str], keys: Sequence[str]) -> list[Column]:
    """The values of the row that a message has; of an old row, only those of the key.

    Without REPLICA IDENTITY FULL the rest of an old row is made up.
    """
    op, old, new = (_field(name, event) for name in ("op", "before", "after"))
    return [
        sf.when(op == "d", old[name] if name in keys else None).otherwise(new[name]).alias(name)
        for name in names
    ]


def _parsed_as(kind: DataType) -> DataType:
    """The type of a value in the envelope; a number or boolean is never a placeholder."""
    return _json_type(kind) if isinstance(kind, (NumericType, BooleanType)) else StringType()


def _json_type(kind: DataType) -> DataType:
    """The type with which Spark parses a value from JSON; of a STRING it is the text."""
    if isinstance(kind, ArrayType):
        return ArrayType(_json_type(kind.elementType))
    if isinstance(kind, FloatType):  # which is infinite for a number that is too large
        return DoubleType()
    by_text = (DateType, TimestampType, TimestampNTZType, DecimalType)
    return StringType() if isinstance(kind, by_text) else kind


def _value(column: StructField, keys: Sequence[str]) -> Column:
    """The value of a column; null if what the envelope has is not of its type."""
    kind, value = column.dataType, sf.col(_TEXTS)[column.name]
    if isinstance(kind, BinaryType):
        (again,) = _row(_event({column.name: kind}, keys), [column.name], keys)
        decoded = sf.try_to_binary(value, sf.lit("base64"))
        return sf.when(value.rlike(_BASE64_OR_OTHER), again).otherwise(decoded)
    if isinstance(kind, (ArrayType, MapType, StructType)):
        schema = StructType([StructField("value", _json_type(kind)), _CORRUPT])
        parsed = sf.from_json(sf.concat(sf.lit('{"value":'), value, sf.lit("}")), schema, _JSON)
        value = sf.when(parsed[_CORRUPT.name].isNull(), parsed["value"])
    return _of_type(value, kind)


def _of_type(value: Column, kind: DataType) -> Column:
    """A value of :func:`_json_type`, or a text, as one of its type; null if it is none.

    A cast alone takes a number for a year, or a time for one of today.
    """
    if isinstance(kind, ArrayType):
        part = kind.elementType
        wrong = sf.exists(value, lambda one: one.isNotNull() & _of_type(one, part).isNull())
        return sf.when(~wrong, sf.transform(value, lambda one: _of_type(one, part)))
    if isinstance(kind, (MapType, StructType)):
        return value
    if isinstance(kind, FloatType):
        narrow = value.cast(kind)
        return sf.when((sf.abs(narrow) != _INFINITE) | (sf.abs(value) == _INFINITE), narrow)
    if isinstance(kind, (DateType, TimestampNTZType)):  # Debezium's end with "Z", too
        value = sf.regexp_replace(value, "Z$", "")
    scaled = isinstance(kind, DecimalType) and kind.scale
    pattern = _DECIMAL if scaled else _PATTERNS.get(type(kind))
    cast = value.try_cast(kind)
    return cast if pattern is None else sf.when(value.rlike(pattern), cast)


def _kind(names: Sequence[str], keys: Sequence[str], truncate: Truncate) -> Column:
    """What a message is: a change, something to skip, or else the reason why it is corrupt."""
    event, op, lsn = sf.col(_EVENT), _field("op"), _field("source")["lsn"]
    truncated: Column = sf.lit(_TRUNCATE)
    if truncate == "fail":
        truncated = sf.raise_error(
            sf.format_string(
                "could not apply the TRUNCATE of subject %s, sequence %s: truncate is 'fail'; "
                "empty the Delta table and start the query with truncate='skip'",
                sf.col("subject"),
                sf.col("sequence"),
            )
        ).cast("string")
    kind = sf.when(sf.coalesce(sf.length("data"), sf.lit(0)) == 0, _SKIPPED)
    # A rare event, so the second parse is, too.
    again = sf.struct(*_row(_event(dict.fromkeys(names, StringType()), keys), names, keys))
    kind = kind.when(
        event.isNull() | event[_CORRUPT.name].isNotNull(),
        sf.coalesce(
            _wrong(again, names), sf.lit("the payload is not a JSON object, or a row in it is not")
        ),
    )
    kind = kind.when(
        op.isNull(),
        sf.when(_field("ts_ms").isNotNull(), _SKIPPED).otherwise("the event has no 'op'"),
    )
    kind = kind.when(op == "t", truncated).when(op == "m", _SKIPPED)
    kind = kind.when(~op.isin("c", "u", "r", "d"), sf.concat(sf.lit("unknown 'op': "), op))
    kind = kind.when((op != "r") & lsn.isNull(), "the event has no source.lsn")
    wrong = _wrong(sf.col(_TEXTS), names)
    kind = kind.when(wrong.isNotNull(), wrong)
    row = sf.when(op == "d", sf.lit("before")).otherwise(sf.lit("after"))
    for key in keys:
        kind = kind.when(
            sf.col(_VALUES)[key].isNull(),
            sf.concat(sf.lit(f"the key column '{key}' is null or absent in '"), row, sf.lit("'")),
        )
    return kind.otherwise(_CHANGE)


def _wrong(given: Column, names: Sequence[str]) -> Column:
    """The reason that names the first given value that is not of its type; null for none."""
    return sf.coalesce(
        *(
            sf.when(
                ~sf.array_contains(sf.col(_MISSING), name)
                & given[name].isNotNull()
                & sf.col(_VALUES)[name].isNull(),
                sf.lit(f"the value of '{name}' is not of the declared type"),
            )
            for name in names
        )
    )


def _kind_is(*kinds: str) -> Column:
    return sf.col(_KIND).isin(*kinds)


def _placeholders(value: str) -> list[str]:
    """The JSON of an unavailable value by the column's type; strings without quotes."""
    data = value.encode()
    binary = base64.b64encode(data).decode()
    name_uuid = str(uuid.UUID(bytes=hashlib.md5(data, usedforsecurity=False).digest(), version=3))
    scalars = [value, binary, data.hex()]
    return [
        *scalars,
        *(json.dumps([scalar]) for scalar in [*scalars, name_uuid]),
        # Arrays of numbers have an element for each byte, which Java has with a sign: int[] and
        # bigint[], and with Debezium's pull request 7815 also float8[] and numeric[]. It leaves
        # boolean[] out of the event, as all versions do.
        *(
            json.dumps([kind(byte) for byte in memoryview(data).cast("b")], separators=(",", ":"))
            for kind in (int, float, str)
        ),
        json.dumps({value: value}, separators=(",", ":")),  # hstore
    ]
