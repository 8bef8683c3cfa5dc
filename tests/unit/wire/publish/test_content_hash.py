"""Hashes of a column: of the content alone, and different for different content."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.wire.publish.content_hash import combine, hash_column


@given(st.lists(st.none() | st.binary(max_size=40), max_size=30), st.integers(0, 5))
def test_position_and_neighbours_do_not_matter(values: list[bytes | None], start: int) -> None:
    sliced = hash_column(pa.array(values, pa.binary())[start:]).tolist()
    assert sliced == [int(hash_column(pa.array([v], pa.binary()))[0]) for v in values[start:]]


@given(st.lists(st.binary(max_size=24), unique=True, max_size=200))
def test_different_content(values: list[bytes]) -> None:
    assert len(set(hash_column(pa.array(values, pa.binary())).tolist())) == len(values)


def test_similar_content() -> None:
    for base in (bytes(range(64)), bytes(range(256)) * 17):
        similar = [base, base[8:16] + base[:8] + base[16:]]
        similar += [base[:i] + bytes([base[i] ^ 128]) + base[i + 1 :] for i in range(64)]
        similar += [base[:-i] for i in range(1, 64)]
        similar += [base + b"\0" * i for i in range(1, 20)]
        # Words that change by +1, -2, +1.
        words = [int.from_bytes(base[i : i + 8], "little") for i in range(0, 24, 8)]
        stepped = [word + step for word, step in zip(words, (1, -2, 1), strict=True)]
        similar.append(b"".join(word.to_bytes(8, "little") for word in stepped) + base[24:])
        assert len(set(hash_column(pa.array(similar)).tolist())) == len(similar)


def test_strings_hash_as_their_bytes_and_pairs_are_ordered() -> None:
    text, data = hash_column(pa.array(["é", "b"])), hash_column(pa.array(["é".encode(), b"b"]))
    assert text.tolist() == data.tolist()
    assert combine(text[:1], text[1:]).tolist() != combine(text[1:], text[:1]).tolist()
