"""Header blocks: the status line, markers, and the fields as columns, against a plain parser."""

from __future__ import annotations

from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire import headers as module
from nats_stream_source.wire.header_columns import HEADERS, header_maps, origins
from nats_stream_source.wire.headers import Headers, operations, parse_headers


def plainly(block: bytes | None) -> dict[str, list[str]] | None:
    """The fields of one block, by the rules of ``wire/header_columns.py``."""
    if not block:
        return None
    first, *lines = block.split(b"\r\n")
    found: dict[str, list[str]] = {}
    for line in lines if first.startswith(b"NATS/1.0") else []:
        name, colon, value = line.partition(b":")
        if colon and name:
            found.setdefault(name.decode(errors="replace"), []).append(
                value.lstrip(b" \t").decode(errors="replace")
            )
    return found


def maps(blocks: list[bytes | None] | pa.Array) -> list[dict[str, list[str]] | None]:
    given = pa.array(blocks, pa.binary()) if isinstance(blocks, list) else blocks
    found = header_maps(given)
    found.validate(full=True)
    assert found.type.equals(HEADERS, check_metadata=True)
    for one in found.to_pylist():
        assert one is None or len(one) == len(dict(one)), "a key twice"
    return [None if one is None else dict(one) for one in found.to_pylist()]


def block(*lines: str | bytes) -> bytes:
    raw = [line.encode() if isinstance(line, str) else line for line in ("NATS/1.0", *lines)]
    return b"\r\n".join(raw) + b"\r\n\r\n"


CASES: dict[str, tuple[bytes | None, dict[str, list[str]] | None]] = {
    "none": (None, None),
    "empty": (b"", None),
    "no field": (block(), {}),
    "one": (block("A: 1"), {"A": ["1"]}),
    "case is kept": (block("a: 1", "A: 2"), {"a": ["1"], "A": ["2"]}),
    "a name that repeats": (
        block("A: 1", "B: x", "A: 2", "A: 1"),
        {"A": ["1", "2", "1"], "B": ["x"]},
    ),
    "no space": (block("A:1"), {"A": ["1"]}),
    "spaces": (block("A: \t  1 \t "), {"A": ["1 \t "]}),
    "many spaces": (block("A:" + " " * 99 + "1"), {"A": ["1"]}),
    "only spaces": (block("A:    ", "B: 1"), {"A": [""], "B": ["1"]}),
    "no value": (block("A:", "B: 1"), {"A": [""], "B": ["1"]}),
    "colons": (block("A: b:c", "D::"), {"A": ["b:c"], "D": [":"]}),
    "no colon": (block("odd", "A: 1", "odd"), {"A": ["1"]}),
    "no name": (block(": x", "A: 1"), {"A": ["1"]}),
    "a line feed": (block("A: 1\n2", "B\n: 3"), {"A": ["1\n2"], "B\n": ["3"]}),
    "a carriage return": (block("A: 1\r2", "B: 3"), {"A": ["1\r2"], "B": ["3"]}),
    "an empty line": (block("A: 1", "", "B: 2"), {"A": ["1"], "B": ["2"]}),
    "a status": (b"NATS/1.0 404 No: x\r\nA: 1\r\n\r\n", {"A": ["1"]}),
    "no end": (b"NATS/1.0\r\nA: 1\r\nB: 2", {"A": ["1"], "B": ["2"]}),
    "cut off": (b"NATS/1.0\r\nA: 1\r", {"A": ["1\r"]}),
    "no first line": (b"A: 1\r\nB: 2\r\n\r\n", {}),
    "garbage": (b"\xff\x00:\r\n:\n", {}),
    "a short one": (b"N", {}),
    "text": (block("Straße: naïve €"), {"Straße": ["naïve €"]}),
    "no text": (block(b"A\xff: \xe9t\xe9"), {"A\ufffd": ["\ufffdt\ufffd"]}),
    "names that look alike then": (block(b"A\xff: 1", b"A\xfe: 2"), {"A\ufffd": ["1", "2"]}),
    "a NUL": (block("A: \0"), {"A": ["\0"]}),
    "the server's": (
        block("Nats-Msg-Size: 3", "Nats-TTL: 1s", "KV-Operation: DEL", "Status: 404"),
        {"Nats-Msg-Size": ["3"], "Nats-TTL": ["1s"], "KV-Operation": ["DEL"], "Status": ["404"]},
    ),
}


