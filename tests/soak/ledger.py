"""What was written, one line each, only ever appended.

A write has three lines at most::

    sent <number> <place> <key> <operation> <ttl>     before it goes out
    ack <number> <sequence>                           its PubAck came
    unsure <number> <error>                           it did not, or said no: stored or not

A write without a second line was under way when the generator ended: as unsure as the third kind.
The value of a PUT follows from its number alone, so that a row shows whose it is, whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

PUT, DEL, PURGE = "PUT", "DEL", "PURGE"

_SIZES = (3, 17, 40, 40, 120, 120, 400, 3000)  # bytes; most are small, as in a bucket of states
_LARGE_EVERY, _LARGE = 997, 60_000


@dataclass(frozen=True, slots=True)
class Write:
    """One write.

    Attributes:
        number: unique in the run.
        place: ``full``, ``current`` or ``stream``.
        operation: ``PUT``, ``DEL`` or ``PURGE``; a message of a stream is a PUT.
        ttl: seconds after which the server removes it; 0 for never.
        seq: the sequence that the PubAck named; None when the write is unsure.
    """

    number: int
    place: str
    key: str
    operation: str = PUT
    ttl: int = 0
    seq: int | None = None


def value_of(number: int) -> bytes:
    """The value of the PUT with this number."""
    size = _LARGE if number % _LARGE_EVERY == 0 else _SIZES[number % len(_SIZES)]
    start = b"%d:" % number
    return start + b"\r\nMSG abc" * (size // 9 + 1)  # what would mislead a careless parser


def number_of(value: bytes) -> int | None:
    """Whose value this is; None when it is nobody's, or not whole."""
    digits, colon, _ = value[:24].partition(b":")
    if not colon or not digits.isdigit():
        return None
    number = int(digits)
    return number if value == value_of(number) else None


class Ledger:
    """The ledger as the generator writes it."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", buffering=1)  # a line at a time
        self.sent = self.acked = self.unsure = 0

    def send(self, write: Write) -> None:
        """Before the write goes out."""
        self.sent += 1
        fields = (write.number, write.place, write.key, write.operation, write.ttl)
        self._line("sent", *fields)

    def ack(self, number: int, seq: int) -> None:
        """Its PubAck came."""
        self.acked += 1
        self._line("ack", number, seq)

    def lose(self, number: int, error: BaseException) -> None:
        """Nobody knows."""
        self.unsure += 1
        self._line("unsure", number, type(error).__name__)

    def close(self) -> None:
        self._file.close()

    def _line(self, *fields: object) -> None:
        self._file.write("\t".join(map(str, fields)) + "\n")


def read_ledger(path: Path) -> list[Write]:
    """All writes, by number."""
    writes: dict[int, Write] = {}
    for kind, number, *rest in _lines(path):
        if kind == "sent":
            place, key, operation, ttl = rest
            writes[int(number)] = Write(int(number), place, key, operation, int(ttl))
        elif kind == "ack":
            writes[int(number)] = replace(writes[int(number)], seq=int(rest[0]))
    return list(writes.values())


def counts(path: Path) -> tuple[int, int]:
    """How many writes are acknowledged, and how many were sent, so far."""
    acked = sent = 0
    for kind, *_ in _lines(path):
        acked += kind == "ack"
        sent += kind == "sent"
    return acked, sent


def _lines(path: Path) -> Iterator[list[str]]:
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):  # the last one may be half written
                yield line[:-1].split("\t")
