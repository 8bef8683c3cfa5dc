"""Header blocks: the status line, the fields, and which of them make a marker."""

from __future__ import annotations

from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire import headers as module
from nats_stream_source.wire.headers import Headers, operations, parse_headers


def block(*lines: str) -> bytes:
    return "\r\n".join(["NATS/1.0", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"NATS/1.0\r\n\r\n", Headers(None, "", ())),
        (b"NATS/1.0 503\r\n\r\n", Headers(503, "", ())),
        (b"NATS/1.0 404 No Messages\r\n\r\n", Headers(404, "No Messages", ())),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 5\r\nNats-Last-Stream: 9\r\n\r\n",
            Headers(
                100, "Idle Heartbeat", (("Nats-Last-Consumer", "5"), ("Nats-Last-Stream", "9"))
            ),
        ),
        (b"NATS/1.0  408  Bad Request  \r\n\r\n", Headers(408, "Bad Request", ())),
        (b"NATS/1.0 \r\nA: b\r\n\r\n", Headers(None, "", (("A", "b"),))),
        # A publisher's field is data, whatever it is called.
        (block("Status: 404"), Headers(None, "", (("Status", "404"),))),
        (block("Description: x", "a:b"), Headers(None, "", (("Description", "x"), ("a", "b")))),
        (block("A:", "B: ", "C:  c "), Headers(None, "", (("A", ""), ("B", ""), ("C", "c ")))),
        (block("A:\t1", "A: 2", "a: 3"), Headers(None, "", (("A", "1"), ("A", "2"), ("a", "3")))),
        (block("X: a:b: c"), Headers(None, "", (("X", "a:b: c"),))),
        (block("X: ü"), Headers(None, "", (("X", "ü"),))),
        (block("X: a\nb"), Headers(None, "", (("X", "a\nb"),))),
        (b"NATS/1.0\r\nX: \xff\r\n\r\n", Headers(None, "", (("X", "\udcff"),))),
        (block("NATS/1.0 404: x"), Headers(None, "", (("NATS/1.0 404", "x"),))),
    ],
)
def test_parse(raw: bytes, expected: Headers) -> None:
    assert parse_headers(raw) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\r\n\r\n",
        b"NATS/1.0",
        b"NATS/1.0\r\n",
        b"NATS/1.0\r\nA: b\r\n",
        b"NATS/1.0\r\nA: b",
        b"NATS/1.1\r\n\r\n",
        b"nats/1.0\r\n\r\n",
        b"NATS/1.0x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"NATS/1.0 abc\r\n\r\n",
        b"NATS/1.0 40\r\n\r\n",
        b"NATS/1.0 4040\r\n\r\n",
        b"NATS/1.0\nA: b\r\n\r\n",
        b"NATS/1.0\r\nno colon\r\n\r\n",
        b"NATS/1.0\r\n: no name\r\n\r\n",
        b"NATS/1.0\r\nA: b\r\n\r\nC: d\r\n\r\n",
    ],
)
def test_malformed(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_headers(raw)


def test_cut_at_every_byte() -> None:
    raw = b"NATS/1.0 100 Idle\r\nA: b\r\nC: d\r\n\r\n"
    for length in range(len(raw)):
        with pytest.raises(ProtocolError):
            parse_headers(raw[:length])


def test_error_does_not_show_values() -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_headers(b"NATS/1.0\r\nAuthorization: secret\r\nodd\r\n\r\n")
    assert "secret" not in str(caught.value)


def test_get() -> None:
    headers = parse_headers(block("A: 1", "B: 2", "A: 3", "a: 4"))
    assert headers.get("A") == "1"
    assert headers.get_all("A") == ["1", "3"]
    assert headers.get("b") is None
    assert headers.get_all("b") == []


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.binary(min_size=1, max_size=6).filter(lambda b: not set(b) & set(b":\r\n")),
            st.binary(max_size=10).filter(lambda b: b"\r" not in b and b[:1] not in (b" ", b"\t")),
        ),
        max_size=5,
    )
)
def test_bytes_roundtrip(drawn: list[tuple[bytes, bytes]]) -> None:
    raw = b"NATS/1.0\r\n" + b"".join(name + b": " + value + b"\r\n" for name, value in drawn)
    fields = parse_headers(raw + b"\r\n").fields
    assert drawn == [
        (name.encode("utf-8", "surrogateescape"), value.encode("utf-8", "surrogateescape"))
        for name, value in fields
    ]


