"""Compare a table with the bucket, key by key.

Both sides are a dictionary from key to :class:`State`, the key's newest entry on that side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_LISTED_KEYS = 10


@dataclass(frozen=True, slots=True)
class State:
    """The newest entry of a key: its ``revision`` and its ``value``, None for a deleted key."""

    revision: int
    value: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
        live: number of keys with the same value and revision on both sides.
        deleted: number of keys that are deleted on both sides.
        differences: key to a description, for each key that differs.
    """

    live: int
    deleted: int
    differences: Mapping[str, str]

    @property
    def equal(self) -> bool:
        """Whether at least one key was compared and no key differs."""
        return not self.differences and self.live + self.deleted > 0

    def lines(self) -> Iterable[str]:
        """The result as text: one line, and one line for each of the first ten keys that differ."""
        if self.equal:
            yield (
                f"equal: yes ({self.live:,} keys by key, value and revision;"
                f" {self.deleted:,} deleted keys)"
            )
            return
        if not self.differences:
            yield "equal: no (no keys to compare)"
            return
        yield f"equal: no ({len(self.differences):,} keys differ)"
        for key, what in sorted(self.differences.items())[:_LISTED_KEYS]:
            yield f"  {key}: {what}"
        if len(self.differences) > _LISTED_KEYS:
            yield f"  and {len(self.differences) - _LISTED_KEYS:,} more"


def compare(
    bucket: Mapping[str, State], table: Mapping[str, State], *, marked: bool = True
) -> Comparison:
    """Compare the table with the bucket key by key.

    Args:
        bucket: the newest entry of each key in the bucket, deleted keys included.
        table: the newest row of each key in the table.
        marked: whether the table has rows for deleted keys, with the markers' revisions.
    """
    differences: dict[str, str] = {}
    live = deleted = 0
    for key in bucket.keys() | table.keys():
        wanted, found = bucket.get(key), table.get(key)
        what = _difference(wanted, found, marked)
        if what is not None:
            differences[key] = what
        elif wanted is not None and wanted.value is None:
            deleted += 1
        else:
            live += 1
    return Comparison(live, deleted, differences)


def _difference(wanted: State | None, found: State | None, marked: bool) -> str | None:
    if wanted is None:
        return "in the table, not in the bucket"
    if found is None:
        if wanted.value is None and not marked:
            return None
        return f"not in the table, revision {wanted.revision} in the bucket"
    if wanted.value is None and not marked:
        return f"in the table, deleted in the bucket by revision {wanted.revision}"
    if wanted.revision != found.revision:
        return f"revision {found.revision} in the table, {wanted.revision} in the bucket"
    if wanted.value != found.value:
        return f"{found.value} in the table, {wanted.value} in the bucket"
    return None
