"""Rows to messages: encodes Arrow record batches as ``MessageColumns``.

A row that cannot be written is an error before any row of its record batch is sent. The error names
the row by its number within the partition, and the key or subject.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.errors import (
    ConfigurationError,
    InvalidNameError,
    KeyNotEncodableError,
    MessageTooLargeError,
    NatsSourceError,
    TtlNotSupportedError,
)
from nats_stream_source.jetstream.kv.codec import NO_CODEC, KvCodec
from nats_stream_source.jetstream.publish.pub_ack import (
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    MSG_ID,
    ROLLUP,
    TTL,
)
from nats_stream_source.jetstream.subjects import KEY_PATTERN, RESERVED, filter_pattern
from nats_stream_source.wire.codec import decode_key, each, encode_key, encode_value
from nats_stream_source.wire.headers import KV_OPERATION, OPERATIONS
from nats_stream_source.wire.publish import headers
from nats_stream_source.wire.publish.frames import MessageColumns
from nats_stream_source.wire.publish.headers import combine, hash_column
from nats_stream_source.wire.publish.unsendable import Unsendable

_BINARY, _STRING = pa.binary(), pa.string()
_NO_BYTES = pa.scalar(b"", _BINARY)
_KEY = rf"^{KEY_PATTERN}$"
_SUBJECT = r"^[^.*>\s\x00]+(?:\.[^.*>\s\x00]+)*$"
_MSG_ID = r"^[^\s][^\r\n]*$"
_OPERATIONS = pa.array(OPERATIONS)


@dataclass(frozen=True, slots=True)
class MessageIds:
    """The ids that ``messageId=auto``, and compare-and-set, give to messages.

    ``<job>.<partition>.<row>.<hash of the message>``: the same for a row in each attempt of its
    task, and another one for a row with other content, so that a repetition in another order stores
    rows twice and never drops one.

    Attributes:
        job: the name of the query and its micro-batch, or of the batch job.
        partition: the number of the task's partition.
        every: whether all messages get one, or only conditional ones.
    """

    job: str
    partition: int
    every: bool


@dataclass(slots=True)
class _Rows:
    """The rows of a record batch that is encoded.

    Attributes:
        where: partition, target and kind of name, for errors.
        names: their keys or subjects.
        fields: the fields of their headers.
    """

    batch: pa.RecordBatch
    first: int
    where: str
    names: pa.Array
    fields: list[pa.Array] = field(default_factory=list)

    def column(self, name: str) -> pa.Array | None:
        """The column; None if it is missing or has only nulls."""
        column = _column(self.batch, name)
        return None if column is None or column.null_count == len(column) else column

    def require(
        self, good: pa.Array, problem: str, kind: type[NatsSourceError] = ConfigurationError
    ) -> None:
        """Raise an error for the first row for which ``good`` is not true."""
        good = good.fill_null(False)
        if len(good) and not pc.all(good).as_py():
            raise self.error(pc.index(good, False).as_py(), problem, kind)

    def error(
        self, index: int, problem: str, kind: type[NatsSourceError] = ConfigurationError
    ) -> NatsSourceError:
        return kind(
            f"could not write row {self.first + index} {self.where} "
            f"{self.names[index].as_py()!r}: {problem}"
        )


def _column(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    """The column, with Spark's large types cast to the usual ones; None if it is missing."""
    index = batch.schema.get_field_index(name)
    if index < 0:
        return None
    column = batch.column(index)
    if pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        return column.cast(_STRING)
    if pa.types.is_large_binary(column.type) or pa.types.is_binary_view(column.type):
        return column.cast(_BINARY)
    return column


