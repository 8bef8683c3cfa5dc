"""``lookup``: the entries of a bucket as columns of any rows, by a key in each row.

The rows pass through ``mapInArrow``, in a batch as in a query; ``entries`` adds the columns on the
executors. This module validates the arguments on the driver, without a connection: over Spark
Connect the driver may not reach the servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nats_stream_source.errors import OptionError, needs_extra

with needs_extra("spark"):
    from pyspark.sql.types import DataType, StringType, StructField, StructType

from nats_stream_source.options.reading import ENTRY_COLUMNS, lookup_options
from nats_stream_source.rows.columns import ddl

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame


def lookup(
    df: DataFrame,
    *,
    bucket: str,
    key: str,
    columns: Sequence[str] | Mapping[str, str] = ("value",),
    **options: str | float | bool,
) -> DataFrame:
    """Add the current entries of a bucket to rows, by the key in each row.

    The executors request exactly the keys that occur: the distinct ones of each record batch, at
    most 1,024 in a request. All rows are kept, in their order. The added columns are null where the
    key is null, the bucket does not have it, or it was deleted. An entry is not older than the
    bucket was when the request was sent, and it may be newer.

    ``lookup(events, bucket="devices", key="device_id", servers="nats://127.0.0.1:4222")``

    Args:
        df: a DataFrame of ``spark.read`` or ``spark.readStream``.
        bucket: the bucket.
        key: the column of ``df`` with the keys, a string. A key that a bucket cannot have does not
            have an entry; the executors log the number of such keys.
        columns: what is added of the entry: ``value``, ``revision`` and ``created``, with the types
            of ``nats_kv``. A mapping gives them other names: ``{"value": "device"}``.
        options: options of the connection (``servers``, …), ``keyCodec``, ``valueCodec``,
            ``onUndecodable``, ``minLastRevision`` and ``outageTimeout``, as for ``nats_kv``.

    Returns:
        The rows of ``df`` with the added columns. Each action requests the entries again.

    Raises:
        OptionError: an argument or option is invalid, ``df`` lacks the column ``key``, or has a
            column of the name of an added one.
        InvalidNameError: ADR-8 does not allow the name of the bucket.

    Tasks raise BucketNotFoundError, UndecodableError, MinLastSequenceError (the bucket does not
    reach ``minLastRevision`` within ``requestTimeout``) and the errors of a connection.
    """
    from nats_stream_source.spark.enrichment.entries import Lookup, with_entries

    added, present = _added(columns), df.schema
    task = Lookup(
        lookup_options(bucket, options),
        _position(present, key),
        {name: source for source, name in added.items()},
    )
    schema = _with_columns(present, added)

    def enrich(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return with_entries(batches, task)

    return df.mapInArrow(enrich, schema)


def _added(columns: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """The names of the added columns, by those of the entry's."""
    if isinstance(columns, Mapping):
        added = dict(columns)
    else:
        names = [columns] if isinstance(columns, str) else list(columns)
        added = dict(zip(names, names, strict=True))
        if len(added) < len(names):
            raise OptionError(f"invalid argument: columns is {names!r}, expected each name once")
    unknown = [name for name in added if name not in ENTRY_COLUMNS]
    if unknown or not added:
        raise OptionError(
            f"invalid argument: columns is {columns!r}, expected some of {', '.join(ENTRY_COLUMNS)}"
        )
    return added


def _position(schema: StructType, key: str) -> int:
    found = [i for i, name in enumerate(schema.names) if name.lower() == key.lower()]
    if len(found) != 1:
        observed = "occurs twice" if found else "is missing"
        raise OptionError(
            f"could not look up entries: column {key!r} {observed}, the columns are "
            f"{', '.join(schema.names)}; name a column of the DataFrame, not an expression"
        )
    kind = schema[found[0]].dataType
    if not isinstance(kind, StringType):
        raise OptionError(
            f"could not look up entries: column {key!r} is {kind.simpleString().upper()}, "
            f"expected STRING; cast it"
        )
    return found[0]


def _with_columns(schema: StructType, added: Mapping[str, str]) -> StructType:
    present = {name.lower() for name in schema.names}
    for source, name in added.items():
        if name.lower() in present:
            raise OptionError(
                f"could not look up entries: the DataFrame has a column {name!r}; give the added "
                f"one another name: columns={{{source!r}: …}}"
            )
        present.add(name.lower())
    entry = DataType.fromDDL(ddl("nats_kv"))
    assert isinstance(entry, StructType)
    fields = [StructField(name, entry[source].dataType) for source, name in added.items()]
    return StructType([*schema.fields, *fields])
