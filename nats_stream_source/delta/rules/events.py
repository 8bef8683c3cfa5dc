"""The rules of change data as the caller gives them, and the events that they make of a batch.

The words are those of Spark's AUTO CDC. :class:`ChangeRules` checks what can be checked without a
batch, and resolves the names of its columns. Events are the batch's rows with the columns by which
the rule orders and applies them:

- ``__SEQUENCE``: the sequence, unless the row has it in columns of its own
- ``__DELETE``: whether the event deletes its key; a condition that is null does not
- ``__TIME``: with versions of a bucket's entries, the time of the entry
- ``__UNAVAILABLE``: the columns whose value the row keeps, if the rules name a column of them
- ``__REPLACES``: for ``reconcile``, the order of the one row that the event may change

Where these follow from a bucket's entries, they are computed here; else the rows have them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.rules.layout import (
    DELETE,
    DELETED_COLUMN,
    DELIVERY_COLUMNS,
    EVENT_COLUMNS,
    ORDER_COLUMNS,
    REQUIRED_COLUMNS,
    SEQUENCE,
    TIME,
    Deletes,
    Layout,
    entry_keys,
    validate_deletes,
)
from nats_stream_source.delta.schema import conform, sql_type, stored_field
from nats_stream_source.errors import ConfigurationError

ScdType = Literal[1, 2]
Expression: TypeAlias = Any
"""A column name or an SQL expression as text, or a Column of Spark."""

PUT = "operation <> 'PUT'"
"""The condition of an entry that deletes its key."""


_CONTRADICTIONS = (
    ("column_list", "except_column_list", "pass one of them"),
    ("track_history_column_list", "track_history_except_column_list", "pass one of them"),
    *(
        (name, "stored_as_scd_type=1", f"pass stored_as_scd_type=2, or remove {name}")
        for name in ("track_history_column_list", "track_history_except_column_list")
    ),
    ("deletes='mark'", "stored_as_scd_type=2", "remove deletes='mark': a delete ends the row"),
    (
        "unavailable_columns",
        "stored_as_scd_type=2",
        "pass stored_as_scd_type=1, or have the source send all values (REPLICA IDENTITY FULL in "
        "Postgres): a version does not keep values of another one",
    ),
)
"""Arguments that exclude each other, and what to do."""


@dataclass(frozen=True)
class ChangeRules:
    """How the events of a batch change a table; None for a default.

    The attributes are arguments of :class:`nats_stream_source.delta.spark.merge.MergeArguments`.
    """

    deletes: Deletes = "remove"
    keys: tuple[str, ...] | None = None
    sequence_by: tuple[Expression, ...] | None = None
    apply_as_deletes: Expression | None = None
    column_list: tuple[str, ...] | None = None
    except_column_list: tuple[str, ...] | None = None
    stored_as_scd_type: ScdType = 1
    track_history_column_list: tuple[str, ...] | None = None
    track_history_except_column_list: tuple[str, ...] | None = None
    unavailable_columns: str | None = None

    @staticmethod
    def of(**arguments: Any) -> ChangeRules:
        """The rules of the arguments of :func:`nats_stream_source.delta.merge`.

        Raises:
            ConfigurationError: an argument is invalid, or two contradict each other.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        validate_deletes(given.get("deletes", "remove"))
        # Spark's AUTO CDC also takes the type as a text.
        scd_type = given.get("stored_as_scd_type", 1)
        if isinstance(scd_type, bool) or str(scd_type) not in ("1", "2"):
            raise ConfigurationError(
                f"invalid argument: stored_as_scd_type is {scd_type!r}, expected 1 or 2"
            )
        given["stored_as_scd_type"] = int(scd_type)
        values = {f"{name}={given.get(name)!r}" for name in ("deletes", "stored_as_scd_type")}
        for one, other, action in _CONTRADICTIONS:
            if {one, other} <= {*given, *values}:
                raise ConfigurationError(f"invalid arguments: {one} with {other}; {action}")
        if isinstance(given.get("keys"), str):
            given["keys"] = [given["keys"]]
        for name, value in given.items():
            if name == "keys" or name.endswith("_list"):
                given[name] = _names(name, value)
        if "sequence_by" in given:
            given["sequence_by"] = _sequence(given["sequence_by"])
        for name, expected, valid in (
            ("apply_as_deletes", "an SQL condition or a Column", _is_expression),
            ("unavailable_columns", "the name of a column", lambda value: isinstance(value, str)),
        ):
            if name in given and not valid(given[name]):
                raise ConfigurationError(
                    f"invalid argument: {name} is {given[name]!r}, expected {expected}"
                )
        return ChangeRules(**given)

    def of_entries(self, columns: Sequence[str]) -> bool:
        """Whether the rules are those of a bucket's newest entries, one row per key."""
        return (
            self.stored_as_scd_type == 1
            and _is_default(self.apply_as_deletes, PUT)
            and (self.keys is None or self.keys == entry_keys(self.selected(columns)))
            and self.default_order
            and self.unavailable_columns is None
        )

    @property
    def default_order(self) -> bool:
        """Whether events are ordered and deleted as a bucket's entries are."""
        order = _is_default(self.sequence_by, ORDER_COLUMNS)
        return order and _is_default(self.apply_as_deletes, PUT)

    def order(self, columns: Sequence[str]) -> tuple[str, ...]:
        """The columns of an event with its sequence: the batch's own, or one for the table."""
        parts, selected = self.sequence_by or ORDER_COLUMNS, self.selected(columns)
        plain = all(isinstance(part, str) and part in selected for part in parts)
        return tuple(parts) if plain and self.stored_as_scd_type == 1 else (SEQUENCE,)

    def has_times(self, columns: Sequence[str]) -> bool:
        """Whether versions have the times of their entries."""
        return self.stored_as_scd_type == 2 and is_entries(columns) and "created" in columns

    def selected(self, columns: Sequence[str]) -> list[str]:
        """The columns of a batch that the rules select, in the order of the batch."""
        delivery = DELIVERY_COLUMNS if is_entries(columns) else ()
        excluded = {*(self.except_column_list or ()), *delivery, self.unavailable_columns}
        return [
            name
            for name in columns
            if name not in excluded and (self.column_list is None or name in self.column_list)
        ]

    def validate_columns(self, columns: Sequence[str]) -> None:
        """Raise ConfigurationError if the rules do not fit a batch with these columns."""
        lists = (
            ("keys", self.keys),
            ("column_list", self.column_list),
            ("except_column_list", self.except_column_list),
            ("track_history_column_list", self.track_history_column_list),
            ("track_history_except_column_list", self.track_history_except_column_list),
            ("unavailable_columns", self.unavailable_columns and (self.unavailable_columns,)),
        )
        for argument, names in lists:
            for name in names or ():
                if name in columns:
                    continue
                near = difflib.get_close_matches(name, columns, 1)
                known = f"the columns are {', '.join(columns)}"
                raise ConfigurationError(
                    f"could not merge the batch: {argument} has {name!r}, which is not a column of "
                    f"it; {f'did you mean {near[0]!r}?' if near else known}"
                )
        selected = self.selected(columns)
        if self.of_entries(columns):
            self._validate_entries(selected)
        elif not is_entries(columns):
            for argument, given in (("keys", self.keys), ("sequence_by", self.sequence_by)):
                if given is None:
                    raise ConfigurationError(
                        f"could not merge the batch: {argument} is missing, and only rows of "
                        f"nats_kv have a default; pass {argument}"
                    )
        for name in self.keys or entry_keys(selected):
            if name not in selected:
                raise ConfigurationError(
                    f"could not merge the batch: the key {name!r} is not a selected column; keep "
                    f"it in the selection"
                )
        for argument, names in lists[3:5]:
            for name in names or ():
                if name not in selected:
                    raise ConfigurationError(
                        f"could not merge the batch: {argument} has {name!r}, which is not a "
                        f"selected column; select it, or remove it from the list"
                    )

    def _validate_entries(self, selected: Sequence[str]) -> None:
        missing = [name for name in REQUIRED_COLUMNS if name not in selected]
        if missing:
            required = ", ".join(f"'{name}'" for name in REQUIRED_COLUMNS)
            raise ConfigurationError(
                f"could not merge the batch: it has no column '{missing[0]}'; keep {required} as "
                f"the source delivers them"
            )
        own = next((name for name in selected if name.lower() == DELETED_COLUMN), None)
        if self.deletes == "mark" and own is not None:
            raise ConfigurationError(
                f"could not merge the batch: it has its own column '{own}', which deletes='mark' "
                f"writes; rename the column"
            )


