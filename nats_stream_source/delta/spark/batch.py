"""The events of a batch of Spark: selected columns, sequence and delete flag.

Expressions in ``sequence_by`` and ``apply_as_deletes`` see all columns of the batch. For rows of a
bucket in their own order, the event columns are computed in Arrow, see
:mod:`nats_stream_source.delta.rules.events`: as expressions of Spark they would be analysed and
compiled again for each batch. Else Spark computes them in one select.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.delta.rules.arguments import PUT, ChangeRules, is_entries
from nats_stream_source.delta.rules.events import EventBatch, event_shape
from nats_stream_source.delta.rules.layout import (
    DELETE,
    ORDER_COLUMNS,
    SEQUENCE,
    TIME,
    UNAVAILABLE,
)
from nats_stream_source.delta.schema import validate_names
from nats_stream_source.delta.spark.collect import Collector, DataFrameSource
from nats_stream_source.delta.spark.columns import arrow_schema, quote
from nats_stream_source.errors import ConfigurationError


def batch_of(frame: DataFrame, rules: ChangeRules, collector: Collector) -> EventBatch:
    """The events of a batch.

    Args:
        frame: the batch as the user gave it.
        rules: how its events change the table.
        collector: of the query's batches.

    Raises:
        ConfigurationError: the rules do not fit the batch.
    """
    columns = frame.columns
    rules.validate_columns(columns)
    validate_names(columns)
    selected, entries = rules.selected(columns), is_entries(columns)
    times = rules.scd_type == 2 and entries and "created" in columns
    parts = rules.sequence_by or ORDER_COLUMNS
    plain = rules.scd_type == 1 and all(isinstance(p, str) and p in selected for p in parts)
    order = tuple(parts) if plain else (SEQUENCE,)
    computed = (
        entries
        and rules.default_order
        and {*ORDER_COLUMNS, "operation", *(("created",) if times else ())} <= {*selected}
        and rules.unavailable_columns is None
    )
    if computed:
        # A drop is a call of the JVM, where every named column would be one.
        rows = frame.drop(*(name for name in columns if name not in selected))
    else:
        own = _event_columns(rules, columns, order, times)
        rows = _selected(frame, selected, own)
    tracks_all = rules.scd_type == 2 and not rules.track_list
    in_sequence = _in_sequence(frame, parts) if tracks_all else ()
    shape = event_shape(
        arrow_schema(rows.schema), rules, columns, order, in_sequence, computed=computed
    )
    return EventBatch(shape, DataFrameSource(rows, collector))


def _selected(frame: DataFrame, selected: Sequence[str], own: Sequence[Column]) -> DataFrame:
    try:
        return frame.select(*(F.col(quote(name)) for name in selected), *own)
    except AnalysisException as error:
        raise ConfigurationError(
            f"could not merge the batch: sequence_by or apply_as_deletes is invalid "
            f"({first_line(error)}); the columns are {', '.join(frame.columns)}"
        ) from error


def _event_columns(
    rules: ChangeRules, columns: Sequence[str], order: Sequence[str], times: bool
) -> list[Column]:
    own = []
    if SEQUENCE in order:
        own.append(_sequence_column(rules.sequence_by or ORDER_COLUMNS, columns).alias(SEQUENCE))
    deletes = rules.apply_as_deletes
    if deletes is None and is_entries(columns):
        deletes = PUT
    deleting = F.lit(False) if deletes is None else _expression(deletes, columns)
    own.append(F.coalesce(deleting, F.lit(False)).alias(DELETE))
    if times:
        own.append(F.col("created").alias(TIME))
    if rules.unavailable_columns is not None:
        own.append(F.col(quote(rules.unavailable_columns)).alias(UNAVAILABLE))
    return own


def _expression(part: str | Column, columns: Sequence[str]) -> Column:
    """A column by its name, else an SQL expression."""
    if isinstance(part, Column):
        return part
    return F.col(quote(part)) if part in columns else F.expr(part)


def _sequence_column(parts: Sequence[str | Column], columns: Sequence[str]) -> Column:
    """The sequence: a struct if it has several parts."""
    if len(parts) == 1:
        return _expression(parts[0], columns)
    named = [
        part if isinstance(part, str) and part in columns else f"_{number}"
        for number, part in enumerate(parts, start=1)
    ]
    return F.struct(
        *(_expression(part, columns).alias(name) for part, name in zip(parts, named, strict=True))
    )


def _in_sequence(batch: DataFrame, parts: Sequence[str | Column]) -> frozenset[str]:
    """The columns of a batch that are a part of its sequence as they are or cast, or in a struct.

    A column that an expression computes a part from is not one of them: a payload can have the
    sequence and the values. Of a client of Spark Connect, only names are known.
    """
    columns = batch.columns
    found = {part for part in parts if isinstance(part, str) and part in columns}
    others = [part for part in parts if not isinstance(part, str) or part not in columns]
    if others and hasattr(batch, "_jdf"):
        selected = batch.select(*(_expression(part, columns) for part in others))
        plan = selected._jdf.queryExecution().analyzed()
        # As an expression has named them; names that differ in case only are refused.
        own = {name.lower(): name for name in columns}
        found.update(own[name.lower()] for name in _attributes(plan.projectList()))
    return frozenset(found)


def _attributes(expressions: Any) -> Iterator[str]:
    """The names of the attributes that Catalyst's expressions are, or that their structs have."""
    for number in range(expressions.length()):
        one = expressions.apply(number)
        while (kind := one.getClass().getSimpleName()) in ("Alias", "Cast"):
            one = one.child()
        if kind == "AttributeReference":
            yield one.name()
        elif kind == "CreateNamedStruct":
            yield from _attributes(one.valExprs())