OPERATIONS: list[tuple[bytes | None, str]] = [
    (None, "PUT"),
    (b"", "PUT"),
    (block(), "PUT"),
    (block("X: y"), "PUT"),
    (block("KV-Operation: DEL"), "DEL"),
    (block("KV-Operation: PURGE", "Nats-Rollup: sub"), "PURGE"),
    (block("Nats-Rollup: sub", "KV-Operation:PURGE"), "PURGE"),
    (block("KV-Operation: PUT"), "PUT"),
    (block("KV-Operation: DELETE"), "PUT"),
    (block("KV-Operation: del"), "PUT"),
    (block("KV-Operation: DEL "), "PUT"),
    (block("KV-Operation:"), "PUT"),
    (block("kv-operation: DEL"), "PUT"),
    (block("X-KV-Operation: DEL"), "PUT"),
    (block("KV-Operation-X: DEL"), "PUT"),
    (block("X: KV-Operation: DEL"), "PUT"),
    (block("X: a\nKV-Operation: DEL"), "PUT"),
    (block("KV-Operation: PUT", "KV-Operation: DEL"), "PUT"),
    (block("KV-Operation: DEL", "KV-Operation: PURGE"), "DEL"),
    (block("Nats-Marker-Reason: MaxAge", "Nats-TTL: 1s"), "PURGE"),
    (block("Nats-Marker-Reason: Purge"), "PURGE"),
    (block("Nats-Marker-Reason: Remove"), "DEL"),
    (block("Nats-Marker-Reason: Else"), "PUT"),
    (block("X: Nats-Marker-Reason: MaxAge"), "PUT"),
    (block("KV-Operation: DEL", "Nats-Marker-Reason: MaxAge"), "DEL"),
    (block("KV-Operation: else", "Nats-Marker-Reason: MaxAge"), "PURGE"),
    # No header block at all, though a server stores it: no marker, and no failure.
    (b"KV-Operation: DEL\r\n\r\n", "PUT"),
    (b"NATS/1.0\r\nKV-Operation: DEL\r\n", "PUT"),
    (b"NATS/1.0\r\nodd\r\nKV-Operation: DEL\r\n\r\n", "PUT"),
    (b"\xff KV-Operation \xff", "PUT"),
]


@pytest.mark.parametrize(("raw", "operation"), OPERATIONS)
def test_operation(raw: bytes | None, operation: str) -> None:
    assert operations(pa.array([raw], pa.binary())).equals(pa.array([operation]))


def test_operations_of_column() -> None:
    column = pa.array([raw for raw, _ in OPERATIONS] * 3, pa.binary())
    expected = [operation for _, operation in OPERATIONS] * 3
    result = operations(column)
    assert result.type == pa.string()
    assert result.null_count == 0
    assert result.to_pylist() == expected
    assert operations(column.slice(4, 3)).to_pylist() == expected[4:7]
    assert operations(column.slice(0, 0)).equals(pa.array([], pa.string()))


def test_named_blocks_only_are_parsed_once() -> None:
    rows = [block(f"Trace: {i}") for i in range(1000)] + [block("KV-Operation: DEL")] * 1000
    with mock.patch.object(module, "parse_headers", wraps=parse_headers) as parse:
        result = operations(pa.array(rows, pa.binary()))
    assert result.to_pylist() == ["PUT"] * 1000 + ["DEL"] * 1000
    assert parse.call_count == 1