@dataclass(slots=True)
class RowEncoder(ABC):
    """Encodes the record batches of a task, one after the other.

    Attributes:
        name: that of the bucket or stream.
        max_message_size: the limit of server and stream in bytes; None without one.
        unsendable: what to do with headers that cannot be sent unchanged.
        row: the number of the next row within the partition.
        changed_headers: the number of headers that were skipped or encoded.
    """

    name: str
    ids: MessageIds
    max_message_size: int | None = None
    unsendable: Unsendable = Unsendable.FAIL
    row: int = 0
    changed_headers: int = 0
    words: ClassVar[tuple[str, str]]
    """The kind of target, and what names a row, for errors."""

    def encode(self, batch: pa.RecordBatch) -> MessageColumns:
        """The messages of a record batch."""
        target, named = self.words
        where = f"of partition {self.ids.partition} to {target} {self.name!r}: {named}"
        rows = _Rows(batch, self.row, where, self._names(batch))
        messages = self._messages(rows)
        self.row += batch.num_rows
        return messages

    @abstractmethod
    def _names(self, batch: pa.RecordBatch) -> pa.Array: ...

    @abstractmethod
    def _messages(self, rows: _Rows) -> MessageColumns: ...

    def _add_headers(self, rows: _Rows) -> None:
        if (maps := rows.column("headers")) is None:
            return
        try:
            fields, changed = headers.map_fields(maps, self.unsendable)
        except headers.HeaderError as error:
            problem = f"header {error.problem}; set option 'invalidHeaders' to 'encode' or 'skip'"
            raise rows.error(error.row, problem) from None
        self.changed_headers += changed
        rows.fields.append(fields)

    def _message_ids(self, rows: _Rows, names: pa.Array, payloads: pa.Array) -> pa.Array:
        content = combine(hash_column(names), hash_column(payloads))
        for one in rows.fields:
            content = combine(content, hash_column(one))
        numbers = np.arange(rows.first, rows.first + len(names))
        return pc.binary_join_element_wise(
            f"{self.ids.job}.{self.ids.partition}", pa.array(numbers).cast(_STRING),
            pa.array(content).cast(_STRING), ".",
        )  # fmt: skip

    def _columns(self, rows: _Rows, subjects: pa.Array, payloads: pa.Array) -> MessageColumns:
        messages = MessageColumns(subjects, payloads, headers.blocks(rows.fields))
        if self.max_message_size is not None:
            sizes = messages.sizes()
            if len(messages) and int(sizes.max()) > self.max_message_size:
                index = int((sizes > self.max_message_size).argmax())
                problem = (
                    f"the message has {sizes[index]} bytes, expected at most "
                    f"{self.max_message_size}; write a smaller value, or raise the limit"
                )
                raise rows.error(index, problem, MessageTooLargeError)
        return messages


@dataclass(slots=True, kw_only=True)
class KvRowEncoder(RowEncoder):
    """Rows of ``nats_kv``: keys, values, operations, revisions, TTLs and headers.

    Raises:
        InvalidNameError: a key is null, or the stored key is not valid (ADR-8).
        KeyNotEncodableError: the stored key would not decode to the key.
        ConfigurationError: a value is null, an operation is unknown, a revision or TTL is out of
            range, or a header cannot be sent.
        TtlNotSupportedError: the bucket does not accept a TTL.
        MessageTooLargeError: a message exceeds a limit of the server or the bucket.

    Attributes:
        prefix: the part of each subject before the key.
        no_ttl: why the bucket does not accept a TTL; empty if it does.
        codec: how keys and values are stored.
    """

    prefix: str
    no_ttl: str = ""
    codec: KvCodec = NO_CODEC
    words = "bucket", "key"

    def _names(self, batch: pa.RecordBatch) -> pa.Array:
        return _column(batch, "key")

    def _messages(self, rows: _Rows) -> MessageColumns:
        raw_keys = self._raw_keys(rows) if self.codec.key else rows.names
        rows.require(
            pc.match_substring_regex(raw_keys, _KEY),
            "expected letters, digits and '-/_=.' only, not starting or ending with '.', no '..' "
            "(ADR-8)",
            InvalidNameError,
        )
        rows.require(
            pc.invert(pc.starts_with(raw_keys, RESERVED)),
            f"keys that start with {RESERVED!r} are reserved (ADR-8)",
            InvalidNameError,
        )
        payloads = self._values(rows)
        revisions = rows.column("expected_revision")
        if revisions is not None:
            rows.require(
                pc.greater_equal(revisions, 0).fill_null(True),
                "expected_revision is negative, expected 0 for a key that does not exist, or a "
                "revision",
            )
            rows.fields.append(headers.field(EXPECTED_LAST_SUBJECT_SEQUENCE, revisions))
        self._add_ttls(rows)
        self._add_headers(rows)
        if self.ids.every or revisions is not None:
            ids = self._message_ids(rows, raw_keys, payloads)
            if not self.ids.every and revisions is not None:
                ids = pc.if_else(revisions.is_valid(), ids, pa.scalar(None, _STRING))
            rows.fields.append(headers.field(MSG_ID, ids))
        subjects = pc.binary_join_element_wise(
            pa.scalar(self.prefix.encode()), raw_keys.cast(_BINARY), _NO_BYTES
        )
        return self._columns(rows, subjects, payloads)

    def _raw_keys(self, rows: _Rows) -> pa.Array:
        raw_keys = each(encode_key, self.codec.key, rows.names)
        good = pc.equal(each(decode_key, self.codec.key, raw_keys), rows.names)
        # A null key is not an error of the codec.
        if not pc.all(good := pc.or_(good.fill_null(False), rows.names.is_null())).as_py():
            index = pc.index(good, False).as_py()
            problem = self.codec.problem(rows.names[index].as_py())
            raise rows.error(index, problem, KeyNotEncodableError)
        return raw_keys

    def _values(self, rows: _Rows) -> pa.Array:
        values = rows.column("value")
        values = pa.nulls(len(rows.names), _BINARY) if values is None else values.cast(_BINARY)
        if self.codec.value:
            values = each(encode_value, self.codec.value, values)
        good, put = values.is_valid(), None
        if (operations := rows.column("operation")) is not None:
            operations = operations.fill_null("PUT")
            rows.require(
                pc.is_in(operations, _OPERATIONS),
                "the operation is unknown, expected 'PUT', 'DEL', 'PURGE' or null",
            )
            put = pc.equal(operations, "PUT")
            good = pc.or_(good, pc.invert(put))
        rows.require(
            good,
            "the value is null; write an empty value as '', or the operation 'DEL' to delete the "
            "key",
        )
        if put is None or pc.all(put).as_py() is not False:
            return values
        null = pa.scalar(None, _STRING)
        purge = pc.equal(operations, "PURGE")
        rows.fields.append(headers.field(KV_OPERATION, pc.if_else(put, null, operations)))
        rows.fields.append(headers.field(ROLLUP, pc.if_else(purge, pa.scalar("sub"), null)))
        return pc.if_else(put, values, _NO_BYTES)

    def _add_ttls(self, rows: _Rows) -> None:
        if (ttls := rows.column("ttl")) is None:
            return
        if self.no_ttl:
            rows.require(ttls.is_null(), self.no_ttl, TtlNotSupportedError)
        rows.require(
            pc.greater_equal(ttls, 1).fill_null(True), "ttl is less than 1, expected seconds"
        )
        seconds = pc.binary_join_element_wise(ttls.cast(_STRING), pa.scalar("s"), "")
        rows.fields.append(headers.field(TTL, seconds))


