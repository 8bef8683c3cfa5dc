"""What a table of change data stores: its columns, its identity, and the state table beside it.

**Tables of entries.** A bucket's entries are events of SCD type 1 with the sequence
(``stream_created``, ``revision``) and the deletes ``operation <> 'PUT'``. A stream's order cannot
be late, so a table of entries has neither a state table nor a property: a table without the
property that has the four columns of :data:`REQUIRED_COLUMNS` is one. Its key is ``key``, with
``bucket`` before it if the table has that column. With marked deletes it has ``deleted``.

**Other tables.** The selected columns, and what the rules need beside them:

- *SCD type 1*, one row per key: the sequence of the row's event in ``__SEQUENCE``, unless each
  part of ``sequence_by`` is a selected column. With marked deletes also ``deleted``.
- *SCD type 2*, one row per version of a key: ``__START_AT`` and ``__END_AT``, the sequences of the
  events that opened and closed it, null in an open one. For entries of a bucket also ``valid_from``
  and ``valid_to``, the times of these entries.

A sequence of several parts is a struct.

**The state table** has the name of the table with ``__cdc_state`` after it. It keeps the events
that the rows do not show and that decide over later ones:

- *SCD type 1*: for each key, the greatest sequence of a delete. With marked deletes there is no
  state table, since the marked row has it.
- *SCD type 2*: the events of versions that more than one event made, and deletes of keys that had
  no open version.

It is written before the table. All it has are events that took place, so a state that is ahead of
the table is complete, too: the repeat of the batch finds the same events and mends the table.

**The property** ``nats_stream_source.cdc`` records the layout, so that a later call with other keys
or another sequence is refused. The state's property also has the identity of its table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, get_args

import pyarrow as pa

from nats_stream_source.delta.schema import TIMESTAMP, declared_length, sql_type, stored_field
from nats_stream_source.errors import ConfigurationError

Deletes = Literal["remove", "mark"]

REQUIRED_COLUMNS = ("key", "revision", "operation", "stream_created")
"""The columns by which an entry is found, ordered and applied."""
DELIVERY_COLUMNS = ("delta", "initial")
"""The columns of a delivery, which differ when the entry is read again; never stored."""
ORDER_COLUMNS = ("stream_created", "revision")
MARK_COLUMNS = ("stream_created", "revision", "created", "operation")
"""The columns of a marked row of an entry that are the marker's own."""
DELETED_COLUMN = "deleted"

PROPERTY = "nats_stream_source.cdc"
"""The property of a table with its layout."""

STATE_SUFFIX = "__cdc_state"
"""What the name of a state table adds to the name of its table."""

SEQUENCE = "__SEQUENCE"
DELETE = "__DELETE"
TIME = "__TIME"
UNAVAILABLE = "__UNAVAILABLE"
REPLACES = "__REPLACES"
EVENT_COLUMNS = (SEQUENCE, DELETE, TIME, UNAVAILABLE, REPLACES)
"""The columns of an event that are not columns of its row."""
START, END = "__START_AT", "__END_AT"
VALID_FROM, VALID_TO = "valid_from", "valid_to"
ENTRY_SEQUENCE = "struct<stream_created:timestamp,revision:bigint>"
"""The sequence of a bucket's entries in a history."""

