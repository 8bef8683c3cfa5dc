"""What of Delta Lake delta-rs does not support: table features and column types.

The lists are what was tried with deltalake 1.6.6 on tables of Delta Lake 4.4, by
``tests/integration/delta/test_table_features.py``. A feature that is not listed counts as
unsupported. Most of those delta-rs refuses itself, at its commit. Three it does not, and the table
could become wrong: it evaluates the expressions of generated columns and of constraints with its
own functions and in UTC, where Spark uses its functions and the session's time zone; and rows that
it writes with a VARIANT cannot be read.

It also writes a BINARY partition value as the text of escapes, stores a CHAR without Spark's spaces
and a VARCHAR of any length, and fails for a DOUBLE partition value whose digits are a long name.

Timestamps can become wrong without any feature, see :mod:`timestamps`.
"""

from __future__ import annotations

from deltalake import DeltaTable
from deltalake.schema import PrimitiveType
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from nats_stream_source.delta.stored_columns import declared_length, type_parts

DELETION_VECTORS = "delta.enableDeletionVectors"
"""The table property with which writers may write deletion vectors."""

_FEATURES = {
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",
    "deletionVectors",
    "generatedColumns",
    "invariants",
    "timestampNtz",
    "variantType",  # delta-rs adds it to each table with deletion vectors that it alters
}
"""Features with which a table may be marked; whether it uses some of them is looked at below."""

_EXPRESSIONS = {
    "delta.generationExpression": "generated column",
    "delta.identity.step": "identity column",
    "delta.invariants": "invariant",
}

_TYPES = (
    BinaryType,
    BooleanType,
    ByteType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    NullType,
    ShortType,
    StringType,
    TimestampNTZType,
    TimestampType,
)


def unsupported_feature(target: DeltaTable) -> str | None:
    """Why delta-rs cannot change this table; None if it can."""
    protocol, properties = target.protocol(), target.metadata().configuration
    features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
    if not features <= _FEATURES:
        unsupported = ", ".join(sorted(features - _FEATURES))
        return f"the table has features that delta-rs does not support ({unsupported})"
    if properties.get("delta.appendOnly") == "true":
        return "the table is append-only (delta.appendOnly)"
    for name in properties:
        if name.startswith("delta.constraints."):
            return f"the table has the constraint {name.removeprefix('delta.constraints.')!r}"
    for field in target.schema().fields:
        for name, kind in _EXPRESSIONS.items():
            if name in field.metadata:
                return f"the table has the {kind} {field.name!r}"
    return _partition_problem(target, "binary")


def rewriting_problem(target: DeltaTable) -> str | None:
    """Why delta-rs cannot rewrite files of a table whose log it can change; None if it can."""
    return _partition_problem(target, "double", "float")


def _partition_problem(target: DeltaTable, *kinds: str) -> str | None:
    # delta-rs writes other texts than Spark reads, or directories with names that are too long.
    types = {field.name: field.type for field in target.schema().fields}
    for name in target.metadata().partition_columns:
        kind = types[name]
        if isinstance(kind, PrimitiveType) and kind.type in kinds:
            return f"the partition column {name!r} is a {kind.type.upper()}"
    return None


def deletion_vectors_problem(target: DeltaTable) -> str | None:
    """Why :mod:`merge_on_read` cannot change a table that delta-rs can; None if it can."""
    properties = target.metadata().configuration
    if properties.get(DELETION_VECTORS) != "true":
        return f"the table does not have the property {DELETION_VECTORS}"
    if properties.get("delta.enableChangeDataFeed") == "true":
        return "the table has a change data feed (delta.enableChangeDataFeed)"
    mode = properties.get("delta.columnMapping.mode", "none")
    if mode != "none":
        return f"the table has column mapping ({mode})"
    required = [field.name for field in target.schema().fields if not field.nullable]
    return f"the column {required[0]!r} is NOT NULL" if required else None


def is_unsupported(commit_error: str) -> bool:
    """Whether delta-rs refused to commit because of the table, not because of another writer."""
    return "Unsupported table features" in commit_error or "append-only" in commit_error


def unsupported_type(schema: StructType) -> str | None:
    """Why delta-rs cannot write these columns; None if it can."""
    for field in schema.fields:
        if length := declared_length(field) or _declared(field.dataType):
            return f"column '{field.name}' has the length of {length}, which delta-rs does not keep"
        unsupported = [part for part in type_parts(field.dataType) if not _is_written(part)]
        if unsupported:
            return (
                f"column '{field.name}' has the type {unsupported[0].simpleString().upper()}, "
                f"which delta-rs does not write"
            )
    return None


def _declared(of: DataType) -> str:
    """The CHAR or VARCHAR as which a part of a type was declared; else empty."""
    structs = (part for part in type_parts(of) if isinstance(part, StructType))
    lengths = (declared_length(field) for struct in structs for field in struct.fields)
    return next(filter(None, lengths), "")


def _is_written(part: DataType) -> bool:
    if isinstance(part, StringType):
        return part == StringType()  # one with a collation is compared by other rules than bytes
    return isinstance(part, (StructType, ArrayType, MapType)) or type(part) in _TYPES
