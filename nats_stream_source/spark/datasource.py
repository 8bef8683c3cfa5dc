"""The data sources ``nats_kv`` and ``nats_stream``: options, columns, readers and writers.

``format("nats_kv")`` reads the changes of a NATS key-value bucket, ``format("nats_stream")`` the
messages of a NATS JetStream stream. Spark requests the columns, as DDL, before it reads.
"""

from __future__ import annotations

import difflib
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from nats_stream_source.errors import OptionError, needs_extra

with needs_extra("spark"):
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import (
        ArrayType,
        BinaryType,
        ByteType,
        DataType,
        IntegerType,
        LongType,
        MapType,
        ShortType,
        StringType,
        StructType,
    )

from nats_stream_source.options import KvOptions, Mode, StreamOptions, kv_options, stream_options
from nats_stream_source.options.writing import (
    KvWriteOptions,
    StreamWriteOptions,
    kv_write_options,
    stream_write_options,
    without_query_options,
)
from nats_stream_source.rows.columns import COLUMNS, ddl, declared
from nats_stream_source.spark.readers import STREAM_READER, BatchReader, StreamReader

if TYPE_CHECKING:
    from nats_stream_source.rows.base import FormatAdapter
    from nats_stream_source.spark.task_counts import TaskCounts


class NatsFormat(DataSource):
    """A format of this package.

    The options are those of ``nats_stream_source.options``; they are validated when the source is
    loaded, before a connection is opened.

    Attributes:
        task_counts: where tasks add what they count; set by ``register``.
    """

    task_counts: ClassVar[TaskCounts | None] = None

    def __init__(self, options: Mapping[str, str]) -> None:
        # Not validated here: Spark also creates a data source for a sink, with other options.
        super().__init__(dict(options))

    @abstractmethod
    def parse_options(self, mode: Mode | None = None) -> KvOptions | StreamOptions:
        """The options, validated for ``mode``; raises OptionError and other ConfigurationErrors."""

    def schema(self) -> str:
        """The columns, as DDL."""
        return ddl(self.name(), self.parse_options().added_columns)

    def streamReader(self, schema: StructType) -> StreamReader:
        """The reader for ``spark.readStream``."""
        return STREAM_READER(self._adapter(Mode.STREAMING, schema), self.task_counts)

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader for ``spark.read``."""
        return BatchReader(self._adapter(Mode.BATCH, schema))

    def _adapter(self, mode: Mode, schema: StructType) -> FormatAdapter:
        """The query that the options describe.

        Raise OptionError for columns that the user gave and a read does not return. Without columns
        of the user Spark passes those of :meth:`schema`. With other columns it would fail in a
        task, with a mismatch that does not name the call to remove.
        """
        # Deferred import: each process that Spark starts to find the formats would load Arrow.
        from nats_stream_source.rows.formats import format_adapter

        options = self.parse_options(mode)
        given = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema)
        columns = declared(self.name(), options.added_columns)
        if given and _normalised(given) != _normalised(columns):
            raise OptionError(
                f"could not read format {self.name()!r} with the given schema: got ({given}), "
                f"expected ({columns}); remove .schema(...), or the column list of CREATE VIEW, "
                f"and select from the DataFrame"
            )
        return format_adapter(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """The writer for ``df.write``.

        Connects once, so that a wrong address or a missing bucket fails before the job starts, and
        ``ifMissing=create`` creates it once.
        """
        if overwrite:
            raise OptionError(
                f"could not write with format {self.name()!r}: the mode is 'overwrite', expected "
                f"'append'; write mode('append'), and delete keys with the column operation = 'DEL'"
            )
        options = self._write_options(schema)
        # Deferred imports, here and below: a process loads only what it needs.
        from nats_stream_source.spark.writing.task import prepare_target
        from nats_stream_source.spark.writing.writers import NatsBatchWriter

        prepare_target(options)
        return NatsBatchWriter(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """The writer for ``df.writeStream``; Spark creates it for each micro-batch."""
        if overwrite:
            raise OptionError(
                f"could not write with format {self.name()!r}: the output mode is 'complete', "
                f"expected 'append' or 'update'; write outputMode('update')"
            )
        self.options = without_query_options(self.options)
        options = self._write_options(schema)
        from nats_stream_source.spark.writing.writers import NatsStreamWriter

        writer: DataSourceStreamWriter = NatsStreamWriter(options, schema, self.task_counts)
        return writer

    @abstractmethod
    def _write_options(self, schema: StructType) -> KvWriteOptions | StreamWriteOptions:
        """The options of a write, validated with the columns of the DataFrame."""


def _normalised(ddl: str) -> str:
    """Columns without the differences between a declaration and Spark's names of types."""
    # A type is written in upper case here, a name never.
    return re.sub(r"\b[A-Z]+\b", lambda word: word[0].lower(), ddl).replace(", ", ",")


