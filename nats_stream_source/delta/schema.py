"""Columns of a table and of its batches as Arrow types: how they are stored, united and named.

- A column that the table lacks is added to it, null in the rows that it has. So is a field of a
  struct, also in arrays. All parts of it are nullable; of the metadata it keeps the comment.
- A column that a batch lacks keeps its value in rows that are updated, and is null in new ones. A
  field that a struct lacks is null: a struct is one value.
- Columns and fields are matched by name, in any order. Names that differ in case only are refused,
  since Delta Lake and Spark take them for one.
- A type of the batch whose values are values of the table's type is cast. Where a wider type has
  the values of both, the table's column gets it; any other type is refused.
- A column without a type (VOID: all its values are null) is not added.

A type of Spark that Arrow lacks is an opaque type here, see :func:`is_opaque`. A table can have a
column of it, and a batch cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import pyarrow as pa

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.logs import field_logger

OWN_PREFIX = "_nats_stream_source_"
"""How the names of columns begin that exist only while a batch is merged."""

ENGINE_NAMES = frozenset(
    {
        *("_source_row_present_", "_target_row_present_", "_row_dropped_"),
        "__delta_internal_is_row_deleted",
    }
)
"""Columns that Delta Lake 4.4 has while it merges or reads, in lower case."""

COLUMN_NAME_CHARACTERS = " ,;{}()\n\t="
"""Characters that Delta Lake does not accept in names of columns without column mapping."""

TIMESTAMP = pa.timestamp("us", tz="UTC")
TIMESTAMP_NTZ = pa.timestamp("us")

_NAMES = {
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.null(): "void",
    TIMESTAMP: "timestamp",
    TIMESTAMP_NTZ: "timestamp_ntz",
}
# A value of a type can be stored as each later type of its row without a change.
_WIDER = (
    (pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    (pa.int8(), pa.int16(), pa.int32(), pa.float64()),
    (pa.float32(), pa.float64()),
    (pa.date32(), TIMESTAMP_NTZ),
)
_DIGITS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}
_MAX_PRECISION = 38
_COMMENT = b"comment"
_DECLARED = b"__CHAR_VARCHAR_TYPE_STRING"  # Spark's, in the metadata of a STRING

_log = field_logger(__name__)


# -- types ------------------------------------------------------------------------------------


def opaque_type(name: str) -> pa.DataType:
    """The type of a column whose type Arrow lacks; ``name`` is that of Spark."""
    return pa.opaque(pa.null(), name, "spark")


def is_opaque(kind: pa.DataType) -> bool:
    """Whether a type, or a part of it, is one that Arrow lacks."""
    return any(isinstance(part, pa.BaseExtensionType) for part in type_parts(kind))


@lru_cache(maxsize=4096)
def sql_type(kind: pa.DataType) -> str:
    """A type as Spark names it (``struct<a:bigint>``); equal types have equal names."""
    kind = _plain(kind)
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{field.name}:{sql_type(field.type)}' for field in kind)}>"
    if pa.types.is_map(kind):
        return f"map<{sql_type(kind.key_type)},{sql_type(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"array<{sql_type(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if isinstance(kind, pa.OpaqueType):
        return str(kind.type_name)
    return _NAMES.get(kind, str(kind))


def stored_type(kind: pa.DataType) -> pa.DataType:
    """A type as a table has it: all parts nullable, and structs without fields of no type."""
    kind = _plain(kind)
    if pa.types.is_struct(kind):
        return pa.struct(
            [stored_field(field) for field in kind if not pa.types.is_null(field.type)]
        )
    if pa.types.is_map(kind):
        return pa.map_(stored_type(kind.key_type), stored_type(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", stored_type(kind.value_type)))
    return kind


def stored_field(field: pa.Field) -> pa.Field:
    """A column of a batch, or a field in one, as a table has it.

    Of its metadata the table gets the comment. The rest would be rules of another table for this
    one: defaults, expressions of generated columns, invariants, lengths of CHAR.
    """
    metadata = {k: v for k, v in (field.metadata or {}).items() if k == _COMMENT}
    return pa.field(field.name, stored_type(field.type), True, metadata or None)


def type_parts(kind: pa.DataType) -> Iterator[pa.DataType]:
    """A type, and all types in it."""
    yield kind
    for field in _fields(kind):
        yield from type_parts(field.type)


def has_ntz(schema: pa.Schema) -> bool:
    """Whether a column has a TIMESTAMP_NTZ, which requires a feature of the table."""
    parts = (part for field in schema for part in type_parts(field.type))
    return any(pa.types.is_timestamp(part) and part.tz is None for part in parts)


def declared_length(field: pa.Field) -> str:
    """CHAR(n) or VARCHAR(n) if a STRING, or a field in the column, was declared so; else empty."""
    own = (field.metadata or {}).get(_DECLARED, b"").decode().upper()
    inner = (declared_length(part) for part in _fields(field.type))
    return own or next(filter(None, inner), "")


def _fields(kind: pa.DataType) -> list[pa.Field]:
    if pa.types.is_struct(kind):
        return list(kind)
    if pa.types.is_map(kind):
        return [kind.key_field, kind.item_field]
    return [kind.value_field] if pa.types.is_list(kind) or pa.types.is_large_list(kind) else []


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of Spark's that a library has in another width or time zone."""
    if pa.types.is_timestamp(kind):
        return TIMESTAMP_NTZ if kind.tz is None else TIMESTAMP
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    return pa.list_(kind.value_field) if pa.types.is_large_list(kind) else kind


