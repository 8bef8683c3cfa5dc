"""Debezium's events of a Postgres table as rows that ``merge_changes`` takes.

**Order.** The changes of one row are ordered by ``source.lsn``, the position of a change in
Postgres's log. ``ts_us``, ``txId`` and the order in the stream do not order them: a connector that
restarts publishes events again, after newer ones. The stream sequence orders the repeats of an
event. A row of a snapshot (``op`` ``"r"``) is older than every change: a transaction that was open
when the snapshot began has a smaller lsn than the snapshot.

**Unavailable values.** Postgres does not log a large value that an UPDATE left unchanged. Debezium
sends a placeholder instead, in the form of the column's type. ``_unavailable`` names these columns.

**One pass.** The rows are parsed below ``observe``, which Spark moves no filter through, so that
each message is parsed once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import uuid
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DecimalType,
    FloatType,
    LongType,
    MapType,
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
_TEXTS = "_debezium_texts"
_CORRUPT_RECORD = "_corrupt_record"

_CHANGE, _SKIPPED, _TRUNCATE = "change", "skipped", "truncate"

# Debezium's ISO strings of DATE and TIMESTAMP WITHOUT TIME ZONE end with "Z".
_FORMATS = {
    "dateFormat": "yyyy-MM-dd[XXX]",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]['Z']",
}


# Debezium's default for times is a number (of microseconds, of days), for decimals the Base64 of
# their bytes, which can consist of digits.
_TIME = r"^[+-]?\d{4,}-\d\d-\d\d[T ]\d\d:\d\d"
_DATE = r"^[+-]?\d{4,}-\d\d-\d\d"
_DECIMAL = r"^(?!(\d{4})+$)"
_FINITE = r"(?i)inf"  # of an infinite FLOAT: other numbers are too large
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
    text = sf.col("data").cast("string")
    placeholders = _placeholders(unavailable_value)
    # A placeholder is not a value of a DECIMAL. As a whole value it follows a colon; inside of
    # another string its quotes are escaped.
    values = sf.regexp_replace(text, rf':\s*"{re.escape(unavailable_value)}"', ":null")
    events = messages.select(
        "*",
        _event(values, columns, keys).alias(_EVENT),
        _unavailable(text, columns, keys, placeholders).alias(_MISSING),
        _texts(values, columns).alias(_TEXTS),
    )
    kinds = events.select("*", _kind(columns, keys, truncate).alias(_KIND))
    observed = kinds.observe(
        "debezium_changes",
        sf.count_if(_kind_is(_CHANGE)).alias("changes"),
        sf.count_if(_kind_is(_SKIPPED)).alias("skipped"),
        sf.count_if(_kind_is(_TRUNCATE)).alias("truncates"),
        sf.count_if(~_kind_is(_CHANGE, _SKIPPED, _TRUNCATE)).alias("corrupt"),
    )
    return DebeziumChanges(
        observed.filter(_kind_is(_CHANGE)).select(*_changed_row(columns, keys)),
        observed.filter(~_kind_is(_CHANGE, _SKIPPED, _TRUNCATE)).select(
            *(quote(column) for column in messages.columns),
            sf.col(_KIND).alias(_REASON),
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
    for column in _REQUIRED_COLUMNS:
        if column not in messages.columns:
            raise ConfigurationError(
                f"could not read Debezium's events: the DataFrame has no column '{column}'; keep "
                f"'subject', 'data' and 'sequence' as nats_stream delivers them"
            )
    if truncate not in get_args(Truncate):
        raise ConfigurationError(
            f"invalid argument: truncate is {truncate!r}, expected 'skip' or 'fail'"
        )
    if isinstance(keys, str) or not keys:
        raise ConfigurationError(
            f"invalid argument: keys is {keys!r}, expected a list of the primary key's columns"
        )
    for key in keys:
        if key not in columns.names:
            raise ConfigurationError(
                f"invalid argument: keys has {key!r}, expected a column of the schema "
                f"({', '.join(columns.names)})"
            )
    for column in CHANGE_COLUMNS:
        if column in columns.names:
            raise ConfigurationError(
                f"invalid argument: schema has the column '{column}', which debezium_changes "
                f"adds; rename the column in Postgres, or leave it out of the schema"
            )


def _event(text: Column, columns: StructType, keys: Sequence[str]) -> Column:
    """The envelope of a message; null if the message is not an object."""
    envelope = [
        # Of an old row only the key is used: without REPLICA IDENTITY FULL the rest is made up.
        StructField("before", _nullable(columns, keys)),
        StructField("after", _nullable(columns, columns.names)),
        StructField("source", StructType([StructField("lsn", LongType())])),
        StructField("op", StringType()),
        StructField("ts_ms", LongType()),
    ]
    schema = StructType(
        [
            *envelope,
            StructField("payload", StructType(envelope)),
            StructField(_CORRUPT_RECORD, StringType()),
        ]
    )
    return sf.from_json(text, schema, {"columnNameOfCorruptRecord": _CORRUPT_RECORD, **_FORMATS})


def _nullable(columns: StructType, names: Sequence[str]) -> StructType:
    return StructType([StructField(name, columns[name].dataType, True) for name in names])


def _field(name: str) -> Column:
    """A field of the envelope, with or without schema."""
    event = sf.col(_EVENT)
    return sf.coalesce(event["payload"][name], event[name])


def _texts(text: Column, columns: StructType) -> Column:
    """The values of the new and of the old row as texts; null if no type is checked."""
    texts = [StructField(row, MapType(StringType(), StringType())) for row in ("before", "after")]
    if not any(_pattern(field.dataType) for field in columns.fields):
        return sf.lit(None).cast(StructType(texts))
    parsed = sf.from_json(text, StructType([*texts, StructField("payload", StructType(texts))]))
    return sf.struct(
        *(sf.coalesce(parsed["payload"][f.name], parsed[f.name]).alias(f.name) for f in texts)
    )


def _pattern(kind: DataType) -> str | None:
    """What the text of a value is like; None for a type whose values Spark does not misread."""
    if isinstance(kind, ArrayType):
        return _pattern(kind.elementType)
    if isinstance(kind, (TimestampType, TimestampNTZType)):
        return _TIME  # Spark reads a number as seconds, and a time as one of today
    if isinstance(kind, DateType):
        return _DATE
    if isinstance(kind, DecimalType) and kind.scale:
        return _DECIMAL
    return _FINITE if isinstance(kind, FloatType) else None


def _misread(columns: StructType, keys: Sequence[str]) -> Column:
    """The name of a column whose text Spark reads as another value; null if there is none."""
    found: list[Column] = []
    for field in columns.fields:
        pattern = _pattern(field.dataType)
        if pattern is None:
            continue
        rows = ["after", *(["before"] if field.name in keys else [])]
        for row in rows:
            text = sf.try_element_at(sf.col(_TEXTS)[row], sf.lit(field.name))
            wrong = _unlike(text, pattern, in_array=isinstance(field.dataType, ArrayType))
            used = (_field("op") == "d") if row == "before" else (_field("op") != "d")
            known = ~sf.array_contains(sf.col(_MISSING), field.name)
            found.append(sf.when(used & known & wrong, sf.lit(field.name)))
    return sf.coalesce(*found) if found else sf.lit(None).cast("string")


def _unlike(text: Column, pattern: str, *, in_array: bool) -> Column:
    def unlike(value: Column) -> Column:
        other = ~value.rlike(pattern)
        return other & (sf.abs(value.try_cast("float")) == _INFINITE) if finite else other

    finite = pattern == _FINITE
    return sf.exists(sf.from_json(text, "array<string>"), unlike) if in_array else unlike(text)


def _kind(columns: StructType, keys: Sequence[str], truncate: Truncate) -> Column:
    """What a message is: a change, something to skip, or else the reason why it is corrupt."""
    event, op = sf.col(_EVENT), _field("op")
    row = sf.when(op == "d", sf.lit("before")).otherwise(sf.lit("after"))
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
    kind = kind.when(
        event.isNull() | event[_CORRUPT_RECORD].isNotNull(),
        "the payload is not a JSON object, or a value is not of the declared type",
    )
    kind = kind.when(
        op.isNull(),
        sf.when(_field("ts_ms").isNotNull(), _SKIPPED).otherwise("the event has no 'op'"),
    )
    kind = kind.when(op == "t", truncated).when(op == "m", _SKIPPED)
    kind = kind.when(~op.isin("c", "u", "r", "d"), sf.concat(sf.lit("unknown 'op': "), op))
    kind = kind.when((op != "r") & _field("source")["lsn"].isNull(), "the event has no source.lsn")
    misread = _misread(columns, keys)
    kind = kind.when(
        misread.isNotNull(),
        sf.concat(sf.lit("the value of '"), misread, sf.lit("' is not of the declared type")),
    )
    for key in keys:
        kind = kind.when(
            _value(key).isNull(),
            sf.concat(sf.lit(f"the key column '{key}' is null or absent in '"), row, sf.lit("'")),
        )
    return kind.otherwise(_CHANGE)


def _kind_is(*kinds: str) -> Column:
    return sf.col(_KIND).isin(*kinds)


def _value(key: str) -> Column:
    """The value of a key column, in the new row or else in the deleted one."""
    return sf.when(_field("op") == "d", _field("before")[key]).otherwise(_field("after")[key])


def _changed_row(columns: StructType, keys: Sequence[str]) -> list[Column]:
    row = []
    for name in columns.names:
        if name in keys:
            value = _value(name)
        else:
            value = sf.when(
                (_field("op") != "d") & ~sf.array_contains(sf.col(_MISSING), name),
                _field("after")[name],
            )
        row.append(value.alias(name))
    return [
        *row,
        _field("op").alias("_operation"),
        sf.when(_field("op") == "r", sf.lit(0).cast("bigint"))
        .otherwise(_field("source")["lsn"])
        .alias("_lsn"),
        sf.col("sequence").alias("_sequence"),
        sf.col(_MISSING).alias("_unavailable"),
    ]


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


def _unavailable(
    text: Column, columns: StructType, keys: Sequence[str], placeholders: Sequence[str]
) -> Column:
    """The names of the columns whose value in the new row is a placeholder."""
    raw = StructType([StructField("after", MapType(StringType(), StringType()))])
    parsed = sf.from_json(text, StructType([*raw.fields, StructField("payload", raw)]))
    after = sf.coalesce(parsed["payload"]["after"], parsed["after"])
    names = sf.array(*(sf.lit(name) for name in columns.names if name not in keys)).cast(
        "array<string>"
    )
    found = sf.filter(names, lambda name: sf.try_element_at(after, name).isin(*placeholders))
    # A rare event, so the second parse is, too. Quotes of nested values are escaped or not.
    marks = "|".join(re.escape(mark.strip('[]{}"')) for mark in placeholders if ":" not in mark)
    nothing = sf.array().cast("array<string>")
    return sf.when(text.rlike(marks), sf.coalesce(found, nothing)).otherwise(nothing)
