"""What the planner tells a reader: one split. Pure, since every task's process unpickles it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """One split: what a reader has to deliver, and how to label it.

    Attributes:
        start, end: the range ``(start, end]``.
        last_per_subject: read each key's last entry only.
        complete_from: after the read, the stream must not begin after this sequence, or entries
            went away unread; None where that does not matter.
    """

    bucket: str
    stream: str
    created: str
    prefix: str
    filters: tuple[str, ...]
    start: int
    end: int
    initial_through: int
    last_per_subject: bool
    complete_from: int | None
