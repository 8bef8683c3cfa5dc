"""The events of a batch: selected columns, sequence and delete flag, by one select of Spark.

Expressions in ``sequence_by`` and ``apply_as_deletes`` see all columns of the batch. An event has
the selected columns and these:

- ``__SEQUENCE``: the sequence, unless the table has it in selected columns
- ``__DELETE``: whether the event deletes its key; a condition that is null does not
- ``__TIME``: with versions of a bucket's entries, the time of the entry
- ``__UNAVAILABLE``: the columns whose value the row keeps, if the rules name a column of them
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructField, StructType

from nats_stream_source.delta.cdc.columns import conformed
from nats_stream_source.delta.cdc.entry_events import (
    PUT,
    entry_columns,
    event_columns,
    event_fields,
    with_event_columns,
)
from nats_stream_source.delta.cdc.layout import (
    DELETE,
    EVENT_COLUMNS,
    SEQUENCE,
    TIME,
    UNAVAILABLE,
    Layout,
)
from nats_stream_source.delta.cdc.merge_events import invalid_event_error
from nats_stream_source.delta.cdc.rules import (
    ChangeRules,
    columns_in_sequence,
    expression,
    sequence_column,
)
from nats_stream_source.delta.conflicts import first_line
from nats_stream_source.delta.newest import ORDER_COLUMNS
from nats_stream_source.delta.table import (
    DELIVERY_COLUMNS,
    REQUIRED_COLUMNS,
    key_columns,
    quote,
)
from nats_stream_source.errors import ConfigurationError

_ENTRY = (*REQUIRED_COLUMNS, "created", *DELIVERY_COLUMNS)


@dataclass(frozen=True, slots=True)
class Events:
    """The events of a batch, and how they change a table.

    Attributes:
        rows: with the columns of an event, see the module; without the event columns if they are
            ``entries``.
        layout: of the table that they are merged into.
        tracked: with SCD type 2, the columns whose changes make a version; None for deletes that
            close the open rows, see :mod:`nats_stream_source.delta.reconcile`.
        untracked: the columns that do not; None if the rules name those that do.
        entries: whether the event columns are those of :mod:`entry_events`.
    """

    rows: DataFrame
    layout: Layout
    tracked: tuple[str, ...] | None
    untracked: frozenset[str] | None = None
    entries: bool = False

    @property
    def frame(self) -> DataFrame:
        """The events with all their columns."""
        if not self.entries:
            return self.rows
        return self.rows.select("*", *event_columns(self.layout.times))

    @property
    def schema(self) -> StructType:
        """The columns of an event."""
        schema = self.rows.schema
        if not self.entries:
            return schema
        return StructType([*schema.fields, *event_fields(schema, self.layout.times)])

    def with_event_columns(self, rows: pa.Table) -> pa.Table:
        """The events with all their columns, of ``rows`` that were collected."""
        return with_event_columns(rows, self.layout.times) if self.entries else rows

    @property
    def columns(self) -> list[StructField]:
        """The columns of the table for these events."""
        return self.layout.table_schema(self.schema).fields

    def conformed(self, schema: StructType, state: StructType | None) -> Events:
        """The events with the columns of a table, in their order and with their types.

        With SCD type 2, an event has a null for each column of an earlier batch that its batch
        lacks: its version is computed from it again and again, and must not depend on its batch.

        Args:
            schema: of the table.
            state: of its state table, which has the columns of earlier batches; None if the table
                is new.
        """
        layout = self.layout
        names = [f.name for f in schema.fields if f.name not in layout.reserved()]
        earlier = set(state.names) if state is not None and layout.scd_type == 2 else set()
        added = [n for n in names if n in earlier and n not in self.rows.schema.names]
        given = self.rows.schema
        own = [given[name] for name in EVENT_COLUMNS if name in given.names]
        fields = [schema[name] for name in names if name in given.names or name in added]
        frame = conformed(self.rows, StructType([*fields, *own]), added)
        tracked, untracked = self.tracked, self.untracked
        if tracked is not None:
            known = [name for name in tracked if name in frame.columns]
            more = [n for n in added if untracked is not None and n not in untracked]
            tracked = (*known, *more)
        return Events(frame, layout, tracked, untracked, self.entries)


def is_entries(columns: list[str]) -> bool:
    """Whether these are the columns of a bucket's entries."""
    return all(column in columns for column in REQUIRED_COLUMNS)


