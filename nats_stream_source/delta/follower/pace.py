"""How far a follower is, and the time between its commits.

A commit writes each touched file's deletion vector again, a data file and an entry of the log,
whatever the number of its rows. Where that is more than six times what changes, and more than 256
KiB a second, the time between commits becomes longer, up to half a second, so that a commit has
more rows: a commit of the usual size is due once six times the changes since the last one, or what
may be written in this time, have as many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from nats_stream_source.delta.merge_result import MergeResult

_MOST_WRITTEN = 6.0  # bytes for each byte that changes
_FEW_WRITTEN = 256 << 10  # bytes a second, whatever changes
_LONGEST = 0.5  # seconds
_DECAY = 0.998  # of a commit's figures with each later one: a compaction is one of hundreds


@dataclass(frozen=True, slots=True)
class FollowProgress:
    """How far a follower is.

    Attributes:
        rows: entries that were read since the start.
        changed: rows of the table that they inserted, updated or deleted.
        commits: merges that changed the table.
        revision: the stream sequence up to which the table has the bucket's entries.
        behind: sequences of the stream after it, as of the last look at the stream, which is at
            most two seconds old; None before the first look.
        seconds_behind: time between the message at ``revision`` and the stream's last one; None if
            it is unknown.
        keys: rows of the table.
        caught_up: whether the table had all that the bucket had at the last look.
    """

    rows: int = 0
    changed: int = 0
    commits: int = 0
    revision: int = 0
    behind: int | None = None
    seconds_behind: float | None = None
    keys: int = 0
    caught_up: bool = False


class Pace:
    """The time between commits.

    Attributes:
        seconds: the time from the begin of a commit to that of the next one.
    """

    def __init__(self, shortest: float) -> None:
        self.seconds = self._shortest = shortest
        self._written = self._changed = self._passed = self._commits = 0.0

    def add(self, result: MergeResult, passed: float) -> None:
        """Add what a commit has written.

        Args:
            passed: the seconds in which its entries arrived.
        """
        if not result.changed_bytes:
            return
        self._written = _DECAY * self._written + (result.written_bytes or 0)
        self._changed = _DECAY * self._changed + result.changed_bytes
        self._passed = _DECAY * self._passed + min(passed, _LONGEST)
        self._commits = _DECAY * self._commits + 1
        allowed = max(_MOST_WRITTEN * self._changed, _FEW_WRITTEN * self._passed)
        factor = self._written / allowed
        self.seconds = max(self._shortest, min(factor * self._passed / self._commits, _LONGEST))
