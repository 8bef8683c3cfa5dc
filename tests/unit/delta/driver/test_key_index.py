"""The index of keys against a dictionary, with few hashes, so that different keys share one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.delta.driver import key_index
from nats_stream_source.delta.driver.key_index import KeyIndex, Keys, encoded_keys

_KEYS = st.lists(st.binary(max_size=6), max_size=40)


def keys_of(values: list[bytes]) -> Keys:
    return Keys.of(pa.array(values, pa.large_binary()))


@pytest.mark.parametrize("hashes", [1, 3, 1 << 62])
@given(batches=st.lists(_KEYS, max_size=8))
def test_index_equals_dictionary(hashes: int, batches: list[list[bytes]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        real = key_index._hashes
        patch.setattr(key_index, "_hashes", lambda keys: real(keys) % np.uint64(hashes))
        index, model = KeyIndex(), dict[bytes, int]()
        for batch in batches:
            keys = keys_of(batch)
            found = index.find(keys)
            assert found.tolist() == [model.get(key, -1) for key in batch]
            new = list(dict.fromkeys(key for key in batch if key not in model))
            slots = index.insert(keys_of(new))
            model.update(zip(new, slots.tolist(), strict=True))
        assert len(index) == len(model)


@pytest.mark.parametrize("hashes", [1, 2, 1 << 62])
@given(values=_KEYS)
def test_first_repeated_key_is_found(hashes: int, values: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        real = key_index._hashes
        patch.setattr(key_index, "_hashes", lambda keys: real(keys) % np.uint64(hashes))
        at = keys_of(values).first_repeated()
    if at is None:
        assert len(set(values)) == len(values)
    else:
        assert values.count(values[at]) > 1


@given(
    st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=20, unique=True),
)
def test_composite_keys_differ(pairs: list[tuple[str, str]]) -> None:
    columns = [pa.array([pair[at] for pair in pairs], pa.string()) for at in range(2)]
    assert len(set(encoded_keys(columns).to_pylist())) == len(pairs)


def test_null_in_key_column_is_null() -> None:
    columns = [pa.array(["a", None], pa.string()), pa.array([None, "b"], pa.string())]
    assert encoded_keys(columns).to_pylist() == [None, None]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_zero_with_either_sign_is_one_key(kind: pa.DataType) -> None:
    zero, negative, one = encoded_keys([pa.array([0.0, -0.0, 1.0], kind)]).to_pylist()
    assert zero == negative != one