def keeps_newest_entries(rules: ChangeRules, columns: list[str]) -> bool:
    """Whether the rules are those of a bucket's newest entries, one row per key.

    The engines have a shorter way for these: a stream's order cannot be late.
    """
    return (
        rules.scd_type == 1
        and _is_default(rules.apply_as_deletes, PUT)
        and (
            rules.keys is None or list(rules.keys) == key_columns(selected_columns(rules, columns))
        )
        and _is_default(rules.sequence_by, ORDER_COLUMNS)
        and rules.unavailable_columns is None
    )


def entry_order(rules: ChangeRules, columns: list[str]) -> list[str]:
    """The columns of a bucket's entries by which the rules order and apply events."""
    if not is_entries(columns):
        return []
    order = ORDER_COLUMNS if _is_default(rules.sequence_by, ORDER_COLUMNS) else ()
    return [*order, *(("operation",) if _is_default(rules.apply_as_deletes, PUT) else ())]


def validate_columns(rules: ChangeRules, columns: list[str]) -> None:
    """Raise ConfigurationError if the rules do not fit a batch with these columns.

    A call for entries without keys and sequence is checked where these are merged.
    """
    for argument, names in (
        ("keys", rules.keys),
        ("column_list", rules.column_list),
        ("except_column_list", rules.except_column_list),
        ("track_history_column_list", rules.track_list),
        ("track_history_except_column_list", rules.track_except_list),
        ("unavailable_columns", _optional(rules.unavailable_columns)),
    ):
        for name in names or ():
            _require_column(argument, name, columns)
    entries = is_entries(columns)
    if not entries and not keeps_newest_entries(rules, columns):
        for argument, given in (("keys", rules.keys), ("sequence_by", rules.sequence_by)):
            if given is None:
                raise ConfigurationError(
                    f"could not merge the batch: {argument} is missing, and only rows of nats_kv "
                    f"have a default; pass {argument}"
                )
    selected = selected_columns(rules, columns)
    for name in rules.keys or (key_columns(selected) if entries else ()):
        if name not in selected:
            raise ConfigurationError(
                f"could not merge the batch: the key {name!r} is not a selected column; keep it in "
                f"the selection"
            )
    for argument, names in (
        ("track_history_column_list", rules.track_list),
        ("track_history_except_column_list", rules.track_except_list),
    ):
        for name in names or ():
            if name not in selected:
                raise ConfigurationError(
                    f"could not merge the batch: {argument} has {name!r}, which is not a selected "
                    f"column; select it, or remove it from the list"
                )


def selected_columns(rules: ChangeRules, columns: list[str]) -> list[str]:
    """The columns of a batch that the rules select, in the order of the batch."""
    delivery = DELIVERY_COLUMNS if is_entries(columns) else ()
    excluded = {*(rules.except_column_list or ()), *delivery, rules.unavailable_columns}
    return [
        name
        for name in columns
        if name not in excluded and (rules.column_list is None or name in rules.column_list)
    ]


