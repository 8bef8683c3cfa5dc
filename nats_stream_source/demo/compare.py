"""Which keys of a table differ from the bucket: plain values in, the difference out.

Both sides are a dictionary from key to :class:`State`, the newest that each knows of the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_NAMED = 10


@dataclass(frozen=True, slots=True)
class State:
    """The newest entry of a key: its ``revision`` and its ``value``, None for a deleted key."""

    revision: int
    value: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What :func:`compare` found.

    Attributes:
        live: how many keys have a value on both sides, and are equal in it and in the revision.
        deleted: how many keys are deleted on both sides.
        differences: key to one sentence, for every key that is not equal.
    """

    live: int
    deleted: int
    differences: Mapping[str, str]

    @property
    def equal(self) -> bool:
        """Whether no key differs, and at least one was compared."""
        return not self.differences and self.live + self.deleted > 0

    def lines(self) -> Iterable[str]:
        """The verdict for people: one line, or one for each of the first ten keys that differ."""
        if self.equal:
            yield (
                f"equal: yes ({self.live:,} keys by key, value and revision;"
                f" {self.deleted:,} deleted keys)"
            )
            return
        if not self.differences:
            yield "equal: no (there was not one key to compare)"
            return
        yield f"equal: no ({len(self.differences):,} keys differ)"
        for key, what in sorted(self.differences.items())[:_NAMED]:
            yield f"  {key}: {what}"
        if len(self.differences) > _NAMED:
            yield f"  and {len(self.differences) - _NAMED:,} more"


def compare(
    bucket: Mapping[str, State], table: Mapping[str, State], *, marked: bool = True
) -> Comparison:
    """Compare the table with the bucket key by key.

    Args:
        bucket: the newest entry of each key in the bucket, deleted keys included.
        table: the newest row of each key in the table.
        marked: the table has a row for a deleted key, with the marker's revision; else it has none.
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
        return "in the table, unknown to the bucket"
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