# -- columns of batches and tables ------------------------------------------------------------


def with_new_columns(table: str, schema: pa.Schema, batch: Iterable[pa.Field]) -> pa.Schema:
    """The table's columns with those of a batch; ``schema`` itself if the table has them all.

    Args:
        schema: the table's columns; none for a table that is to be created.

    Raises:
        ConfigurationError: the table cannot store the columns.
    """
    fields, changed = {field.name: field for field in schema}, False
    lower = {name.lower(): name for name in fields}
    for field in batch:
        _require_distinct_fields(table, field)
        if pa.types.is_null(field.type) and field.name not in fields:
            continue
        other = lower.setdefault(field.name.lower(), field.name)
        if other != field.name:
            raise ConfigurationError(
                f"could not merge the batch into table {table!r}: its column {field.name!r} and "
                f"the table's column {other!r} differ in case only; rename the column of the batch"
            )
        own = fields.get(field.name)
        kind = stored_type(field.type) if own is None else _united(field.type, own.type)
        if kind is None or is_opaque(field.type):
            expected = f"expected {_upper(own.type)} as in the table; " if own is not None else ""
            raise ConfigurationError(
                f"could not merge the batch into table {table!r}: column '{field.name}' is "
                f"{_upper(field.type)} in the batch, {expected}cast the column"
            )
        if own is None or kind != own.type:
            _require_storable(table, field, kind)
            nullable = own is None or own.nullable
            metadata = stored_field(field).metadata if own is None else own.metadata
            fields[field.name] = pa.field(field.name, kind, nullable, metadata)
            changed = True
    return pa.schema(list(fields.values())) if changed else schema


def widened_columns(schema: pa.Schema, new: pa.Schema) -> list[str]:
    """The columns that data files with the columns of ``schema`` have in another type.

    The fields of structs in a map count, too: delta-rs does not read them from files that lack
    them.

    Args:
        new: as :func:`with_new_columns` returns them.
    """
    return [
        field.name
        for field in new
        if field.name in schema.names and not _grown(schema.field(field.name).type, field.type)
    ]


