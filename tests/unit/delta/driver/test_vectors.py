"""Deletion vectors: the format of Delta's protocol, and damaged ones."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from nats_stream_source.delta.driver.log import (
    VectorError,
    VectorFile,
    is_vector_path,
    vector_file_name,
    vector_path,
    vector_rows,
)
from nats_stream_source.delta.tables import EngineRefusedError

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_ROWS = st.sets(st.integers(0, 200_000), min_size=1, max_size=50)


@given(st.lists(_ROWS, min_size=1, max_size=4))
def test_vectors_of_file_are_read_back(vectors: list[set[int]]) -> None:
    file = VectorFile()
    descriptors = [file.add(BitMap64(rows)) for rows in vectors]
    for rows, descriptor in zip(vectors, descriptors, strict=True):
        assert vector_path(descriptor) == file.name
        assert set(vector_rows(descriptor, file.content(), 200_001)) == rows


def test_inline_vector_is_read() -> None:
    """Rows 3, 4, 7, 11, 18 and 29 in the portable format, as Z85."""
    vector = bytes.fromhex(
        "d1d33964 0100000000000000 00000000 3a300000 01000000 0000 0500 10000000"
        "0300 0400 0700 0b00 1200 1d00"
    )
    descriptor = {
        "storageType": "i",
        "pathOrInlineDv": base64.b85encode(vector).decode().translate(str.maketrans(_B85, _Z85)),
        "sizeInBytes": len(vector),
        "cardinality": 6,
    }
    assert vector_path(descriptor) is None
    assert list(vector_rows(descriptor, b"", 30)) == [3, 4, 7, 11, 18, 29]


def test_path_of_protocol_has_prefix_and_uuid() -> None:
    """The example of Delta's protocol."""
    descriptor = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^"}
    path = vector_path(descriptor)
    assert path == "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert is_vector_path(path)


@pytest.mark.parametrize("at", [0, 1, 4, 5, 12, 40, -1])
def test_damaged_byte_is_found(at: int) -> None:
    file = VectorFile()
    file.add(BitMap64([1, 2]))
    descriptor = file.add(BitMap64(range(0, 100, 3)))
    content = bytearray(file.content())
    start = descriptor["offset"]
    part = content[start:]
    part[at] ^= 1
    with pytest.raises(VectorError, match="damaged"):
        vector_rows(descriptor, bytes(content[:start] + part), 100)


def test_truncated_vector_is_found() -> None:
    file = VectorFile()
    descriptor = file.add(BitMap64([1]))
    for size in range(len(file.content())):
        with pytest.raises(VectorError, match="damaged"):
            vector_rows(descriptor, file.content()[:size], 2)


def test_row_beyond_data_file_is_found() -> None:
    file = VectorFile()
    descriptor = file.add(BitMap64([1, 7]))
    with pytest.raises(VectorError, match="names row 7, and the data file has 7 rows"):
        vector_rows(descriptor, file.content(), 7)


def test_vector_outside_of_table_is_refused() -> None:
    descriptor = {"storageType": "p", "pathOrInlineDv": "s3://other/vector.bin"}
    with pytest.raises(EngineRefusedError, match="outside of the table"):
        vector_path(descriptor)
    assert vector_file_name(descriptor) == "vector.bin"
    assert vector_file_name({"storageType": "i", "pathOrInlineDv": "0"}) is None