@pytest.mark.parametrize(("raw", "expected"), CASES.values(), ids=CASES)
def test_block_single(raw: bytes | None, expected: dict[str, list[str]] | None) -> None:
    assert maps([raw]) == [expected]
    assert plainly(raw) == expected
    # Its neighbours are not touched, wherever it stands.
    other = block("Other: 1", "A: 9")
    assert maps([other, raw, None, raw, other, b""]) == [
        {"Other": ["1"], "A": ["9"]},
        expected,
        None,
        expected,
        {"Other": ["1"], "A": ["9"]},
        None,
    ]


LINES = st.one_of(
    st.sampled_from([b"A: 1", b"A:2", b"B:  x", b"a: 1", b"odd", b":", b"", b"C: \xff", b"A\xff:"]),
    st.binary(max_size=9),
    st.lists(st.sampled_from(list(b"\r\n: \tAB\xff")), max_size=9).map(bytes),
)
BLOCKS = st.one_of(
    st.none(),
    st.just(b""),
    st.lists(LINES, max_size=5).map(lambda lines: block(*lines)),
    st.lists(LINES, min_size=13, max_size=16).map(lambda lines: block(*lines)),
    st.binary(max_size=20),
    st.binary(max_size=20).map(lambda rest: b"NATS/1.0" + rest),
    st.binary(max_size=20).map(lambda rest: b"NATS/1.0\r\n" + rest),
)


@given(st.lists(BLOCKS, max_size=8), st.integers(0, 2), st.integers(0, 2))
def test_maps_equal_plain_parser(drawn: list[bytes | None], before: int, behind: int) -> None:
    """Any bytes; also a part of a larger array."""
    whole = pa.array([block("X: y")] * before + drawn + [block("X: y")] * behind, pa.binary())
    assert maps(whole.slice(before, len(drawn))) == [plainly(one) for one in drawn]


_SOURCE = b"Nats-Stream-Source: "
ORIGINS: list[tuple[bytes | None, tuple[str, int] | None]] = [
    (None, None),
    (b"", None),
    (block("A: 1"), None),
    (block(_SOURCE + b"ORDERS 1 > >"), ("ORDERS", 1)),  # 2.10
    (block("A: 1", _SOURCE + b"A 22 a\x0cb c\x0cd a", "Nats-Msg-Size: 5"), ("A", 22)),  # 2.14
    (block(_SOURCE + b"KV_de:mSx7q4yJ 3 > > $KV.de.k ZGIed6Oc"), ("KV_de:mSx7q4yJ", 3)),  # 2.15
    (block(_SOURCE + b"OLD 1 > >", "B: x", _SOURCE + b"NEW 2 > >"), ("NEW", 2)),
    (block(_SOURCE + b"\xff 9223372036854775807 > >"), None),
    (block(_SOURCE + b"\xff 922337203685477580 > >"), ("\ufffd", 922337203685477580)),
    (block(_SOURCE + b"ORDERS one > >"), None),
    (block(_SOURCE + b"ORDERS"), None),
    (block("nats-stream-source: A 1 > >", "Nats-Stream-SourceX: A 1 > >"), None),
    (b"NATS/9\r\n" + _SOURCE + b"A 1 > >\r\n\r\n", None),
]


def test_origins() -> None:
    streams, sequences = origins(pa.array([raw for raw, _ in ORIGINS], pa.binary()))
    assert (streams.type, sequences.type) == (pa.string(), pa.int64())
    found = zip(streams.to_pylist(), sequences.to_pylist(), strict=True)
    assert list(found) == [expected or (None, None) for _, expected in ORIGINS]


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