def events_of(batch: DataFrame, rules: ChangeRules) -> Events:
    """The events of a batch.

    Raises:
        ConfigurationError: the rules do not fit the batch.
    """
    columns = batch.columns
    validate_columns(rules, columns)
    entries = is_entries(columns)
    selected = selected_columns(rules, columns)
    keys = rules.keys or tuple(key_columns(selected))
    parts = rules.sequence_by or ORDER_COLUMNS
    plain = [part for part in parts if isinstance(part, str) and part in selected]
    order: tuple[str, ...] = (SEQUENCE,)
    if rules.scd_type == 1 and len(plain) == len(parts):
        order = tuple(plain)
    deletes = rules.apply_as_deletes
    if deletes is None and entries:
        deletes = PUT
    times = rules.scd_type == 2 and entries and "created" in columns
    from_entries = (
        order == (SEQUENCE,)
        and _is_default(rules.sequence_by, ORDER_COLUMNS)
        and _is_default(rules.apply_as_deletes, PUT)
        and {*entry_columns(times)} <= {*selected}
        and rules.unavailable_columns is None
    )
    own = [] if from_entries else _event_columns(rules, order, parts, deletes, times, columns)
    try:
        # A star and a drop are a call of the JVM each, where every named column would be several.
        dropped = [name for name in columns if name not in selected]
        if {name.upper() for name in dropped}.isdisjoint(EVENT_COLUMNS):
            rows = (batch.select("*", *own) if own else batch).drop(*dropped)
        else:
            rows = batch.select(*(F.col(quote(name)) for name in selected), *own)
        fields = rows.schema.fields
    except AnalysisException as error:
        raise ConfigurationError(
            f"could not merge the batch: sequence_by or apply_as_deletes is invalid "
            f"({first_line(error)}); the columns are {', '.join(columns)}"
        ) from error
    if from_entries:
        fields = [*fields, *event_fields(rows.schema, times)]
    schema = StructType(fields)
    kinds = [schema[name].dataType for name in order]
    layout = Layout(
        scd_type=rules.scd_type,
        keys=keys,
        sequence=", ".join(kind.simpleString() for kind in kinds),
        order=order,
        deletes=rules.deletes,
        times=times,
    )
    layout.validate_events(schema, selected)
    if rules.scd_type == 1 or rules.track_list:
        return Events(rows, layout, rules.track_list or (), None, from_entries)
    # Each entry has its own of these columns, so that each put would be a version.
    untracked = {*keys, *columns_in_sequence(batch, parts), *(_ENTRY if entries else ())}
    untracked.update(rules.track_except_list or ())
    tracked = tuple(name for name in selected if name not in untracked)
    return Events(rows, layout, tracked, frozenset(untracked), from_entries)


def require_valid_frame(frame: DataFrame, layout: Layout) -> None:
    """Raise ConfigurationError for an event with a null in its key or sequence.

    Args:
        frame: events with all their columns, which are read.
        layout: of the table.
    """
    names = [*layout.keys, *layout.order]
    invalid = frame.where(reduce(or_, _nulls(frame.schema, names)))
    first = invalid.limit(1).toArrow()
    if len(first):
        raise invalid_event_error(first, invalid.count(), layout)


def _nulls(schema: StructType, names: Sequence[str], prefix: str = "") -> Iterator[Column]:
    for name in names:
        path = prefix + quote(name)
        yield F.col(path).isNull()
        kind = schema[name].dataType
        if isinstance(kind, StructType):
            yield from _nulls(kind, kind.names, f"{path}.")


def _event_columns(
    rules: ChangeRules,
    order: tuple[str, ...],
    parts: tuple[str | Column, ...],
    deletes: str | Column | None,
    times: bool,
    columns: list[str],
) -> list[Column]:
    own = [F.lit(False).alias(DELETE)]
    if deletes is not None:
        own = [F.coalesce(expression(deletes, columns), F.lit(False)).alias(DELETE)]
    if order == (SEQUENCE,):
        own.insert(0, sequence_column(parts, columns).alias(SEQUENCE))
    if times:
        own.append(F.col("created").alias(TIME))
    if rules.unavailable_columns is not None:
        own.append(F.col(quote(rules.unavailable_columns)).alias(UNAVAILABLE))
    return own


def _is_default(given: object, default: object) -> bool:
    """Whether an argument is missing or the default of entries; a Column cannot be compared."""
    parts = given if isinstance(given, tuple) else (given,)
    columns = any(isinstance(part, Column) for part in parts)
    return given is None or (not columns and given == default)


def _optional(name: str | None) -> tuple[str, ...]:
    return () if name is None else (name,)


def _require_column(argument: str, name: str, columns: list[str]) -> None:
    if name in columns:
        return
    near = difflib.get_close_matches(name, columns, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"the columns are {', '.join(columns)}"
    raise ConfigurationError(
        f"could not merge the batch: {argument} has {name!r}, which is not a column of it; {hint}"
    )
