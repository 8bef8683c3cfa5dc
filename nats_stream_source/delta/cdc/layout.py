"""What a table of change data stores: its columns, its identity, and the state table beside it.

**The table.** The selected columns, and what the rules need beside them:

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

**Its property** ``nats_stream_source.cdc`` records the layout, so that a later call with other keys
or another sequence is refused. The state's property also has the identity of its table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from nats_stream_source.delta.stored_columns import stored_type
from nats_stream_source.delta.table import (
    DELETED_COLUMN,
    REQUIRED_COLUMNS,
    Deletes,
    TableChangedError,
    table_schema,
)
from nats_stream_source.errors import ConfigurationError

PROPERTY = "nats_stream_source.cdc"
"""The property of a table with its layout."""

STATE_SUFFIX = "__cdc_state"
"""What the name of a state table adds to the name of its table."""

SEQUENCE = "__SEQUENCE"
DELETE = "__DELETE"
TIME = "__TIME"
UNAVAILABLE = "__UNAVAILABLE"
EVENT_COLUMNS = (SEQUENCE, DELETE, TIME, UNAVAILABLE)
"""The columns of an event that are not columns of its row."""
START, END = "__START_AT", "__END_AT"
VALID_FROM, VALID_TO = "valid_from", "valid_to"
ENTRY_SEQUENCE = "struct<stream_created:timestamp,revision:bigint>"
"""The sequence of a bucket's entries."""