_NAMES = "array<string>"


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a table; see the module.

    Attributes:
        keys: columns that identify a key.
        sequence: type of the sequence as SQL.
        order: the columns of an event, and with SCD type 1 of a row, that have its sequence.
        times: whether versions have ``valid_from`` and ``valid_to``.
        table_id: of a state table: the identity of the table beside it; else empty.
        entries: whether the table has a bucket's entries, one row per key; the property lacks it.
    """

    scd_type: int
    keys: tuple[str, ...]
    sequence: str
    order: tuple[str, ...]
    deletes: Deletes
    times: bool
    table_id: str = ""
    entries: bool = field(default=False, compare=False)

    @staticmethod
    def of(properties: Mapping[str, str]) -> Layout | None:
        """The layout that the properties of a table have; None if it was created without one."""
        text = properties.get(PROPERTY)
        if text is None:
            return None
        values = json.loads(text)
        return Layout(**{**values, "keys": tuple(values["keys"]), "order": tuple(values["order"])})

    @staticmethod
    def of_entries(columns: Iterable[str], deletes: Deletes) -> Layout:
        """The layout of a table of entries.

        Args:
            columns: of the table, or of the batch that creates it.
        """
        keys = entry_keys(columns)
        return Layout(1, keys, "timestamp, bigint", ORDER_COLUMNS, deletes, False, entries=True)

    @property
    def properties(self) -> dict[str, str]:
        """The properties of a table that is created with this layout."""
        if self.entries:
            return {}
        values = asdict(self)
        del values["entries"]
        return {PROPERTY: json.dumps(values, separators=(",", ":"))}

    @property
    def has_state(self) -> bool:
        """Whether a table of this layout has a state table."""
        return self.scd_type == 2 or (self.deletes == "remove" and not self.entries)

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that identify a row."""
        if self.scd_type == 1:
            return self.keys
        return (*self.keys, *(self.order if self.table_id else (START,)))

    @property
    def row_order(self) -> tuple[str, ...]:
        """The columns of a row that order the rows of a key, or the row beside an event."""
        return (START,) if self.scd_type == 2 and not self.table_id else self.order

    @property
    def identified(self) -> list[str]:
        """The columns of an event that have its key and its sequence."""
        return list(dict.fromkeys((*self.keys, *self.order)))

    def state(self, table_id: str) -> Layout:
        """The layout of the state table of a table."""
        return replace(self, table_id=table_id)

    def reserved(self) -> tuple[str, ...]:
        """The names of columns that the batch must not have."""
        names = list(EVENT_COLUMNS)
        if self.scd_type == 2:
            names += [START, END, *((VALID_FROM, VALID_TO) if self.times else ())]
        elif self.deletes == "mark":
            names.append(DELETED_COLUMN)
        return tuple(names)

    def validate_events(self, schema: pa.Schema, selected: Iterable[str]) -> None:
        """Raise ConfigurationError if the layout cannot have these events.

        Args:
            schema: of the events: keys and sequences have types that can be compared.
            selected: the columns that the table stores, whose names are not reserved for its own.
        """
        if self.entries:
            _require_entry_types(
                schema, "could not merge the batch", "keep the column as the source delivers it"
            )
        for name in self.keys:
            kind = schema.field(name).type
            if not _is_atomic(kind):
                raise ConfigurationError(
                    f"could not merge the batch: the key {name!r} is {sql_type(kind).upper()}, "
                    f"expected a number, text, binary, boolean, date or time; cast it or pick "
                    f"another"
                )
        for name in self.order:
            kind = schema.field(name).type
            if not _is_ordered(kind):
                raise ConfigurationError(
                    f"could not merge the batch: sequence_by is {sql_type(kind).upper()}, which "
                    f"cannot be ordered; expected numbers, texts, binaries, booleans, dates or "
                    f"times, or structs of them"
                )
        if UNAVAILABLE in schema.names and sql_type(schema.field(UNAVAILABLE).type) != _NAMES:
            raise ConfigurationError(
                f"could not merge the batch: unavailable_columns is a column of type "
                f"{sql_type(schema.field(UNAVAILABLE).type).upper()}, expected {_NAMES.upper()}"
            )
        # Delta Lake and Spark compare names without case.
        names = {name.lower(): name for name in selected}
        for reserved in self.reserved():
            if reserved.lower() in names:
                raise ConfigurationError(
                    f"could not merge the batch: it has a column {names[reserved.lower()]!r}, and "
                    f"{reserved!r} is reserved for the table's own; rename the column, or exclude "
                    f"it with except_column_list"
                )

    def table_schema(self, events: pa.Schema) -> pa.Schema:
        """The columns of the table for events of this schema; all of them are nullable.

        A column without a type (VOID) is not one of them.
        """
        fields = [
            stored_field(one)
            for one in events
            if one.name not in EVENT_COLUMNS and not pa.types.is_null(one.type)
        ]
        if self.scd_type == 1 and self.deletes == "mark":
            fields.append(pa.field(DELETED_COLUMN, pa.bool_()))
        if self.scd_type == 2 or SEQUENCE in self.order:
            kind = stored_field(events.field(SEQUENCE)).type
            names = (START, END) if self.scd_type == 2 else (SEQUENCE,)
            fields += [pa.field(name, kind) for name in names]
        if self.times:
            fields += [pa.field(name, TIMESTAMP) for name in (VALID_FROM, VALID_TO)]
        return pa.schema(fields)

    def state_schema(self, events: pa.Schema) -> pa.Schema:
        """The columns of the state table for events of this schema."""
        names = self.identified if self.scd_type == 1 else events.names
        names = [name for name in names if name != REPLACES]
        return pa.schema([stored_field(events.field(name)) for name in names])

    def verify(
        self, table: str, stored: Layout | None, schema: pa.Schema, batch: Sequence[str] | None
    ) -> None:
        """Raise ConfigurationError if a table has another layout.

        Args:
            batch: the columns of the batch; None for :func:`nats_stream_source.delta.reconcile`.
        """
        if self.entries:
            if stored is not None:
                raise ConfigurationError(
                    f"could not use table {table!r}: it was created with stored_as_scd_type="
                    f"{stored.scd_type} and keys={list(stored.keys)!r}, and this call has the "
                    f"rules of a bucket's newest entries; pass the arguments that the table was "
                    f"created with"
                )
            self._verify_entries(table, schema, batch)
        else:
            self._verify_stored(table, stored)
        for one in schema:
            length = declared_length(one)
            if one.name in (*self.keys, *self.order) and length.startswith("CHAR"):
                raise ConfigurationError(
                    f"could not use table {table!r}: rows are found by column {one.name!r}, which "
                    f"is {length}, expected STRING: Spark stores a CHAR with other spaces than it "
                    f"compares; copy the table into one with STRING"
                )
        if self.deletes == "mark":
            kept = {
                *self.keys,
                *self.order,
                DELETED_COLUMN,
                *(MARK_COLUMNS if self.entries else ()),
            }
            required = [one.name for one in schema if not one.nullable and one.name not in kept]
            if required:
                raise ConfigurationError(
                    f"could not use table {table!r} with deletes='mark': column {required[0]!r} is "
                    f"NOT NULL, and null in the row of a deleted key; drop NOT NULL from the column"
                )

    def _verify_entries(self, table: str, schema: pa.Schema, batch: Sequence[str] | None) -> None:
        """Verify a table of entries; it keeps the value of ``deletes`` that it was created for.

        Marks added to a table of removed rows would not cover the rows removed before; removals in
        a table of marked rows would leave the old marks.
        """
        columns, given = schema.names, batch or ()
        missing = [name for name in REQUIRED_COLUMNS if name not in columns]
        if missing:
            required = ", ".join(f"'{name}'" for name in REQUIRED_COLUMNS)
            raise ConfigurationError(
                f"could not use table {table!r}: the table has no column {missing[0]!r}, expected "
                f"{required}; use a table created from a bucket"
            )
        _require_entry_types(
            schema, f"could not use table {table!r}", "replay the bucket into a new table"
        )
        if self.deletes == "mark" and DELETED_COLUMN not in columns:
            raise ConfigurationError(
                f"could not use table {table!r} with deletes='mark': it has no column "
                f"'{DELETED_COLUMN}', so rows of deleted keys are removed from it; use "
                f"deletes='remove', or replay the bucket into a new table"
            )
        if self.deletes == "remove" and DELETED_COLUMN in columns and DELETED_COLUMN not in given:
            raise ConfigurationError(
                f"could not use table {table!r} with deletes='remove': it has a column "
                f"'{DELETED_COLUMN}', so rows of deleted keys are marked in it; use "
                f"deletes='mark', or replay the bucket into a new table"
            )
        if batch is not None and ("bucket" in columns) != ("bucket" in batch):
            lacks, action = "table", "drop the column 'bucket'"
            if "bucket" in columns:
                lacks, action = "batch", "keep the column 'bucket'"
            raise ConfigurationError(
                f"could not merge the batch into table {table!r}: the {lacks} has no column "
                f"'bucket', and the {'batch' if lacks == 'table' else 'table'} identifies rows by "
                f"'bucket' and 'key'; {action}"
            )

    def _verify_stored(self, table: str, stored: Layout | None) -> None:
        if stored is None:
            raise ConfigurationError(
                f"could not use table {table!r}: it was not created with keys and sequence_by, "
                f"expected a table that was; name a new table, or set the property {PROPERTY!r} of "
                f"a new, empty one to {self.properties[PROPERTY]!r}"
            )
        for what, given, expected in (
            ("stored_as_scd_type", self.scd_type, stored.scd_type),
            ("keys", list(self.keys), list(stored.keys)),
            ("a sequence_by of type", self.sequence, stored.sequence),
            ("its sequence in columns", list(self.order), list(stored.order)),
            ("deletes", self.deletes, stored.deletes),
        ):
            if given != expected:
                raise ConfigurationError(
                    f"could not use table {table!r}: it was created with {what} {expected!r}, and "
                    f"this call has {given!r}; pass the same, or name a new table"
                )
        if self.times != stored.times:
            raise ConfigurationError(
                f"could not use table {table!r}: its versions {_have(stored.times)} the columns "
                f"{VALID_FROM!r} and {VALID_TO!r}, and this call's {_have(self.times)}; merge "
                f"the rows of nats_kv with their column 'created', or name a new table"
            )

    def verify_state(self, table: str, stored: Layout | None) -> None:
        """Raise ConfigurationError if a state table is that of another table.

        Args:
            table: path or name of the state table, for the error.
        """
        if stored is None or stored.table_id != self.table_id:
            raise ConfigurationError(
                f"could not use table {table!r}, the state of the table beside it: it belongs to "
                f"another table, which was deleted or replaced; delete the state table, or restore "
                f"the table that it belongs to"
            )


