"""The sequence of events: the column of ``sequence_by``, and the columns that are parts of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta.table import quote


def expression(part: str | Column, columns: Sequence[str]) -> Column:
    """A column by its name, else an SQL expression."""
    if isinstance(part, Column):
        return part
    return F.col(quote(part)) if part in columns else F.expr(part)


def sequence_column(parts: Sequence[str | Column], columns: Sequence[str]) -> Column:
    """The sequence: a struct if it has several parts."""
    if len(parts) == 1:
        return expression(parts[0], columns)
    named = [
        part if isinstance(part, str) and part in columns else f"_{number}"
        for number, part in enumerate(parts, start=1)
    ]
    return F.struct(
        *(expression(part, columns).alias(name) for part, name in zip(parts, named, strict=True))
    )


def columns_in_sequence(batch: DataFrame, parts: Sequence[str | Column]) -> frozenset[str]:
    """The columns of a batch that are a part of its sequence as they are or cast, or in a struct.

    A column that an expression computes a part from is not one of them: a payload can have the
    sequence and the values. Of a client of Spark Connect, only names are known.
    """
    columns = batch.columns
    found = {part for part in parts if isinstance(part, str) and part in columns}
    others = [part for part in parts if not isinstance(part, str) or part not in columns]
    if others and hasattr(batch, "_jdf"):
        selected = batch.select(*(expression(part, columns) for part in others))
        plan = selected._jdf.queryExecution().analyzed()
        # As an expression has named them; names that differ in case only are refused.
        own = {name.lower(): name for name in columns}
        found.update(own[name.lower()] for name in _attributes(plan.projectList()))
    return frozenset(found)


def _attributes(expressions: Any) -> Iterator[str]:
    """The names of the attributes that Catalyst's expressions are, or that their structs have."""
    for number in range(expressions.length()):
        one = expressions.apply(number)
        while one.getClass().getSimpleName() in ("Alias", "Cast"):
            one = one.child()
        kind = one.getClass().getSimpleName()
        if kind == "AttributeReference":
            yield one.name()
        elif kind == "CreateNamedStruct":
            yield from _attributes(one.valExprs())
