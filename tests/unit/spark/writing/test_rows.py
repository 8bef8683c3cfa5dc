"""Rows of buckets and streams as messages, and the rows that are refused."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.errors import (
    ConfigurationError,
    InvalidNameError,
    KeyNotEncodableError,
    MessageTooLargeError,
    NatsSourceError,
    TtlNotSupportedError,
)
from nats_stream_source.jetstream.kv.codec import KvCodec
from nats_stream_source.jetstream.subjects import validate_written_key
from nats_stream_source.spark.writing.rows import KvRowEncoder, MessageIds, StreamRowEncoder
from nats_stream_source.wire.header_columns import HEADERS
from nats_stream_source.wire.headers import parse_headers
from nats_stream_source.wire.publish.frames import MessageColumns

TYPES: dict[str, pa.DataType] = {
    "key": pa.string(),
    "value": pa.binary(),
    "operation": pa.string(),
    "expected_revision": pa.int64(),
    "ttl": pa.int32(),
    "headers": HEADERS,
}


def batch(*rows: dict[str, Any], **types: pa.DataType) -> pa.RecordBatch:
    names = [name for name in TYPES if any(name in row for row in rows)]
    arrays = [
        pa.array([row.get(name) for row in rows], types.get(name, TYPES[name])) for name in names
    ]
    return pa.RecordBatch.from_arrays(arrays, names=names)


def encode(
    *rows: dict[str, Any], every: bool = False, row: int = 0, **settings: Any
) -> MessageColumns:
    types = settings.pop("types", {})
    ids = MessageIds("job", 2, every)
    encoder = KvRowEncoder("fleet", ids, prefix="$KV.fleet.", **settings)
    encoder.row = row
    return encoder.encode(batch(*rows, **types))


def messages(columns: MessageColumns) -> list[tuple[str, bytes, dict[str, str]]]:
    blocks = (
        [None] * len(columns.subjects) if columns.headers is None else columns.headers.to_pylist()
    )
    return [
        (columns.subject(i), payload, dict(parse_headers(block).fields) if block else {})
        for i, (payload, block) in enumerate(zip(columns.payloads.to_pylist(), blocks, strict=True))
    ]


def test_puts_have_no_headers() -> None:
    columns = encode({"key": "a", "value": b"1"}, {"key": "b.c", "value": b""})
    assert columns.headers is None
    assert messages(columns) == [("$KV.fleet.a", b"1", {}), ("$KV.fleet.b.c", b"", {})]


@pytest.mark.parametrize(
    "types",
    [
        {"value": pa.string()},
        {"value": pa.large_string(), "key": pa.large_string()},
        {"value": pa.large_binary()},
    ],
)
def test_types_of_values(types: dict[str, pa.DataType]) -> None:
    value = (
        "é" if pa.types.is_string(types["value"]) or types["value"] == pa.large_string() else b"e"
    )
    columns = encode({"key": "a", "value": value}, types=types)
    assert messages(columns)[0][1] == (value.encode() if isinstance(value, str) else value)


def test_operations() -> None:
    columns = encode(
        {"key": "a", "value": b"1"},
        {"key": "b", "value": b"left over", "operation": "DEL"},
        {"key": "c", "operation": "PURGE"},
        {"key": "d", "value": b"2", "operation": "PUT"},
    )
    assert messages(columns) == [
        ("$KV.fleet.a", b"1", {}),
        ("$KV.fleet.b", b"", {"KV-Operation": "DEL"}),
        ("$KV.fleet.c", b"", {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}),
        ("$KV.fleet.d", b"2", {}),
    ]


def test_frame_without_values_deletes() -> None:
    assert messages(encode({"key": "a", "operation": "DEL"})) == [
        ("$KV.fleet.a", b"", {"KV-Operation": "DEL"})
    ]


def test_revisions_ttls_and_headers() -> None:
    columns = encode(
        {"key": "a", "value": b"1", "expected_revision": 0, "ttl": 60},
        {"key": "b", "value": b"1", "headers": [("Trace", ["x"]), ("Nats-Rollup", ["all"])]},
        {"key": "c", "value": b"1"},
    )
    first, second, third = (fields for _, _, fields in messages(columns))
    assert first.pop("Nats-Msg-Id").startswith("job.2.0.")
    assert first == {"Nats-Expected-Last-Subject-Sequence": "0", "Nats-TTL": "60s"}
    assert second == {"Trace": "x"}
    assert third == {}


def test_message_ids() -> None:
    def ids(*rows: dict[str, Any], row: int = 0) -> list[str]:
        columns = encode(*rows, every=True, row=row)
        return [fields["Nats-Msg-Id"] for _, _, fields in messages(columns)]

    a, b = {"key": "a", "value": b"1"}, {"key": "b", "value": b"1"}
    assert ids(a, b, a) == ids(a, b, a), "the same in each attempt"
    assert len(set(ids(a, a, b))) == 3, "equal rows are different messages"
    assert ids(a, b)[1] == ids(b, row=1)[0], "whatever record batches the rows came in"
    assert ids(a)[0].rpartition(".")[0] == ids(b)[0].rpartition(".")[0] == "job.2.0"
    assert ids(a) != ids(b), "another row at the same position is another message"
    different = [
        {**a, "value": b"2"},
        {**a, "operation": "DEL"},
        {**a, "headers": [("A", ["b"])]},
        {**a, "ttl": 5},
    ]
    assert len({ids(one)[0] for one in [a, *different]}) == 5


REFUSED: list[tuple[dict[str, Any], type[NatsSourceError], str]] = [
    ({"key": None}, InvalidNameError, "key None: expected letters"),
    ({"key": ""}, InvalidNameError, "key '': expected letters"),
    ({"key": "a b"}, InvalidNameError, "key 'a b': expected letters"),
    ({"key": "a\n"}, InvalidNameError, r"key 'a\n': expected letters"),
    ({"key": ".a"}, InvalidNameError, "expected letters"),
    ({"key": "a."}, InvalidNameError, "expected letters"),
    ({"key": "a..b"}, InvalidNameError, "expected letters"),
    ({"key": "a.*"}, InvalidNameError, "expected letters"),
    ({"key": "é"}, InvalidNameError, "expected letters"),
    ({"key": "_kv.x"}, InvalidNameError, "reserved"),
    ({"value": None}, ConfigurationError, "key 'k': the value is null; write an empty value as ''"),
    ({"value": None, "operation": "PUT"}, ConfigurationError, "the value is null"),
    ({"operation": "put"}, ConfigurationError, "the operation is unknown, expected 'PUT'"),
    ({"expected_revision": -1}, ConfigurationError, "expected_revision is negative"),
    ({"ttl": 0}, ConfigurationError, "ttl is less than 1, expected seconds"),
    ({"headers": [("a", ["b\r\nc: d"])]}, ConfigurationError, "key 'k': header 'b"),
]


@pytest.mark.parametrize(("row", "kind", "text"), REFUSED)
def test_refused_rows(row: dict[str, Any], kind: type[NatsSourceError], text: str) -> None:
    good = {"key": "good", "value": b"1"}
    with pytest.raises(kind) as caught:
        encode(good, good, {"key": "k", "value": b"1", **row}, row=10_000)
    start = "could not write row 10002 of partition 2 to bucket 'fleet': "
    assert str(caught.value).startswith(start)
    assert text in str(caught.value)


def test_keys_are_those_of_layer() -> None:
    for key in ["a", "A-/_=.9", "=", "a.b.c", "-", "/"]:
        assert validate_written_key(key) == key
        assert messages(encode({"key": key, "value": b""}))[0][0] == f"$KV.fleet.{key}"


def test_limits_of_bucket() -> None:
    with pytest.raises(TtlNotSupportedError, match=r"row 1 .*key 'b': no ttl here"):
        encode(
            {"key": "a", "value": b""}, {"key": "b", "value": b"", "ttl": 5}, no_ttl="no ttl here"
        )
    encode({"key": "a", "value": b"x" * 10}, max_message_size=10)
    with pytest.raises(MessageTooLargeError, match=r"row 0 .*11 bytes, expected at most 10"):
        encode({"key": "a", "value": b"x" * 11}, max_message_size=10)


def test_codecs_encode_keys_and_values_of_puts() -> None:
    codec = KvCodec(("path", "base64"), ("base64",))
    columns = encode(
        {"key": "/a/user:1", "value": b"one"},
        {"key": "b", "value": b"", "operation": "PUT"},
        {"key": "/a/user:1", "value": b"ignored", "operation": "DEL"},
        codec=codec,
    )
    assert [(subject, payload) for subject, payload, _ in messages(columns)] == [
        ("$KV.fleet.X3Jvb3Rf.YQ.dXNlcjox", b"b25l"),
        ("$KV.fleet.Yg", b""),
        ("$KV.fleet.X3Jvb3Rf.YQ.dXNlcjox", b""),
    ]
    (stored,) = messages(encode({"key": "a b", "value": b"one"}, codec=KvCodec(("base64",))))
    assert stored[:2] == ("$KV.fleet.YSBi", b"one")


@pytest.mark.parametrize(
    ("key", "kind", "text"),
    [
        (
            "/a/",
            KeyNotEncodableError,
            "could not write row 8 of partition 2 to bucket 'fleet': key '/a/': it would be stored "
            "as '_root_.a', which is key '/a'; use that key",
        ),
        ("a.b", KeyNotEncodableError, "key 'a.b': it would be stored as 'a.b', which is key 'a/b'"),
        ("user:1", InvalidNameError, "key 'user:1': expected letters, digits"),
        ("a//b", InvalidNameError, "key 'a//b': expected letters, digits"),
        ("_kv/a", InvalidNameError, "key '_kv/a': keys that start with '_kv' are reserved"),
        (None, InvalidNameError, "key None: expected letters, digits"),
    ],
)
def test_keys_that_codec_refuses(key: str | None, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        encode(
            {"key": "/good", "value": b"x"},
            {"key": key, "value": b"x"},
            codec=KvCodec(("path",)),
            row=7,
        )
    assert type(caught.value) is kind
    assert text in str(caught.value)


def test_size_of_message_is_that_of_its_stored_value() -> None:
    codec = KvCodec((), ("base64",))
    encode({"key": "a", "value": b"x" * 60}, codec=codec, max_message_size=80)
    with pytest.raises(MessageTooLargeError, match="the message has 84 bytes"):
        encode({"key": "a", "value": b"x" * 63}, codec=codec, max_message_size=80)


STREAM_TYPES = {
    "subject": pa.string(),
    "data": pa.binary(),
    "headers": HEADERS,
    "msg_id": pa.string(),
}
FILTERS = ("orders.*.new", "audit.>", "plain")


def encode_stream(
    *rows: dict[str, Any],
    subject: str | None = None,
    every: bool = False,
    filters: tuple[str, ...] = FILTERS,
) -> MessageColumns:
    names = [name for name in STREAM_TYPES if any(name in row for row in rows)]
    arrays = [pa.array([row.get(name) for row in rows], STREAM_TYPES[name]) for name in names]
    ids = MessageIds("job", 0, every)
    encoder = StreamRowEncoder("ORDERS", ids, subject=subject, filters=filters)
    return encoder.encode(pa.RecordBatch.from_arrays(arrays, names=names))


@pytest.mark.parametrize("subject", ["orders.eu.new", "audit.a", "audit.a.b.c", "plain"])
def test_subjects_of_stream(subject: str) -> None:
    assert encode_stream({"subject": subject, "data": b""}).subject(0) == subject


@pytest.mark.parametrize("subject", ["orders.new", "orders.a.b.new", "audit", "plain.x", "xplain"])
def test_subjects_of_another_stream(subject: str) -> None:
    with pytest.raises(InvalidNameError, match=r"the stream does not have the subject, expected"):
        encode_stream({"subject": subject, "data": b""})
    encode_stream({"subject": subject, "data": b""}, filters=())


REFUSED_OF_STREAM: list[tuple[dict[str, Any], type[NatsSourceError], str]] = [
    ({"subject": None}, InvalidNameError, "subject None: expected tokens"),
    ({"subject": "audit.>"}, InvalidNameError, "without wildcards"),
    ({"subject": "audit.*"}, InvalidNameError, "without wildcards"),
    ({"subject": "audit.a b"}, InvalidNameError, "without wildcards"),
    ({"subject": "audit..a"}, InvalidNameError, "expected tokens"),
    ({"subject": "audit.a\r\nPUB x 0"}, InvalidNameError, "expected tokens"),
    ({"data": None}, ConfigurationError, "data is null; write empty data as ''"),
    ({"msg_id": ""}, ConfigurationError, "msg_id is empty"),
    ({"msg_id": "a\r\nb: c"}, ConfigurationError, "line break"),
]


@pytest.mark.parametrize(("row", "kind", "text"), REFUSED_OF_STREAM)
def test_refused_rows_of_stream(
    row: dict[str, Any], kind: type[NatsSourceError], text: str
) -> None:
    good = {"subject": "plain", "data": b"1"}
    with pytest.raises(kind) as caught:
        encode_stream(good, {"subject": "plain", "data": b"1", **row})
    assert str(caught.value).startswith("could not write row 1 of partition 0 to stream 'ORDERS': ")
    assert text in str(caught.value)


def test_refused_row_of_stream_whose_name_has_braces() -> None:
    encoder = StreamRowEncoder("a{b}", MessageIds("job", 0, False), subject=None, filters=FILTERS)
    batch = pa.RecordBatch.from_pylist(
        [{"subject": "plain", "data": None}],
        pa.schema([("subject", pa.string()), ("data", pa.binary())]),
    )
    with pytest.raises(ConfigurationError, match=r"row 0 of partition 0 to stream 'a\{b\}': "):
        encoder.encode(batch)


def test_subject_option_applies_to_all_rows() -> None:
    columns = encode_stream({"data": b"1"}, {"data": b"2"}, subject="plain")
    assert [columns.subject(i) for i in range(2)] == ["plain", "plain"]
    assert (
        encode_stream({"subject": "audit.x", "data": b"1"}, subject="plain").subject(0) == "plain"
    )


def test_message_ids_of_column_come_first() -> None:
    columns = encode_stream(
        {"subject": "plain", "data": b"1", "msg_id": "mine"},
        {"subject": "plain", "data": b"1"},
        every=True,
    )
    assert columns.headers is not None
    mine, automatic = columns.headers.to_pylist()
    assert mine == b"NATS/1.0\r\nNats-Msg-Id: mine\r\n\r\n"
    assert automatic.startswith(b"NATS/1.0\r\nNats-Msg-Id: job.0.1.")
    columns = encode_stream({"subject": "plain", "data": b"1", "msg_id": None})
    assert columns.headers is None
