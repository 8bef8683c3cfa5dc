"""Header blocks from columns and from maps, against a plain reference."""

from __future__ import annotations

from typing import TypeAlias

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.wire.header_columns import HEADERS, header_maps
from nats_stream_source.wire.headers import parse_headers
from nats_stream_source.wire.publish.headers import blocks, field, map_fields, replace_value
from nats_stream_source.wire.publish.unsendable import Unsendable

Map: TypeAlias = "list[tuple[str, list[str] | None]] | None"
NAMES = st.sampled_from(["A", "Trace-Id", "b", "Nats-Msg-Id", "nats-ttl", "KV-Operation", "KV-O"])
VALUES = st.sampled_from(["", "1", "é x", "a: b", "trailing "])
MAPS = st.lists(
    st.none()
    | st.lists(
        st.tuples(NAMES, st.none() | st.lists(VALUES, max_size=3)),
        max_size=3,
        unique_by=lambda one: one[0],
    ),
    max_size=8,
)


def lines(one: Map) -> bytes | None:
    kept = [
        f"{name}: {value}\r\n".encode()
        for name, values in one or []
        if not name.lower().startswith("nats-") and name.lower() != "kv-operation"
        for value in values or []
    ]
    return b"".join(kept) or None


@given(MAPS, st.integers(0, 3))
def test_maps(maps: list[Map], start: int) -> None:
    column = pa.array(maps, HEADERS)[start:]
    assert map_fields(column)[0].to_pylist() == [lines(one) for one in maps[start:]]


@given(MAPS)
def test_headers_roundtrip(maps: list[Map]) -> None:
    written = blocks([map_fields(pa.array(maps, HEADERS))[0]])
    if written is None:
        assert all(lines(one) is None for one in maps)
        return
    read = header_maps(written).to_pylist()
    expected = [
        None
        if lines(one) is None
        else [
            (name, values)
            for name, values in one or []
            if values and lines([(name, values)]) is not None
        ]
        for one in maps
    ]
    assert read == expected


def test_fields_of_block() -> None:
    ids = field("Nats-Msg-Id", pa.array(["x", None, None]))
    ttl = field("Nats-TTL", pa.array([None, 5, None]))
    found = blocks([ids, ttl])
    assert found is not None
    assert found.to_pylist() == [
        b"NATS/1.0\r\nNats-Msg-Id: x\r\n\r\n",
        b"NATS/1.0\r\nNats-TTL: 5\r\n\r\n",
        None,
    ]
    assert blocks([field("A", pa.array([None, None], pa.string()))]) is None
    assert blocks([]) is None


def test_value_is_replaced() -> None:
    block = b"NATS/1.0\r\nExpected: 0\r\nId: 0\r\n\r\n"
    assert replace_value(block, "Expected", "17") == b"NATS/1.0\r\nExpected: 17\r\nId: 0\r\n\r\n"
    assert parse_headers(replace_value(block, "Id", "x")).get("Id") == "x"


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("a", ["1\r\nb: 2"], "without line breaks"),
        ("a", ["1\nb"], "without line breaks"),
        ("a", [" 1"], "without white space before it"),
        ("a", [None], "must be a string"),
        ("a b", ["1"], "name must be visible ASCII"),
        ("a:", ["1"], "name must be visible ASCII"),
        ("", ["1"], "name must be visible ASCII"),
        ("a\r\n", ["1"], "name must be visible ASCII"),
    ],
)
def test_headers_unsendable(name: str, values: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^row 1: .*{problem}"):
        map_fields(pa.array([[("ok", ["fine"])], [(name, values)]], HEADERS))


UNSENDABLE = [
    [("ok", ["fine"]), ("Größe", ["1", "2"])],
    None,
    [("a b:%", ["x"]), ("ok", [" 1", "a\r\nb%", None])],
]


def test_headers_unsendable_are_skipped_and_counted() -> None:
    fields, changed = map_fields(pa.array(UNSENDABLE, HEADERS), Unsendable.SKIP)
    assert fields.to_pylist() == [b"ok: fine\r\n", None, None]
    assert changed == 6


def test_headers_unsendable_are_encoded_and_counted() -> None:
    fields, changed = map_fields(pa.array(UNSENDABLE, HEADERS), Unsendable.ENCODE)
    first = b"ok: fine\r\nGr%C3%B6%C3%9Fe: 1\r\nGr%C3%B6%C3%9Fe: 2\r\n"
    third = b"a%20b%3A%25: x\r\nok: %201\r\nok: a%0D%0Ab%25\r\nok: \r\n"
    assert fields.to_pylist() == [first, None, third]
    assert changed == 6
