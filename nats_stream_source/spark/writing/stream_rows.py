"""Rows of ``nats_stream`` as messages: subjects, data, headers and message ids."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.errors import InvalidNameError
from nats_stream_source.jetstream.publish.pub_ack import MSG_ID
from nats_stream_source.jetstream.subjects import filter_pattern
from nats_stream_source.spark.writing.rows import BatchPosition, MessageIds, RowEncoder
from nats_stream_source.wire.publish import headers
from nats_stream_source.wire.publish.frames import MessageColumns
from nats_stream_source.wire.publish.unsendable import Unsendable

_BINARY, _STRING = pa.binary(), pa.string()
_SUBJECT = r"^[^.*>\s\x00]+(?:\.[^.*>\s\x00]+)*$"


class StreamRowEncoder(RowEncoder):
    """Rows of ``nats_stream``: subjects, data, headers and message ids.

    Args:
        subject: the subject of all rows; None: the column ``subject`` has them.
        filters: the subjects of the stream; empty if they are not known under these names.
    """

    _name = "subject"

    def __init__(
        self,
        stream: str,
        subject: str | None,
        filters: Sequence[str],
        ids: MessageIds,
        max_message_size: int | None,
        unsendable: Unsendable = Unsendable.FAIL,
    ) -> None:
        super().__init__(f"stream {stream!r}", ids, max_message_size, unsendable)
        self._subject = subject
        self._filters = filter_pattern(filters) if filters else None
        self._expected = ", ".join(repr(one) for one in filters)

    def encode(self, batch: pa.RecordBatch, position: BatchPosition) -> MessageColumns:
        """The messages of a record batch.

        Raises:
            InvalidNameError: a subject is null, has a wildcard, or is not a subject of the stream.
            ConfigurationError: data is null, or a header or an id cannot be sent.
            MessageTooLargeError: a message exceeds a limit of the server or the stream.
        """
        if self._subject is not None:
            subjects = pa.repeat(pa.scalar(self._subject, _STRING), batch.num_rows)
        else:
            column = self._column(batch, "subject")
            assert column is not None, "the driver has checked the columns"
            subjects = column
        self._require(
            pc.match_substring_regex(subjects, _SUBJECT), position, subjects,
            "expected tokens between dots, without wildcards and white space", InvalidNameError,
        )  # fmt: skip
        if self._filters is not None:
            self._require(
                pc.match_substring_regex(subjects, self._filters), position, subjects,
                f"the stream does not have the subject, expected one of {self._expected}; change "
                f"the subject, or the stream's subjects", InvalidNameError,
            )  # fmt: skip
        data = self._column(batch, "data")
        assert data is not None, "the driver has checked the columns"
        self._require(data.is_valid(), position, subjects, "data is null; write empty data as ''")
        payloads = data.cast(_BINARY)
        fields = self._header_fields(batch, position, subjects)
        ids = self._column(batch, "msg_id")
        if ids is not None and ids.null_count < len(ids):
            self._require(
                pc.match_substring_regex(ids, r"^[^\s][^\r\n]*$").fill_null(True), position,
                subjects, "msg_id is empty, starts with white space or contains a line break",
            )  # fmt: skip
        else:
            ids = None
        if self._ids.every:
            automatic = self._message_ids(position, subjects, payloads, fields)
            ids = automatic if ids is None else pc.coalesce(ids, automatic)
        if ids is not None:
            fields.append(headers.field(MSG_ID, ids))
        return self._messages(subjects, "", payloads, fields, position)
