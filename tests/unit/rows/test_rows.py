"""Frames to rows, without a server: types, markers, labels; the columns as DDL and in Arrow."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from nats_stream_source.errors import UndecodableError
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.options import kv_options
from nats_stream_source.rows.arrow import arrow_schema
from nats_stream_source.rows.base import Split
from nats_stream_source.rows.columns import COLUMNS, ddl
from nats_stream_source.rows.formats import KvFormat
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.framing.frames import Framer, Frames

CREATED = "2026-11-20T23:55:01.123456789Z"


def delivery(seq: int, key: str, value: bytes, headers: bytes = b"", pending: int = 0) -> bytes:
    reply = b"$JS.ACK.KV_b.c.1.%d.%d.1795226905622377%03d.%d" % (seq, seq, seq, pending)
    subject = b"$KV.b." + key.encode()
    if not headers:
        return b"MSG %s 1 %s %d\r\n%s\r\n" % (subject, reply, len(value), value)
    block = b"NATS/1.0\r\n" + headers + b"\r\n\r\n"
    sizes = b"%d %d" % (len(block), len(block) + len(value))
    return b"HMSG %s 1 %s %s\r\n%s%s\r\n" % (subject, reply, sizes, block, value)


FRAMES = Framer().feed(
    delivery(7, "a.x", b"one", pending=3)
    + delivery(8, "a.y", b"", b"KV-Operation: DEL", pending=2)
    + delivery(9, "b", b"", b"KV-Operation: PURGE\r\nNats-Rollup: sub", pending=1)
    + delivery(12, "a.x", b"", b"Status: 404")
)

RANGE = RangeRequest("KV_b", KnownStream(CREATED), 0, 20, prefix="$KV.b.")


def kv_format(**options: str) -> KvFormat:
    return KvFormat(kv_options({"servers": "nats://127.0.0.1", "bucket": "b", **options}))


def rows(frames: Frames = FRAMES, initial_through: int = 8, **options: str) -> list[dict[str, Any]]:
    query = kv_format(**options)
    split = Split(RANGE, initial_through)
    batch = query.record_batch(Deliveries.of(frames), split)
    batch.validate(full=True)
    assert batch.schema.equals(arrow_schema("nats_kv", query.options.added_columns))
    found: list[dict[str, Any]] = batch.to_pylist()
    return found


def column(name: str, **changed: Any) -> list[Any]:
    return [row[name] for row in rows(**changed)]


def test_row_complete() -> None:
    assert rows()[0] == {
        "bucket": "b",
        "key": "a.x",
        "value": b"one",
        "revision": 7,
        # ….622377007 in nanoseconds, floored
        "created": datetime(2026, 11, 21, 2, 8, 25, 622377, tzinfo=timezone.utc),
        "operation": "PUT",
        "delta": 3,
        "initial": True,
        "stream_created": datetime(2026, 11, 20, 23, 55, 1, 123456, tzinfo=timezone.utc),
    }


def test_markers_have_null_value_and_empty_value_is_kept() -> None:
    assert column("operation") == ["PUT", "DEL", "PURGE", "PUT"]
    assert column("value") == [b"one", None, None, b""]
    assert column("key") == ["a.x", "a.y", "b", "a.x"]
    assert column("delta") == [3, 2, 1, 0]


def test_initial_values_end_at_given_sequence() -> None:
    assert column("initial") == [True, True, False, False]
    assert column("initial", initial_through=0) == [False] * 4
    assert column("initial", initial_through=12) == [True] * 4


def test_rows_without_values() -> None:
    assert column("value", metaOnly="true") == [None] * 4
    assert column("operation", metaOnly="true") == ["PUT", "DEL", "PURGE", "PUT"]


def test_rows_without_markers() -> None:
    assert column("revision", ignoreDeletes="true") == [7, 12]


ENCODED = Framer().feed(
    delivery(1, "L2E.dXNlcjox", b"b25l")
    + delivery(2, "L2E.dXNlcjox", b"", b"KV-Operation: DEL")
    + delivery(3, "plain", b"b25l")
    + delivery(4, "Yg", b"not base64")
    + delivery(5, "Yw", b"")
    + delivery(6, "YR", b"dHdv")  # spare bits: not the encoding of 'a'
    + delivery(7, "d_-", b"", b"KV-Operation: PURGE")
)

CODECS = {"keyCodec": "base64", "valueCodec": "base64"}


def encoded(name: str, frames: Frames = ENCODED, **options: str) -> list[Any]:
    return column(name, frames=frames, **CODECS, **options)


def test_codecs_decode_keys_and_values_of_puts() -> None:
    frames = ENCODED.select(np.array([0, 1, 4]))
    assert encoded("key", frames) == ["/a.user:1", "/a.user:1", "c"]
    assert encoded("value", frames) == [b"one", None, b""]
    assert encoded("operation", frames) == ["PUT", "DEL", "PUT"]
    assert encoded("value", frames, metaOnly="true") == [None] * 3
    raw = encoded(
        "raw_key", frames, includeRawKey="true", includeHeaders="true", includeOrigin="true"
    )
    assert raw == ["L2E.dXNlcjox", "L2E.dXNlcjox", "Yw"]
    assert column("value", frames=frames, keyCodec="base64") == [b"b25l", None, b""]
    assert column("key", frames=frames, valueCodec="base64") == raw


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (2, "the key of entry 'plain' of bucket 'b', revision 3: it is not what 'base64' encodes"),
        (3, "the value of entry 'Yg' of bucket 'b', revision 4: it is not what 'base64' encodes"),
        (5, "the key of entry 'YR' of bucket 'b', revision 6"),
        (6, "the key of entry 'd_-' of bucket 'b', revision 7"),
    ],
)
def test_undecodable_entry_fails(row: int, text: str) -> None:
    with pytest.raises(UndecodableError, match=f"could not decode {text}"):
        encoded("key", ENCODED.select(np.array([0, row])))


def test_undecodable_entries_are_null() -> None:
    keys = ["/a.user:1", "/a.user:1", None, "b", "c", None, None]
    assert encoded("key", onUndecodable="null") == keys
    values = [b"one", None, b"one", None, b"", b"two", None]
    assert encoded("value", onUndecodable="null") == values
    raw = encoded("raw_key", onUndecodable="null", includeRawKey="true")
    assert raw[2:4] == ["plain", "Yg"]


def test_undecodable_entries_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    query = kv_format(**CODECS, onUndecodable="skip", ignoreDeletes="true")
    split = Split(RANGE, 8)
    batches = list(
        query.reported(
            batch for _ in range(2) for batch in query.rows(Deliveries.of(ENCODED), split)
        )
    )
    assert [batch.column("revision").to_pylist() for batch in batches] == [[1, 5]] * 2
    # The marker with an undecodable key is not counted: ignoreDeletes leaves it out.
    assert [record.message for record in caplog.records] == [
        "undecodable entries were skipped bucket=b count=6 raw_key=plain revision=3"
    ]
    assert encoded("revision", onUndecodable="skip") == [1, 2, 5]


def test_undecodable_markers_are_ignored_with_ignore_deletes() -> None:
    frames = ENCODED.select(np.array([0, 6]))
    assert encoded("revision", frames, ignoreDeletes="true") == [1]


@pytest.mark.parametrize(
    "added",
    [set(), {"includeHeaders"}, {"includeHeaders", "includeOrigin", "includeRawKey"}],
    ids=len,
)
@pytest.mark.parametrize("name", COLUMNS)
def test_arrow_schema_equals_schema_of_ddl(spark: SparkSession, name: str, added: set[str]) -> None:
    """Down to the names of a map's fields, which pyarrow's own comparison ignores."""
    assert spark.version  # a schema from DDL needs a session
    schema = arrow_schema(name, frozenset(added))
    columns = ddl(name, added)
    assert ("raw_key" in columns) == (name == "nats_kv" and "includeRawKey" in added)
    expected: Any = to_arrow_schema(StructType.fromDDL(columns), timezone="UTC")
    assert schema.equals(expected)
    assert str(schema) == str(expected)