def is_entries(columns: Sequence[str]) -> bool:
    """Whether these are the columns of a bucket's entries."""
    return all(column in columns for column in REQUIRED_COLUMNS)


def _is_default(given: object, default: object) -> bool:
    """Whether an argument is missing or the default of entries; a Column cannot be compared."""
    parts = given if isinstance(given, tuple) else (given,)
    texts = all(part is None or isinstance(part, str) for part in parts)
    return given is None or (texts and given == default)


def _names(argument: str, given: Iterable[str]) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    if isinstance(given, str) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"invalid argument: {argument} is {given!r}, expected a list of column names"
        )
    if not names and argument in ("keys", "column_list"):
        raise ConfigurationError(
            f"invalid argument: {argument} is empty, expected column names, or None"
        )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigurationError(
            f"invalid argument: {argument} has {repeated[0]!r} twice; name each column once"
        )
    return names


def _sequence(given: object) -> tuple[Expression, ...]:
    parts = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not parts or not all(map(_is_expression, parts)):
        raise ConfigurationError(
            f"invalid argument: sequence_by is {given!r}, expected a column name, an SQL "
            f"expression, a Column, or a list of these"
        )
    return parts


def _is_expression(part: object) -> bool:
    """Whether this is a text, or a Column of Spark, which this module does not import."""
    return bool(part.strip()) if isinstance(part, str) else type(part).__name__ == "Column"


_ENTRY_COLUMNS = (*REQUIRED_COLUMNS, "created", *DELIVERY_COLUMNS)