_NAMES = "array<string>"
_ORDERED = (
    NumericType,
    StringType,
    BinaryType,
    BooleanType,
    DateType,
    TimestampType,
    TimestampNTZType,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a table; see the module.

    Attributes:
        scd_type: 1 or 2.
        keys: columns that identify a key.
        sequence: type of the sequence as SQL.
        order: the columns of an event, and with SCD type 1 of a row, that have its sequence.
        deletes: ``"remove"`` or ``"mark"``.
        times: whether versions have ``valid_from`` and ``valid_to``.
        table_id: of a state table: the identity of the table beside it; else empty.
    """

    scd_type: int
    keys: tuple[str, ...]
    sequence: str
    order: tuple[str, ...]
    deletes: Deletes
    times: bool
    table_id: str = ""

    @staticmethod
    def of(properties: Mapping[str, str]) -> Layout | None:
        """The layout that the properties of a table have; None if it was created without one."""
        text = properties.get(PROPERTY)
        if text is None:
            return None
        values = json.loads(text)
        return Layout(**{**values, "keys": tuple(values["keys"]), "order": tuple(values["order"])})

    @property
    def properties(self) -> dict[str, str]:
        """The properties of a table that is created with this layout."""
        return {PROPERTY: json.dumps(asdict(self), separators=(",", ":"))}

    @property
    def is_state(self) -> bool:
        """Whether this is the layout of a state table."""
        return bool(self.table_id)

    @property
    def has_state(self) -> bool:
        """Whether a table of this layout has a state table."""
        return self.scd_type == 2 or self.deletes == "remove"

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that identify a row."""
        if self.scd_type == 1:
            return self.keys
        return (*self.keys, *(self.order if self.is_state else (START,)))

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

    def validate_events(self, schema: StructType, selected: Iterable[str]) -> None:
        """Raise ConfigurationError if the layout cannot have these events.

        Args:
            schema: of the events: keys and sequences have types that can be compared.
            selected: the columns that the table stores, whose names are not reserved for its own.
        """
        for name in self.keys:
            kind = schema[name].dataType
            if not _is_atomic(kind):
                raise ConfigurationError(
                    f"could not merge the batch: the key {name!r} is "
                    f"{kind.simpleString().upper()}, expected a number, text, binary, boolean, "
                    f"date or time; cast it or pick another"
                )
        for name in self.order:
            kind = schema[name].dataType
            if not _is_ordered(kind):
                raise ConfigurationError(
                    f"could not merge the batch: sequence_by is {kind.simpleString().upper()}, "
                    f"which cannot be ordered; expected numbers, texts, binaries, booleans, dates "
                    f"or times, or structs of them"
                )
        if UNAVAILABLE in schema.names and schema[UNAVAILABLE].dataType.simpleString() != _NAMES:
            raise ConfigurationError(
                f"could not merge the batch: unavailable_columns is a column of type "
                f"{schema[UNAVAILABLE].dataType.simpleString().upper()}, expected {_NAMES.upper()}"
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

    def table_schema(self, events: StructType) -> StructType:
        """The columns of the table for events of this schema."""
        values = [field for field in events.fields if field.name not in EVENT_COLUMNS]
        schema = table_schema(StructType(values), self.deletes)
        if self.scd_type == 2:
            kind = events[SEQUENCE].dataType
            schema = StructType([*schema.fields, StructField(START, kind), StructField(END, kind)])
            if self.times:
                names = (VALID_FROM, VALID_TO)
                times = [StructField(name, TimestampType()) for name in names]
                schema = StructType([*schema.fields, *times])
        elif SEQUENCE in self.order:
            schema = StructType([*schema.fields, StructField(SEQUENCE, events[SEQUENCE].dataType)])
        return schema

    def state_schema(self, events: StructType) -> StructType:
        """The columns of the state table for events of this schema."""
        if self.scd_type == 1:
            fields = [events[name] for name in dict.fromkeys((*self.keys, *self.order))]
        else:
            fields = list(events.fields)
        return StructType(
            [StructField(f.name, BooleanType() if f.name == DELETE else f.dataType) for f in fields]
        )

    def verify(self, table: str, stored: Layout | None) -> None:
        """Raise ConfigurationError if a table has another layout.

        Args:
            table: path or name, for the error.
            stored: the layout of the table.
        """
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

    def verify_created(
        self, stored: Layout | None, schema: StructType, stored_schema: StructType
    ) -> None:
        """Raise TableChangedError if another writer created the table at the same time.

        Args:
            stored: the layout of the table.
            schema: the columns that this call created it with.
            stored_schema: the columns of the table.
        """
        columns, stored_columns = (
            [(field.name, stored_type(field.dataType)) for field in of]
            for of in (schema.fields, stored_schema.fields)
        )
        if stored != self or stored_columns != columns:
            raise TableChangedError("another writer has created the table")

    def verify_state(self, table: str, stored: Layout | None) -> None:
        """Raise ConfigurationError if a state table is that of another table.

        Args:
            table: path or name of the state table, for the error.
            stored: the layout of the state table.
        """
        if stored is None or stored.table_id != self.table_id:
            raise ConfigurationError(
                f"could not use table {table!r}, the state of the table beside it: it belongs to "
                f"another table, which was deleted or replaced; delete the state table, or restore "
                f"the table that it belongs to"
            )


def times_of_entries(layout: Layout | None, columns: list[str]) -> frozenset[str]:
    """The columns of a table that have times of a bucket and its entries.

    Args:
        layout: of the table.
        columns: of the table.

    Returns:
        Names of columns, or of fields as ``column.field``.
    """
    stream_created = "stream_created"
    if layout is None:
        entries = all(name in columns for name in REQUIRED_COLUMNS)
        return frozenset({"created", stream_created} if entries else ())
    times: set[str] = set()
    if layout.times:
        times |= {"created", VALID_FROM, VALID_TO, TIME}
    if layout.sequence == ENTRY_SEQUENCE:
        sequences = (SEQUENCE, START, END)
        times |= {stream_created, *(f"{name}.{stream_created}" for name in sequences)}
    return frozenset(times)


def state_name(table: str) -> str:
    """The path, URI or name of the state table of a table."""
    # A name in backquotes can be a path, too: delta.`/lake/fleet/`.
    end = "`" if table.endswith("`") else ""
    return table.removesuffix(end).rstrip("/\\") + STATE_SUFFIX + end


def missing_state_error(state: str) -> ConfigurationError:
    """The error for a table with rows whose state table does not exist."""
    return ConfigurationError(
        f"could not merge the batch: the state table {state!r} does not exist beside a table with "
        f"rows, and late events would be merged wrongly without it; restore it, or replay the "
        f"events into a new table"
    )


def other_rules_error(table: str, stored: Layout) -> ConfigurationError:
    """The error for a call without rules on a table that was created with some."""
    return ConfigurationError(
        f"could not use table {table!r}: it was created with stored_as_scd_type="
        f"{stored.scd_type} and keys={list(stored.keys)!r}, and this call has the rules of a "
        f"bucket's newest entries; pass the arguments that the table was created with"
    )


def _have(times: bool) -> str:
    return "have" if times else "do not have"


def _is_ordered(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return bool(kind.fields) and all(_is_ordered(field.dataType) for field in kind.fields)
    return _is_atomic(kind)


def _is_atomic(kind: DataType) -> bool:
    # A string with a collation is compared by other rules than its bytes.
    if isinstance(kind, StringType):
        return kind == StringType()
    return isinstance(kind, _ORDERED)
