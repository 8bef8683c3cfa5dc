"""Rows of a batch or of a table in Spark: their key columns, and which of them are invalid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DoubleType, FloatType, StructType

from nats_stream_source.delta.rules.changes import require_valid
from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.layout import ORDER_COLUMNS
from nats_stream_source.delta.spark.columns import quote
from nats_stream_source.wire.headers import OPERATIONS


def key_columns(columns: StructType, keys: Sequence[str]) -> list[Column]:
    """The key columns of rows, with one type and value for equal keys: 0.0 in place of -0.0.

    Args:
        columns: with the types of the keys; those of the rows can be narrower.
        keys: the names of the key columns.
    """
    found = []
    for name in keys:
        kind, column = columns[name].dataType, F.col(quote(name)).cast(columns[name].dataType)
        floating = isinstance(kind, (FloatType, DoubleType))
        found.append((column + F.lit(0.0)).cast(kind) if floating else column)
    return found


def require_valid_rows(frame: DataFrame, shape: EventShape) -> None:
    """Raise ConfigurationError for a row whose event cannot be ordered or applied.

    Args:
        frame: rows of the shape; it is read.
        shape: of the events.
    """
    invalid = invalid_rows(frame.schema, shape)
    counts = frame.agg(F.count_if(invalid)).first()
    if counts is not None and counts[0]:
        first = frame.where(invalid).limit(1).toArrow()
        require_valid(shape.events(first, ""), shape.layout, counts[0])


def invalid_rows(columns: StructType, shape: EventShape) -> Column:
    """The condition of a row with a null in its key or sequence, or an unknown operation.

    Args:
        columns: of the rows.
        shape: of their events.
    """
    layout = shape.layout
    order = ORDER_COLUMNS if shape.computed else layout.order
    found = reduce(or_, _nulls(columns, [*layout.keys, *order]))
    if layout.entries:
        found |= F.col("operation").isNull() | ~F.col("operation").isin(*OPERATIONS)
    return found


def _nulls(columns: StructType, names: Sequence[str], prefix: str = "") -> Iterator[Column]:
    for name in names:
        path = prefix + quote(name)
        yield F.col(path).isNull()
        kind = columns[name].dataType
        if isinstance(kind, StructType):
            yield from _nulls(kind, kind.names, f"{path}.")
