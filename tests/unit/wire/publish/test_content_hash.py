"""Hashes of a column: of the content alone, and different for different content."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.wire.publish import content_hash
from nats_stream_source.wire.publish.content_hash import combine, hash_column


@given(st.lists(st.none() | st.binary(max_size=40), max_size=30), st.integers(0, 5))
def test_position_and_neighbours_do_not_matter(values: list[bytes | None], start: int) -> None:
    together = hash_column(pa.array(values, pa.binary()))[start:].tolist()
    sliced = hash_column(pa.array(values, pa.binary())[start:]).tolist()
    alone = [int(hash_column(pa.array([one], pa.binary()))[0]) for one in values[start:]]
    assert together == sliced == alone


@given(st.lists(st.binary(max_size=24), unique=True, max_size=200))
def test_different_content(values: list[bytes]) -> None:
    assert len(set(hash_column(pa.array(values, pa.binary())).tolist())) == len(values)


def test_similar_content() -> None:
    base = bytes(range(64))
    similar = [base]
    similar += [base[:i] + bytes([base[i] ^ 1]) + base[i + 1 :] for i in range(64)]
    similar += [base[:i] for i in range(64)]
    similar += [base + b"\0" * i for i in range(1, 20)]
    similar += [base[8:16] + base[:8] + base[16:]]
    assert len(set(hash_column(pa.array(similar)).tolist())) == len(similar)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = pa.array([b"x" * (i % 50) + b"%d" % i for i in range(300)])
    whole = hash_column(values).tolist()
    monkeypatch.setattr(content_hash, "_CHUNK_WORDS", 3)
    assert hash_column(values).tolist() == whole


def test_strings_hash_as_their_bytes_and_pairs_are_ordered() -> None:
    text, data = hash_column(pa.array(["é", "b"])), hash_column(pa.array(["é".encode(), b"b"]))
    assert text.tolist() == data.tolist()
    assert combine(text[:1], text[1:]).tolist() != combine(text[1:], text[:1]).tolist()
