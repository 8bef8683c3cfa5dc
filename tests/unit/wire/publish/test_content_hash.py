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


SIZES = [0, 5, 1024, 4088, 4095, 4096, 4097, 4103, 9000]


@given(
    st.lists(st.none() | st.sampled_from(SIZES), max_size=12),
    st.integers(0, 3),
)
def test_large_elements_among_small_ones(sizes: list[int | None], start: int) -> None:
    values = [None if n is None else bytes(i % 251 for i in range(n)) for n in sizes]
    together = hash_column(pa.array(values, pa.binary())[start:]).tolist()
    assert together == [int(hash_column(pa.array([v], pa.binary()))[0]) for v in values[start:]]


def test_large_elements_that_differ() -> None:
    base = bytearray(range(256)) * 17
    similar = [bytes(base)]
    for i in range(0, len(base), 29):
        changed = base.copy()
        changed[i] ^= 128
        similar.append(bytes(changed))
    similar += [bytes(base[:i]) for i in range(content_hash.LARGE, len(base))]
    similar += [bytes(base) + b"\0" * i for i in range(1, 20)]
    # Words that change by +1, -2, +1.
    words = [int.from_bytes(base[i : i + 8], "little") for i in range(0, 24, 8)]
    stepped = [word + step for word, step in zip(words, (1, -2, 1), strict=True)]
    similar.append(b"".join(word.to_bytes(8, "little") for word in stepped) + bytes(base[24:]))
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
