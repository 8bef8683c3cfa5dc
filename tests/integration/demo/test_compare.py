"""The demo's comparison of a bucket with a table, and the lines it prints."""

from __future__ import annotations

import pytest

from nats_stream_source.demo.compare import Comparison, State, compare

ONE = State(7, {"flight": 1})
TWO = State(9, {"flight": 2})
GONE = State(8, None)


@pytest.mark.parametrize(
    ("bucket", "table", "marked", "live", "deleted", "differences"),
    [
        ({"a": ONE}, {"a": ONE}, True, 1, 0, {}),
        ({"a": GONE}, {"a": GONE}, True, 0, 1, {}),
        ({"a": GONE}, {}, False, 0, 1, {}),
        ({"a": GONE}, {}, True, 0, 0, {"a": "not in the table, revision 8 in the bucket"}),
        ({"a": ONE}, {}, False, 0, 0, {"a": "not in the table, revision 7 in the bucket"}),
        ({}, {"a": ONE}, True, 0, 0, {"a": "in the table, not in the bucket"}),
        (
            {"a": GONE, "b": TWO},
            {"a": ONE, "b": TWO},
            False,
            1,
            0,
            {"a": "in the table, deleted in the bucket by revision 8"},
        ),
        ({"a": TWO}, {"a": ONE}, True, 0, 0, {"a": "revision 7 in the table, 9 in the bucket"}),
        (
            {"a": State(7, {"flight": 2})},
            {"a": ONE},
            True,
            0,
            0,
            {"a": "{'flight': 1} in the table, {'flight': 2} in the bucket"},
        ),
        (
            {"a": State(7, None)},
            {"a": ONE},
            True,
            0,
            0,
            {"a": "{'flight': 1} in the table, None in the bucket"},
        ),
    ],
)
def test_compare(
    bucket: dict[str, State],
    table: dict[str, State],
    marked: bool,
    live: int,
    deleted: int,
    differences: dict[str, str],
) -> None:
    found = compare(bucket, table, marked=marked)
    assert found == Comparison(live, deleted, differences)
    assert found.equal == (not differences)


def test_verdict_counts() -> None:
    found = compare({"a": ONE, "b": TWO, "c": GONE}, {"a": ONE, "b": TWO}, marked=False)
    assert list(found.lines()) == ["equal: yes (2 keys by key, value and revision; 1 deleted keys)"]


def test_verdict_names_keys() -> None:
    bucket = {f"N{number:02}": ONE for number in range(12)}
    first, *named, more = compare(bucket, {}).lines()
    assert first == "equal: no (12 keys differ)"
    assert named[0] == "  N00: not in the table, revision 7 in the bucket"
    assert [line.split(":")[0] for line in named] == [f"  N{number:02}" for number in range(10)]
    assert more == "  and 2 more"


def test_empty_tables_are_not_equal() -> None:
    found = compare({}, {})
    assert not found.equal
    assert list(found.lines()) == ["equal: no (no keys to compare)"]