def log_new_columns(table: str, schema: pa.Schema, new: pa.Schema) -> None:
    """Log the columns of a batch that a table has got."""
    widened = widened_columns(schema, new)
    before = {field.name: field.type for field in schema}
    added = [f.name for f in new if before.get(f.name) != f.type and f.name not in widened]
    if added:
        _log.info("added columns of the batch to the table", table=table, columns=added)
    if widened:
        _log.info("widened columns of the table for the batch", table=table, columns=widened)


def same_columns(schema: pa.Schema, other: pa.Schema) -> bool:
    """Whether two schemas have the same columns with the same types, in any order."""
    one, two = ({field.name: sql_type(field.type) for field in of} for of in (schema, other))
    return one == two


def conform(rows: pa.Table, schema: pa.Schema, table: str) -> pa.Table:
    """Rows with the columns and types of a schema; null in a column that the rows lack.

    Args:
        rows: a column that the schema lacks is left out.
        schema: the types that :func:`with_new_columns` has found for the rows.

    Raises:
        ConfigurationError: a value, or a part of one, is null that is NOT NULL in the schema.
    """
    return pa.table([_conformed(rows, field, table) for field in schema], schema=schema)


def _conformed(rows: pa.Table, field: pa.Field, table: str) -> pa.ChunkedArray | pa.Array:
    if field.name not in rows.column_names:
        return pa.nulls(len(rows), field.type)
    column = rows[field.name]
    if column.type == field.type:
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowInvalid as error:
        if "non-nullable" not in str(error):
            raise
        raise not_null_error(table, field.name) from error


def not_null_error(table: str, column: str) -> ConfigurationError:
    """The error for a null in a column, or in a part of one, that is NOT NULL in the table."""
    return ConfigurationError(
        f"could not merge the batch into table {table!r}: column {column!r}, or a part of it, is "
        f"NOT NULL in the table and null in the batch; drop NOT NULL, or fill the value"
    )


def require_not_null(table: str, rows: pa.Table) -> None:
    """Raise ConfigurationError if rows have a null in a column that is NOT NULL in their schema."""
    for field in rows.schema:
        if not field.nullable and rows[field.name].null_count:
            raise not_null_error(table, field.name)


def _united(given: pa.DataType, own: pa.DataType) -> pa.DataType | None:
    """The type with the values of both: ``own`` itself if it has them all, None if none has."""
    given, plain = _plain(given), _plain(own)
    if pa.types.is_null(given) or sql_type(given) == sql_type(own):
        return own
    if pa.types.is_struct(given) and pa.types.is_struct(own):
        return _united_structs(given, own)
    if pa.types.is_list(given) and pa.types.is_list(own):
        element = _united(given.value_type, own.value_type)
        if element is None or element == own.value_type:
            return element and own
        return pa.list_(own.value_field.with_type(element))
    if pa.types.is_map(given) and pa.types.is_map(own):
        key = _united(given.key_type, own.key_type)
        item = _united(given.item_type, own.item_type)
        if key is None or item is None:
            return None
        if key == own.key_type and item == own.item_type:
            return own
        return pa.map_(key, own.item_field.with_type(item))
    if pa.types.is_decimal(given) or pa.types.is_decimal(own):
        return _united_decimals(given, plain)
    for types in _WIDER:
        if given in types and plain in types:
            return own if types.index(given) <= types.index(plain) else given
    return None


def _united_structs(given: pa.StructType, own: pa.StructType) -> pa.DataType | None:
    fields = {field.name: field for field in own}
    lower = {name.lower(): name for name in fields}
    changed = False
    for field in given:
        if lower.setdefault(field.name.lower(), field.name) != field.name:
            return None
        before = fields.get(field.name)
        if before is None:
            if not pa.types.is_null(field.type):
                fields[field.name] = stored_field(field)
                changed = True
            continue
        kind = _united(field.type, before.type)
        if kind is None:
            return None
        if kind != before.type:
            fields[field.name] = before.with_type(kind).with_nullable(True)
            changed = True
    return pa.struct(list(fields.values())) if changed else own