def layout_of(properties: Mapping[str, str], schema: pa.Schema) -> Layout | None:
    """The layout of an existing table; None if this package did not create it."""
    stored = Layout.of(properties)
    if stored is None and all(name in schema.names for name in REQUIRED_COLUMNS):
        deletes: Deletes = "mark" if DELETED_COLUMN in schema.names else "remove"
        return Layout.of_entries(schema.names, deletes)
    return stored


def validate_deletes(deletes: str) -> None:
    """Raise ConfigurationError unless ``deletes`` is ``"remove"`` or ``"mark"``."""
    if deletes not in get_args(Deletes):
        raise ConfigurationError(
            f"invalid argument: deletes is {deletes!r}, expected 'remove' or 'mark'"
        )


def entry_keys(columns: Iterable[str]) -> tuple[str, ...]:
    """The columns that identify the key of an entry."""
    return ("bucket", "key") if "bucket" in columns else ("key",)


def state_name(table: str) -> str:
    """The path, URI or name of the state table of a table."""
    # A name in backquotes can be a path, too: delta.`/lake/fleet/`.
    end = "`" if table.endswith("`") else ""
    return table.removesuffix(end).rstrip("/\\") + STATE_SUFFIX + end


def _require_entry_types(schema: pa.Schema, failed: str, action: str) -> None:
    """Raise ConfigurationError if entries have types that would be compared in another order.

    Texts would be ordered by their digits, and a FLOAT or DATE rounds.
    """
    for name, (fits, expected) in _ENTRY_TYPES.items():
        kind = schema.field(name).type
        if not fits(kind):
            raise ConfigurationError(
                f"{failed}: column {name!r} is {sql_type(kind).upper()}, expected {expected}; "
                f"{action}"
            )


_ENTRY_TYPES = {
    "revision": (
        lambda kind: pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and kind.scale == 0),
        "BIGINT, another integer or DECIMAL(p,0)",
    ),
    "stream_created": (pa.types.is_timestamp, "TIMESTAMP or TIMESTAMP_NTZ"),
    "operation": (lambda kind: sql_type(kind) == "string", "STRING"),
}


def _have(times: bool) -> str:
    return "have" if times else "do not have"


def _is_ordered(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_is_ordered(one.type) for one in kind)
    return _is_atomic(kind)


def _is_atomic(kind: pa.DataType) -> bool:
    return not (
        pa.types.is_nested(kind) or pa.types.is_null(kind) or isinstance(kind, pa.BaseExtensionType)
    )
