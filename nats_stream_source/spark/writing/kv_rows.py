"""Rows of ``nats_kv`` as messages: keys, values, operations, revisions, TTLs and headers."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.errors import (
    InvalidNameError,
    KeyNotEncodableError,
    TtlNotSupportedError,
)
from nats_stream_source.jetstream.kv.codec import NO_CODEC, KvCodec
from nats_stream_source.jetstream.publish.pub_ack import (
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    MSG_ID,
    ROLLUP,
    TTL,
)
from nats_stream_source.jetstream.subjects import KEY_PATTERN, RESERVED
from nats_stream_source.spark.writing.rows import BatchPosition, MessageIds, RowEncoder
from nats_stream_source.wire.codec import decode_key, each, encode_key, encode_value
from nats_stream_source.wire.headers import KV_OPERATION, OPERATIONS
from nats_stream_source.wire.publish import headers
from nats_stream_source.wire.publish.frames import MessageColumns
from nats_stream_source.wire.publish.unsendable import Unsendable

_BINARY, _STRING = pa.binary(), pa.string()
_NO_BYTES = pa.scalar(b"", _BINARY)
_KEY = rf"^{KEY_PATTERN}$"
_OPERATIONS = pa.array(OPERATIONS)


class KvRowEncoder(RowEncoder):
    """Rows of ``nats_kv``: keys, values, operations, revisions, TTLs and headers.

    Args:
        prefix: the part of each subject before the key.
        no_ttl: why the bucket does not accept a TTL; empty if it does.
        codec: how keys and values are stored.
    """

    _name = "key"

    def __init__(
        self,
        bucket: str,
        prefix: str,
        ids: MessageIds,
        max_message_size: int | None,
        no_ttl: str = "",
        codec: KvCodec = NO_CODEC,
        unsendable: Unsendable = Unsendable.FAIL,
    ) -> None:
        super().__init__(f"bucket {bucket!r}", ids, max_message_size, unsendable)
        self._codec = codec
        self._prefix = prefix
        self._no_ttl = no_ttl

    def encode(self, batch: pa.RecordBatch, position: BatchPosition) -> MessageColumns:
        """The messages of a record batch.

        Raises:
            InvalidNameError: a key is null, or the stored key is not valid (ADR-8).
            KeyNotEncodableError: the stored key would not decode to the key.
            ConfigurationError: a value is null, an operation is unknown, a revision or TTL is out
                of range, or a header cannot be sent.
            TtlNotSupportedError: the bucket does not accept a TTL.
            MessageTooLargeError: a message exceeds a limit of the server or the bucket.
        """
        keys = self._column(batch, "key")
        assert keys is not None, "the driver has checked the columns"
        raw_keys = self._raw_keys(keys, position) if self._codec.key else keys
        self._require(
            pc.match_substring_regex(raw_keys, _KEY), position, keys,
            "expected letters, digits and '-/_=.' only, not starting or ending with '.', no '..' "
            "(ADR-8)", InvalidNameError,
        )  # fmt: skip
        self._require(
            pc.invert(pc.starts_with(raw_keys, RESERVED)), position, keys,
            f"keys that start with {RESERVED!r} are reserved (ADR-8)", InvalidNameError,
        )  # fmt: skip
        fields: list[pa.Array] = []
        payloads = self._values(batch, keys, position, fields)
        revisions = self._revisions(batch, keys, position, fields)
        self._ttls(batch, keys, position, fields)
        fields += self._header_fields(batch, position, keys)
        if self._ids.every or revisions is not None:
            ids = self._message_ids(position, raw_keys, payloads, fields)
            if not self._ids.every and revisions is not None:
                ids = pc.if_else(revisions.is_valid(), ids, pa.scalar(None, _STRING))
            fields.append(headers.field(MSG_ID, ids))
        return self._messages(raw_keys, self._prefix, payloads, fields, position)

    def _raw_keys(self, keys: pa.Array, position: BatchPosition) -> pa.Array:
        raw_keys = each(encode_key, self._codec.key, keys)
        good = pc.equal(each(decode_key, self._codec.key, raw_keys), keys)
        # A null key is not an error of the codec.
        if not pc.all(good := pc.or_(good.fill_null(False), keys.is_null())).as_py():
            index = pc.index(good, False).as_py()
            problem = self._codec.problem(keys[index].as_py())
            raise self._error(index, position, keys, problem, KeyNotEncodableError)
        return raw_keys

    def _values(
        self, batch: pa.RecordBatch, keys: pa.Array, position: BatchPosition, fields: list[pa.Array]
    ) -> pa.Array:
        values = self._column(batch, "value")
        values = pa.nulls(len(keys), _BINARY) if values is None else values.cast(_BINARY)
        if self._codec.value:
            values = each(encode_value, self._codec.value, values)
        operations = self._column(batch, "operation")
        put: pa.Array | None = None
        if operations is not None:
            operations = operations.fill_null("PUT")
            self._require(
                pc.is_in(operations, _OPERATIONS), position, keys,
                "the operation is unknown, expected 'PUT', 'DEL', 'PURGE' or null",
            )  # fmt: skip
            put = pc.equal(operations, "PUT")
            if pc.all(put).as_py() is not False:
                put = None
        valid = values.is_valid() if put is None else pc.or_(values.is_valid(), pc.invert(put))
        self._require(
            valid, position, keys,
            "the value is null; write an empty value as '', or the operation 'DEL' to delete the "
            "key",
        )  # fmt: skip
        if put is None:
            return values
        assert operations is not None
        null = pa.scalar(None, _STRING)
        fields.append(headers.field(KV_OPERATION, pc.if_else(put, null, operations)))
        purge = pc.equal(operations, "PURGE")
        fields.append(headers.field(ROLLUP, pc.if_else(purge, pa.scalar("sub"), null)))
        return pc.if_else(put, values, _NO_BYTES)

    def _revisions(
        self, batch: pa.RecordBatch, keys: pa.Array, position: BatchPosition, fields: list[pa.Array]
    ) -> pa.Array | None:
        revisions = self._column(batch, "expected_revision")
        if revisions is None or revisions.null_count == len(revisions):
            return None
        self._require(
            pc.greater_equal(revisions, 0).fill_null(True), position, keys,
            "expected_revision is negative, expected 0 for a key that does not exist, or a "
            "revision",
        )  # fmt: skip
        fields.append(headers.field(EXPECTED_LAST_SUBJECT_SEQUENCE, revisions))
        return revisions

    def _ttls(
        self, batch: pa.RecordBatch, keys: pa.Array, position: BatchPosition, fields: list[pa.Array]
    ) -> None:
        ttls = self._column(batch, "ttl")
        if ttls is None or ttls.null_count == len(ttls):
            return
        if self._no_ttl:
            self._require(ttls.is_null(), position, keys, self._no_ttl, TtlNotSupportedError)
        self._require(
            pc.greater_equal(ttls, 1).fill_null(True), position, keys,
            "ttl is less than 1, expected seconds",
        )  # fmt: skip
        seconds = pc.binary_join_element_wise(ttls.cast(_STRING), pa.scalar("s"), "")
        fields.append(headers.field(TTL, seconds))
