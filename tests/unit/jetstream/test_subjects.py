"""ADR-8's names, filters, what they cover and their overlap; ADR-19's prefixes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nats_stream_source.errors import ConfigurationError, InvalidNameError
from nats_stream_source.jetstream.subjects import (
    api_prefix,
    covers,
    overlap,
    stream_of,
    validate_bucket,
    validate_filter,
    validate_filters,
    validate_key,
    validate_written_key,
    write_prefix,
)


@pytest.mark.parametrize("name", ["fleet", "A-b_9", "KV_x"])
def test_buckets(name: str) -> None:
    assert stream_of(name) == f"KV_{name}"


@pytest.mark.parametrize("name", ["", "a.b", "a b", "a*", "ä", "a\n", "../x"])
def test_bucket_names_invalid(name: str) -> None:
    with pytest.raises(InvalidNameError, match="bucket"):
        validate_bucket(name)


@pytest.mark.parametrize("pattern", [">", "*", "a.*", "*.b", "a.>", "a.*.c.>"])
def test_filters(pattern: str) -> None:
    assert validate_filter(pattern) == pattern


@pytest.mark.parametrize("pattern", [">.a", "a>", "a*b", "**", "a.>.b", "*.", ".>"])
def test_filters_invalid(pattern: str) -> None:
    with pytest.raises(InvalidNameError):
        validate_filter(pattern)


def accepts(validate: Callable[[str], str], name: str) -> bool:
    try:
        return validate(name) == name
    except InvalidNameError:
        return False


@given(st.text(alphabet="ab./=_kv- \n*ä", max_size=8))
@example("_kv.x")
@example("a\n")
@example("a..b")
@example("a/b=c_d-e")
def test_keys_match_pattern_of_document(key: str) -> None:
    """ADR-8's pattern and sentence, plus the server's rule that no token is empty."""
    allowed = (
        re.fullmatch(r"\A[-/_=\.a-zA-Z0-9]+\Z", key) is not None
        and not key.startswith(".")
        and not key.endswith(".")
        and ".." not in key
    )
    assert accepts(validate_key, key) is allowed
    assert accepts(validate_written_key, key) is (allowed and not key.startswith("_kv"))
    if "*" not in key:
        assert accepts(validate_filter, key) is allowed


_TOKENS = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3)
_PATTERNS = st.builds(
    lambda tokens, tail: ".".join([*tokens, *tail]), _TOKENS, st.sampled_from([[], [">"]])
)


def matches(pattern: str, subject: str) -> bool:
    expression = re.escape(pattern).replace(r"\*", "[^.]+").replace(">", ".+")
    return re.fullmatch(expression, subject) is not None


@given(_PATTERNS, _PATTERNS)
def test_overlap_is_subject_that_both_match(one: str, other: str) -> None:
    words = ["a", "b", "c"]
    subjects = [*words]
    for _ in range(4):
        subjects += [f"{s}.{w}" for s in subjects for w in words if s.count(".") < 4]
        subjects = list(dict.fromkeys(subjects))
    both = any(matches(one, s) and matches(other, s) for s in subjects)
    assert overlap(one, other) is both


def test_validate_filters_names_both() -> None:
    assert validate_filters(["b", "a"]) == ("b", "a")
    with pytest.raises(ConfigurationError, match=r"'a\.\*' and 'a\.b' overlap"):
        validate_filters(["a.*", "a.b"])


def test_prefixes() -> None:
    assert api_prefix() == "$JS.API"
    assert api_prefix("fromA") == api_prefix("fromA.") == "fromA"
    assert api_prefix(domain="hub") == "$JS.hub.API"
    for bad in ("a..b", "a.*", "a b"):
        with pytest.raises(ConfigurationError):
            api_prefix(bad)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("$JS.API", "$KV.bin."),
        ("JS.from-acc1", "JS.from-acc1.$KV.bin."),
        ("$JS.hub.API", "$JS.hub.API.$KV.bin."),
        ("fromA", "fromA.$KV.bin."),
    ],
)
def test_write_subjects(prefix: str, expected: str) -> None:
    """ADR-19, "KV Example"."""
    assert write_prefix("bin", prefix) == expected


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
