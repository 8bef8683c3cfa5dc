"""Which filters a wider one makes superfluous."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.jetstream.subjects import covers

_PATTERN = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3).flatmap(
    lambda tokens: st.sampled_from([".".join(tokens), ".".join([*tokens, ">"])])
)
_SUBJECT = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize(
    ("wide", "narrow", "does"),
    [
        (">", "a", True),
        (">", "a.>", True),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("a.*", "a.b", True),
        ("a.*", "a.>", False),
        ("a.b", "a.*", False),
        ("*.b", "a.*", False),
        ("a.*", "a.*", True),
        ("a", "a.b", False),
    ],
)
def test_covers(wide: str, narrow: str, does: bool) -> None:
    assert covers(wide, narrow) is does


@given(_PATTERN, _PATTERN, _SUBJECT)
def test_subject_matched_by_narrow_filter_matches_wide(
    wide: str, narrow: str, subject: str
) -> None:
    if covers(wide, narrow) and covers(narrow, subject):
        assert covers(wide, subject)