def _united_decimals(given: pa.DataType, own: pa.DataType) -> pa.DataType | None:
    sizes = []
    for kind in (given, own):
        if pa.types.is_decimal(kind):
            sizes.append((kind.precision - kind.scale, kind.scale))
        elif kind in _DIGITS:
            sizes.append((_DIGITS[kind], 0))
        else:
            return None
    digits, scale = (max(parts) for parts in zip(*sizes, strict=True))
    if digits + scale > _MAX_PRECISION:
        return None
    united = pa.decimal128(digits + scale, scale)
    return own if united == own else united


def _grown(own: pa.DataType, new: pa.DataType) -> bool:
    """Whether a type differs from another one by added fields of structs at most."""
    if pa.types.is_struct(own) and pa.types.is_struct(new):
        kinds = {field.name: field.type for field in own}
        return all(_grown(kinds.get(field.name, field.type), field.type) for field in new)
    if pa.types.is_list(own) and pa.types.is_list(new):
        return _grown(own.value_type, new.value_type)
    return sql_type(own) == sql_type(new)


# -- names ------------------------------------------------------------------------------------


def validate_names(columns: Sequence[str]) -> None:
    """Raise ConfigurationError if a table cannot have columns of these names side by side."""
    seen: dict[str, str] = {}
    for name in columns:
        other = seen.setdefault(name.lower(), name)
        problem = None
        if other is not name:
            problem = (
                f"the columns {other!r} and {name!r}, whose names Delta Lake does not distinguish"
            )
        elif name.lower() in ENGINE_NAMES:
            problem = f"a column {name!r}, and Delta Lake has a column of this name while it merges"
        elif name.lower().startswith(OWN_PREFIX):
            problem = f"a column {name!r}, and names that begin with {OWN_PREFIX!r} are reserved"
        if problem is not None:
            raise ConfigurationError(
                f"could not merge the batch: it has {problem}; rename or drop the column"
            )


def require_storable_names(table: str, schema: pa.Schema) -> None:
    """Raise ConfigurationError if a table without column mapping cannot have these columns."""
    structs = [one for field in schema for one in type_parts(field.type) if pa.types.is_struct(one)]
    for name in [*schema.names, *(field.name for struct in structs for field in struct)]:
        found = next((one for one in name if one in COLUMN_NAME_CHARACTERS), None)
        if found is not None or not name:
            problem = f"has {found!r} in its name" if found else "has an empty name"
            raise ConfigurationError(
                f"could not store the columns in table {table!r}: column {name!r} {problem}, which "
                f"Delta Lake does not accept; rename the column, or create the table with column "
                f"mapping (delta.columnMapping.mode = 'name') before the first merge"
            )


def _require_distinct_fields(table: str, column: pa.Field) -> None:
    for part in type_parts(column.type):
        seen: dict[str, str] = {}
        for name in [field.name for field in part] if pa.types.is_struct(part) else ():
            if (other := seen.setdefault(name.lower(), name)) is not name:
                raise ConfigurationError(
                    f"could not merge the batch into table {table!r}: a struct in column "
                    f"{column.name!r} has the fields {other!r} and {name!r}, whose names Delta "
                    f"Lake does not distinguish; rename or drop one of them"
                )


def _require_storable(table: str, field: pa.Field, stored: pa.DataType) -> None:
    for part in type_parts(stored):
        problem = sql_type(part).upper() if pa.types.is_null(part) else None
        if pa.types.is_struct(part) and not part.num_fields:
            problem = "a struct without fields of a type"
        if problem is not None:
            raise ConfigurationError(
                f"could not merge the batch into table {table!r}: column {field.name!r} is "
                f"{_upper(field.type)}, and Delta Lake does not store {problem} in it; cast or "
                f"drop the column"
            )


def _upper(kind: pa.DataType) -> str:
    return sql_type(kind).upper()
