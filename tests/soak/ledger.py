"""What was written, one line each, only ever appended.

A write has three lines at most::

    sent <number> <place> <key> <operation> <ttl> <time>     before it goes out
    ack <number> <sequence> <time>                           its PubAck came
    unsure <number> <error>                                  it did not, or said no: stored or not

The times are this machine's, whose clock the servers and the queries have too: a write was stored
between its two.

A write without a second line was under way when the generator ended: as unsure as the third kind.
The value of a PUT follows from its number alone, so that a row shows whose it is, whole.
"""

from __future__ import annotations

import time
from collections import Counter
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
        sent_at, acked_at: when it went out, and when its PubAck came; 0 when none did.
    """

    number: int
    place: str
    key: str
    operation: str = PUT
    ttl: int = 0
    seq: int | None = None
    sent_at: float = 0.0
    acked_at: float = 0.0


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
        self._line("sent", *fields, _now())

    def ack(self, number: int, seq: int) -> None:
        """Its PubAck came."""
        self.acked += 1
        self._line("ack", number, seq, _now())

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
            place, key, operation, ttl, at = rest
            writes[int(number)] = Write(
                int(number), place, key, operation, int(ttl), sent_at=float(at)
            )
        elif kind == "ack":
            seq, at = rest
            one = writes[int(number)]
            writes[int(number)] = replace(one, seq=int(seq), acked_at=float(at))
    return list(writes.values())


class Acknowledged:
    """How many writes to each place are acknowledged, of a ledger that is still being written.

    Attributes:
        counts: by place, as of the last :meth:`look`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._places: dict[str, str] = {}  # of the writes under way, by number
        self.counts: Counter[str] = Counter()

    def look(self) -> Counter[str]:
        """Read what came since, and say how many there are."""
        if not self._path.exists():
            return self.counts
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines, end, _ = file.read().rpartition(b"\n")  # the last one may be half written
        self._read += len(lines + end)
        for line in lines.decode().split("\n") if end else ():
            kind, number, *rest = line.split("\t")
            if kind == "sent":
                self._places[number] = rest[0]
            elif (place := self._places.pop(number, None)) and kind == "ack":
                self.counts[place] += 1
        return self.counts


def _now() -> str:
    return f"{time.time():.3f}"


def _lines(path: Path) -> Iterator[list[str]]:
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):  # the last one may be half written
                yield line[:-1].split("\t")