@dataclass(slots=True, kw_only=True)
class StreamRowEncoder(RowEncoder):
    """Rows of ``nats_stream``: subjects, data, headers and message ids.

    Raises:
        InvalidNameError: a subject is null, has a wildcard, or is not a subject of the stream.
        ConfigurationError: data is null, or a header or an id cannot be sent.
        MessageTooLargeError: a message exceeds a limit of the server or the stream.

    Attributes:
        subject: the subject of all rows; None: the column ``subject`` has them.
        filters: the subjects of the stream; empty if they are not known under these names.
    """

    subject: str | None
    filters: Sequence[str]
    words = "stream", "subject"

    def _names(self, batch: pa.RecordBatch) -> pa.Array:
        if self.subject is None:
            return _column(batch, "subject")
        return pa.repeat(pa.scalar(self.subject, _STRING), batch.num_rows)

    def _messages(self, rows: _Rows) -> MessageColumns:
        subjects, data = rows.names, _column(rows.batch, "data")
        assert data is not None, "the driver has checked the columns"
        rows.require(
            pc.match_substring_regex(subjects, _SUBJECT),
            "expected tokens between dots, without wildcards and white space",
            InvalidNameError,
        )
        if self.filters:
            expected = ", ".join(repr(one) for one in self.filters)
            rows.require(
                pc.match_substring_regex(subjects, filter_pattern(self.filters)),
                f"the stream does not have the subject, expected one of {expected}; change the "
                f"subject, or the stream's subjects",
                InvalidNameError,
            )
        rows.require(data.is_valid(), "data is null; write empty data as ''")
        payloads = data.cast(_BINARY)
        self._add_headers(rows)
        if (ids := rows.column("msg_id")) is not None:
            rows.require(
                pc.match_substring_regex(ids, _MSG_ID).fill_null(True),
                "msg_id is empty, starts with white space or contains a line break",
            )
        if self.ids.every:
            automatic = self._message_ids(rows, subjects, payloads)
            ids = automatic if ids is None else pc.coalesce(ids, automatic)
        if ids is not None:
            rows.fields.append(headers.field(MSG_ID, ids))
        return self._columns(rows, subjects.cast(_BINARY), payloads)
