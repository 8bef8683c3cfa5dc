"""Columns of header fields, without a server: against a plain parser of ten lines, and by hand."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.wire.header_columns import HEADERS, header_maps, origins


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
        {
            "Nats-Msg-Size": ["3"],
            "Nats-TTL": ["1s"],
            "KV-Operation": ["DEL"],
            "Status": ["404"],
        },
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
