"""Meta messages of objects: parsing, encoding, digests."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.errors import BadObjectInfoError
from nats_stream_source.jetstream.object_store.info import Digest, ObjectInfo

pytestmark = pytest.mark.servers

_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
_FIELDS = ("bucket", "name", "nuid", "size", "chunks", "digest", "headers", "metadata", "options")
_META = st.fixed_dictionaries({}, optional=dict.fromkeys(_FIELDS, _ANYTHING))


@given(
    st.binary(max_size=50) | (_META | _ANYTHING).map(lambda one: json.dumps(one).encode()),
    st.integers(0, 2**62),
)
def test_payload_is_read_or_refused(payload: bytes, sequence: int) -> None:
    with contextlib.suppress(BadObjectInfoError):
        assert ObjectInfo.parse(payload, sequence, 0).sequence == sequence


_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@given(
    st.builds(
        ObjectInfo,
        bucket=st.just("b"),
        name=_TEXT.filter(bool),
        nuid=_TEXT.filter(lambda text: not set(".*> ") & set(text)),
        size=st.integers(0, 2**63),
        chunks=st.integers(0, 2**32),
        digest=_TEXT,
        deleted=st.booleans(),
        description=_TEXT,
        headers=st.dictionaries(_TEXT, st.lists(_TEXT)),
        metadata=st.dictionaries(_TEXT, _TEXT),
        link=st.none() | st.tuples(st.just("c"), _TEXT),
        chunk_size=st.none() | st.integers(1, 2**32),
    )
)
def test_meta_data_survive_encoding(info: ObjectInfo) -> None:
    assert ObjectInfo.parse(info.encoded(), 0, 0) == info


@pytest.mark.parametrize("digest", ["", "MD5=AAAA", "SHA-256=AAAA", "SHA-256=ü"])
def test_digest_invalid(digest: str) -> None:
    with pytest.raises(BadObjectInfoError, match="is not a SHA-256 digest"):
        Digest().verify(ObjectInfo("b", "a", digest=digest))


def test_digest_in_lower_case_without_padding_is_accepted() -> None:
    told = Digest().text.replace("SHA", "sha").rstrip("=")
    Digest().verify(ObjectInfo("b", "a", digest=told))