class NatsKvDataSource(NatsFormat):
    """The changes of a NATS key-value bucket, as rows."""

    @classmethod
    def name(cls) -> str:
        """The argument of ``format()``."""
        return "nats_kv"

    def parse_options(self, mode: Mode | None = None) -> KvOptions:
        """The options, validated for ``mode``."""
        return kv_options(self.options, mode)

    def _write_options(self, schema: StructType) -> KvWriteOptions:
        options = kv_write_options(self.options)
        validate_columns(schema, self.name())
        return replace(options, has_ttl="ttl" in schema.names)


class NatsStreamDataSource(NatsFormat):
    """The messages of a NATS JetStream stream, as rows."""

    @classmethod
    def name(cls) -> str:
        """The argument of ``format()``."""
        return "nats_stream"

    def parse_options(self, mode: Mode | None = None) -> StreamOptions:
        """The options, validated for ``mode``."""
        return stream_options(self.options, mode)

    def _write_options(self, schema: StructType) -> StreamWriteOptions:
        options = stream_write_options(self.options)
        validate_columns(
            schema, self.name(), required=("subject",) if options.subject is None else ()
        )
        return options


_INTEGERS = (ByteType, ShortType, IntegerType, LongType)


def validate_columns(
    schema: StructType, format_name: str, *, required: tuple[str, ...] = ()
) -> None:
    """Raise OptionError for a DataFrame that cannot be written.

    A column that the format reads can stand in it, so that rows that were read can be written
    elsewhere (``rows.columns``). Any other column is an error, since a row would lose it without a
    message.

    ``required`` are columns that the options require, beside those of the format.
    """
    columns = {column.name: column.written for column in COLUMNS[format_name]}
    written = {name: column for name, column in columns.items() if column is not None}
    failed = f"could not write with format {format_name!r}: "
    expected = ", ".join(f"{name} {column.type}" for name, column in written.items())
    seen: set[str] = set()
    for field in schema:
        name = field.name
        if name in seen:
            raise OptionError(f"{failed}column {name!r} occurs twice; rename or drop one of them")
        seen.add(name)
        if name not in columns:
            near = difflib.get_close_matches(name.lower(), written, n=1)
            hint = f"rename it to {near[0]!r}, or " if near else ""
            raise OptionError(
                f"{failed}column {name!r} is unknown, expected {expected}; {hint}select the "
                f"columns to write"
            )
        if (column := columns[name]) is not None and not _fits(field.dataType, column.type):
            several = ", or write to_json(...) for several values"
            raise OptionError(
                f"{failed}column {name!r} is {field.dataType.simpleString().upper()}, expected "
                f"{column.type}; cast it{several if 'BINARY' in column.type else ''}"
            )
    for name in (*required, *(name for name, column in written.items() if column.required)):
        if name not in seen:
            raise OptionError(
                f"{failed}column {name!r} is missing, expected {expected}; add it with "
                f"select(... AS {name})"
            )


def _fits(data_type: DataType, kind: str) -> bool:
    if kind == "BIGINT":
        return isinstance(data_type, _INTEGERS)
    if kind.startswith("MAP"):
        return (
            isinstance(data_type, MapType)
            and isinstance(data_type.keyType, StringType)
            and isinstance(data_type.valueType, ArrayType)
            and isinstance(data_type.valueType.elementType, StringType)
        )
    return isinstance(data_type, StringType) or (
        kind.startswith("BINARY") and isinstance(data_type, BinaryType)
    )
