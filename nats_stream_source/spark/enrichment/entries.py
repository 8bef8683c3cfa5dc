"""Adds the entries of a bucket to record batches: runs on an executor.

The distinct keys of a record batch are requested once, and the rows take their entry by the key's
position: no Python object is created for a row. The connection is the one that this process keeps
for all tasks (``spark.runner``).

A key that the bucket cannot have (ADR-8 does not allow it, it is too long, or ``keyCodec`` cannot
encode it) does not have an entry. It is not sent: ``>`` would match all keys. Such keys are counted
and reported in the log.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.jetstream.direct_get.last_messages import last_columns
from nats_stream_source.jetstream.kv.bucket import Bucket, bucket_errors, stream_info_with_revision
from nats_stream_source.jetstream.kv.codec import OnUndecodable
from nats_stream_source.jetstream.kv.requests import with_origin
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.subjects import KEY_PATTERN
from nats_stream_source.logs import field_logger
from nats_stream_source.options.reading import ENTRY_COLUMNS, LOOKUP, LookupOptions
from nats_stream_source.options.table import add_option_hints
from nats_stream_source.rows.arrow import arrow_schema
from nats_stream_source.spark.runner import cached_runner
from nats_stream_source.wire.codec import decode_key, decode_value, each, encode_key

log = field_logger(__name__)

_MAX_BYTES = 64 << 20  # of the values in a record batch, and of those that are requested at a time
_REST_OF_LINE = 2  # bytes of a PUB beside its subject: a longer subject cannot have a message
_KEY = rf"^{KEY_PATTERN}$"


@dataclass(frozen=True, slots=True)
class Lookup:
    """A call of ``lookup``; Spark pickles it to each task.

    Attributes:
        key: the position of the key's column.
        columns: the columns of the entries, of :data:`ENTRY_COLUMNS`, by the names of the result.
    """

    options: LookupOptions
    key: int
    columns: dict[str, str]


def with_entries(batches: Iterator[pa.RecordBatch], lookup: Lookup) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``batches``, in their order, with the columns of their keys' entries."""
    options = lookup.options
    runner = cached_runner(options.connection)
    runner.connect(options.outage_timeout)
    reader = _EntryReader(options)
    try:
        for batch in batches:
            rest = batch
            while rest.num_rows:
                keys = rest.column(lookup.key)
                read = functools.partial(reader.read, runner.connection, keys)
                entries, positions = runner.retry_transient(read)
                for rows in _pieces(entries, positions):
                    part = positions.slice(rows.start, len(rows))
                    yield _joined(rest.slice(rows.start, len(rows)), entries, part, lookup)
                rest = rest.slice(len(positions))
    finally:
        reader.report()


class _EntryReader:
    """Reads the entries of keys, batch by batch."""

    def __init__(self, options: LookupOptions) -> None:
        self._options = options
        self._unusable = 0
        self._first_unusable: str | None = None

    async def read(
        self, connection: ReusableConnection, keys: pa.Array
    ) -> tuple[pa.Table, pa.Array]:
        """The entries of the first keys, of as many as the size of values permits.

        With the position of the entry for each of these keys, null for a key without a value.
        """
        options = self._options
        jetstream = await connection.jetstream()
        info = await stream_info_with_revision(jetstream, options.bucket, options.min_last_revision)
        bucket = Bucket.of(await with_origin(jetstream, info))
        rows = max(1, int(_MAX_BYTES // max(1.0, info.mean_size)))
        encoded = keys.slice(0, rows).dictionary_encode()
        longest = jetstream.connection.control_line.limit - _REST_OF_LINE
        subjects = self._subjects(encoded.dictionary.cast(pa.string()), bucket.prefix, longest)
        with bucket_errors(jetstream, options.bucket):
            found = await last_columns(jetstream, info, subjects.drop_null())
        found = found.filter(pc.equal(found["operation"], "PUT"))
        position = pc.index_in(subjects, value_set=found["subject"].combine_chunks())
        return self._entries(found, bucket.prefix), position.take(encoded.indices)

    def _subjects(self, keys: pa.Array, prefix: str, longest: int) -> pa.Array:
        """The subjects of distinct keys; null for a key that the bucket cannot have."""
        chain = self._options.codec.key
        raw = each(encode_key, chain, keys) if chain else keys
        usable = pc.match_substring_regex(raw, _KEY)
        if chain:
            usable = pc.and_(usable, pc.equal(each(decode_key, chain, raw), keys).fill_null(False))
        subjects = pc.binary_join_element_wise(prefix, raw, "")
        usable = pc.and_(usable, pc.less_equal(pc.binary_length(subjects), longest))
        if (first := pc.index(usable, False).as_py()) < 0:
            return subjects
        self._unusable += len(usable) - pc.sum(usable).as_py()
        if self._first_unusable is None:
            self._first_unusable = keys[first].as_py()
        return pc.if_else(usable, subjects, pa.scalar(None, pa.string()))

    def _entries(self, found: pa.Table, prefix: str) -> pa.Table:
        values, codec = found["data"], self._options.codec
        if codec.value:
            raw = values.combine_chunks()
            values = each(decode_value, codec.value, raw)
            if values.null_count and codec.on_undecodable is OnUndecodable.FAIL:
                entry = found.slice(pc.index(values.is_null(), True).as_py(), 1).to_pylist()[0]
                raw_key = entry["subject"].removeprefix(prefix)
                error = codec.undecodable(self._options.bucket, raw_key, entry["sequence"])
                add_option_hints(error, LOOKUP)
                raise error
        created = found["time"].cast(arrow_schema("nats_kv").field("created").type, safe=False)
        return pa.table([values, found["sequence"], created], list(ENTRY_COLUMNS))

    def report(self) -> None:
        """Log the number of keys that the bucket cannot have, if there were some."""
        if self._unusable:
            log.warning(
                "keys that the bucket cannot have are without an entry",
                bucket=self._options.bucket,
                count=self._unusable,
                key=self._first_unusable,
            )


def _pieces(entries: pa.Table, positions: pa.Array) -> Iterator[range]:
    """Divide rows so that the values of a record batch do not exceed its size, except of one."""
    sizes = pc.binary_length(entries["value"]).take(positions).fill_null(0)
    ends = np.cumsum(sizes.to_numpy(), dtype=np.int64)
    start = 0
    while start < ends.size:
        before = int(ends[start - 1]) if start else 0
        end = max(start + 1, int(ends.searchsorted(before + _MAX_BYTES, side="right")))
        yield range(start, end)
        start = end


def _joined(
    rows: pa.RecordBatch, entries: pa.Table, positions: pa.Array, lookup: Lookup
) -> pa.RecordBatch:
    selected = entries.select(list(lookup.columns.values())).take(positions)
    schema, columns = rows.schema, list(rows.columns)
    for name, column in zip(lookup.columns, selected.columns, strict=True):
        schema = schema.append(pa.field(name, column.type))
        columns.append(column.combine_chunks())
    return pa.RecordBatch.from_arrays(columns, schema=schema)
