"""Rows to messages: what both formats need to encode Arrow record batches as ``MessageColumns``.

A row that cannot be written is an error before any row of its record batch is sent. The error names
the row by its number within the partition, and the key or subject.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.errors import (
    ConfigurationError,
    MessageTooLargeError,
    NatsSourceError,
)
from nats_stream_source.wire.publish import headers
from nats_stream_source.wire.publish.content_hash import combine, hash_column
from nats_stream_source.wire.publish.frames import MessageColumns
from nats_stream_source.wire.publish.unsendable import Unsendable

_BINARY, _STRING = pa.binary(), pa.string()
_NO_BYTES = pa.scalar(b"", _BINARY)


@dataclass(slots=True)
class BatchPosition:
    """The position of a record batch within a task.

    Attributes:
        partition: the number of the task's partition.
        row: the number of the batch's first row within the partition.
    """

    partition: int
    row: int = 0


@dataclass(frozen=True, slots=True)
class MessageIds:
    """The ids that ``messageId=auto``, and compare-and-set, give to messages.

    ``<job>.<partition>.<row>.<hash of the message>``: the same for a row in each attempt of its
    task, and another one for a row with other content, so that a repetition in another order stores
    rows twice and never drops one.

    Attributes:
        job: the name of the query and its micro-batch, or of the batch job.
        every: whether all messages get one, or only conditional ones.
    """

    job: str
    every: bool


class RowEncoder:
    """Base of the two formats: reads columns and raises errors that name a row.

    Args:
        target: the bucket or stream, for errors: ``bucket 'fleet'``.
        max_message_size: the stream's limit in bytes; None without one.
        unsendable: what to do with headers that cannot be sent unchanged.

    Attributes:
        changed_headers: the number of those that were skipped or encoded.
    """

    def __init__(
        self,
        target: str,
        ids: MessageIds,
        max_message_size: int | None,
        unsendable: Unsendable = Unsendable.FAIL,
    ) -> None:
        self.changed_headers = 0
        self._unsendable = unsendable
        self._target = target
        self._ids = ids
        self._max_message_size = max_message_size

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array | None:
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

    def _require(
        self,
        good: pa.Array,
        position: BatchPosition,
        names: pa.Array,
        problem: str,
        kind: type[NatsSourceError] = ConfigurationError,
    ) -> None:
        """Raise an error for the first row for which ``good`` is not true.

        Args:
            problem: what was observed and expected, and the action.
        """
        good = good.fill_null(False)
        if len(good) and not pc.all(good).as_py():
            raise self._error(pc.index(good, False).as_py(), position, names, problem, kind)

    def _error(
        self,
        index: int,
        position: BatchPosition,
        names: pa.Array,
        problem: str,
        kind: type[NatsSourceError] = ConfigurationError,
    ) -> NatsSourceError:
        name = names[index].as_py()
        row = f"row {position.row + index} of partition {position.partition}"
        return kind(f"could not write {row} to {self._target}: {self._name} {name!r}: {problem}")

    _name = ""

    def _header_fields(
        self, batch: pa.RecordBatch, position: BatchPosition, names: pa.Array
    ) -> list[pa.Array]:
        """The fields of the column ``headers``."""
        maps = self._column(batch, "headers")
        if maps is None or maps.null_count == len(maps):
            return []
        try:
            fields, changed = headers.map_fields(maps, self._unsendable)
        except headers.HeaderError as error:
            problem = f"header {error.problem}; set option 'invalidHeaders' to 'encode' or 'skip'"
            raise self._error(error.row, position, names, problem) from None
        self.changed_headers += changed
        return [fields]

    def _message_ids(
        self,
        position: BatchPosition,
        names: pa.Array,
        payloads: pa.Array,
        fields: Sequence[pa.Array],
    ) -> pa.Array:
        content = combine(hash_column(names), hash_column(payloads))
        for field in fields:
            content = combine(content, hash_column(field))
        rows = np.arange(position.row, position.row + len(names))
        return pc.binary_join_element_wise(
            f"{self._ids.job}.{position.partition}", pa.array(rows).cast(_STRING),
            pa.array(content).cast(_STRING), ".",
        )  # fmt: skip

    def _messages(
        self,
        names: pa.Array,
        prefix: str,
        payloads: pa.Array,
        fields: Sequence[pa.Array],
        position: BatchPosition,
    ) -> MessageColumns:
        subjects = names.cast(_BINARY)
        if prefix:
            subjects = pc.binary_join_element_wise(
                pa.scalar(prefix.encode(), _BINARY), subjects, _NO_BYTES
            )
        messages = MessageColumns(subjects, payloads, headers.blocks(fields))
        if self._max_message_size is not None:
            sizes = messages.sizes()
            if len(messages) and int(sizes.max()) > self._max_message_size:
                index = int((sizes > self._max_message_size).argmax())
                problem = (
                    f"the message has {sizes[index]} bytes, expected at most "
                    f"{self._max_message_size}; write a smaller value, or raise the limit"
                )
                raise self._error(index, position, names, problem, MessageTooLargeError)
        return messages