@dataclass(frozen=True, slots=True)
class EventShape:
    """The columns of a batch's rows, and how its events change a table.

    Attributes:
        rows: the columns of the rows as they are given.
        tracked: with SCD type 2, the columns whose changes make a version.
        untracked: the columns that do not; None if the rules name those that do.
        computed: whether the event columns are computed from those of a bucket's entries.
        target: the columns of an event with the types of a table; None before the table is known.
    """

    rows: pa.Schema
    layout: Layout
    tracked: tuple[str, ...] = ()
    untracked: frozenset[str] | None = None
    computed: bool = False
    target: pa.Schema | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns of an event."""
        if not self.computed:
            return self.rows
        own = [pa.field(DELETE, pa.bool_())]
        if SEQUENCE in self.layout.order:
            parts = [stored_field(self.rows.field(name)) for name in ORDER_COLUMNS]
            own.append(pa.field(SEQUENCE, pa.struct(parts)))
        if self.layout.times:
            own.append(stored_field(self.rows.field("created")).with_name(TIME))
        return pa.schema([*self.rows, *own])

    def fitted(self, table: pa.Schema, state: pa.Schema | None) -> EventShape:
        """The shape of the events with the columns and types of a table.

        With SCD type 2, an event has a null for each column of an earlier batch that its batch
        lacks: its version is computed from it again and again, and must not depend on its batch.

        Args:
            table: its columns, with those of the events.
            state: the columns of its state table, which has those of earlier batches; None if the
                table is new.
        """
        layout, given = self.layout, self.rows.names
        names = [name for name in table.names if name not in layout.reserved()]
        earlier = state.names if state is not None and layout.scd_type == 2 else ()
        added = [name for name in names if name in earlier and name not in given]
        fields = [table.field(name) for name in names if name in given or name in added]
        own = [stored_field(field) for field in self.schema if field.name in EVENT_COLUMNS]
        known = [name for name in self.tracked if name in names]
        more = [n for n in added if self.untracked is not None and n not in self.untracked]
        return replace(self, tracked=(*known, *more), target=pa.schema([*fields, *own]))

    def events(self, rows: pa.Table, table: str) -> pa.Table:
        """The events of rows of this shape.

        Raises:
            ConfigurationError: a part of a value is null that is NOT NULL in the table.
        """
        if self.computed:
            entries, order = rows, list(ORDER_COLUMNS)
            deletes = pc.fill_null(pc.not_equal(entries["operation"], "PUT"), False)
            rows = entries.append_column(DELETE, deletes)
            if SEQUENCE in self.layout.order:
                parts = [entries[name].combine_chunks() for name in order]
                rows = rows.append_column(SEQUENCE, pa.StructArray.from_arrays(parts, order))
            if self.layout.times:
                rows = rows.append_column(TIME, entries["created"])
        return rows if self.target is None else conform(rows, self.target, table)


def event_shape(
    rows: pa.Schema,
    rules: ChangeRules,
    columns: Sequence[str],
    in_sequence: Iterable[str] = ORDER_COLUMNS,
    *,
    computed: bool = True,
) -> EventShape:
    """The shape of a batch's events, by the rules.

    Args:
        rows: the selected columns, with those of the events unless these are computed.
        columns: of the batch.
        in_sequence: those that are a part of the sequence.
        computed: whether the event columns are computed from those of a bucket's entries.

    Raises:
        ConfigurationError: the table cannot have these events.
    """
    selected, order = rules.selected(columns), rules.order(columns)
    if rules.of_entries(columns):
        layout = Layout.of_entries(selected, rules.deletes)
    else:
        keys = rules.keys or entry_keys(selected)
        times = rules.has_times(columns)
        layout = Layout(rules.stored_as_scd_type, keys, "", order, rules.deletes, times)
    shape = EventShape(rows, layout, rules.track_history_column_list or (), computed=computed)
    layout.validate_events(shape.schema, selected)
    if not layout.entries:
        kinds = (sql_type(shape.schema.field(name).type) for name in order)
        shape = replace(shape, layout=replace(layout, sequence=", ".join(kinds)))
    if rules.stored_as_scd_type == 2 and not rules.track_history_column_list:
        # Each entry has its own of these columns, so that each put would be a version.
        untracked = {*layout.keys, *in_sequence, *(_ENTRY_COLUMNS if is_entries(columns) else ())}
        untracked.update(rules.track_history_except_column_list or ())
        tracked = tuple(name for name in selected if name not in untracked)
        shape = replace(shape, tracked=tracked, untracked=frozenset(untracked))
    return shape


@dataclass(frozen=True, slots=True)
class EventBatch:
    """A batch: the shape of its events, and its rows, wherever they are.

    Attributes:
        parts: returns the rows whose events decide, with the columns of ``shape.rows``, in one
            table or several. All events of a key are in one; each is held in memory.
        reconciles: whether these are the differences of a table from its bucket.
    """

    shape: EventShape
    parts: Callable[[EventShape], Iterable[pa.Table]]
    reconciles: bool = False

    @staticmethod
    def in_memory(shape: EventShape, rows: pa.Table, *, reconciles: bool = False) -> EventBatch:
        """The batch of a table."""
        return EventBatch(shape, lambda _: [rows], reconciles)
