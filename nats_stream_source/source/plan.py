"""What the planner tells a reader: one split. Pure, since every task's process unpickles it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """One split: what a reader has to deliver, and how to label it.

    Attributes:
        prefix: what stands before a key in every subject.
        start, end: the range ``(start, end]``.
        last_per_subject: read each key's last entry only.
        initial_through: rows up to this sequence are initial values.
        complete_from: the first sequence that the stream had of the range, where all messages are
            wanted: those that go away before they are read are a loss. None where not.
        history_through: where a query begins, what goes up to here before its first row is no loss.
        pinned: sequence and time of a message that the stream had when this was planned. Where
            another one is there by now, the stream was set back meanwhile. None if there was none.
    """

    stream: str
    created: str
    prefix: str
    filters: tuple[str, ...]
    start: int
    end: int
    initial_through: int
    last_per_subject: bool = False
    complete_from: int | None = None
    history_through: int = 0
    pinned: tuple[int, str] | None = None

    @property
    def known(self) -> int:
        """The last sequence that the stream is known to have had when this was planned."""
        return max(self.end, self.pinned[0]) if self.pinned else self.end
