"""The ledger: an append-only file with one line per event of a write.

A write has at most two lines: its ``sent`` line, and one of the others::

    sent <number> <source> <key> <operation> <ttl> <time>    before the message is sent
    ack <number> <sequence> <time>                           its PubAck was received
    unsure <number> <error>                                  no PubAck, or an error: stored or not

The times are of this machine, whose clock servers and queries share: a write was stored between its
two times. A write without a second line was in flight when the generator ended, and is unsure too.
The number of a PUT determines its value, so a row identifies its write and shows that it is whole.
"""

from __future__ import annotations

import time
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
        source: the bucket or stream; in the soak ``full``, ``current`` or ``stream``.
        operation: ``PUT``, ``DEL`` or ``PURGE``; a message of a stream is a PUT.
        ttl: seconds after which the server removes it; 0 for never.
        seq: the sequence in the PubAck; None for an unsure write.
        sent_at, acked_at: when it was sent and its PubAck received; 0 without a PubAck.
        payload: value of a PUT that does not follow from its number.
    """

    number: int
    source: str
    key: str
    operation: str = PUT
    ttl: int = 0
    seq: int | None = None
    sent_at: float = 0.0
    acked_at: float = 0.0
    payload: bytes | None = None

    @property
    def value(self) -> bytes | None:
        """The value of a PUT; None for a marker."""
        if self.operation != PUT:
            return None
        return value_of(self.number) if self.payload is None else self.payload


def value_of(number: int) -> bytes:
    """The value of the PUT with this number."""
    size = _LARGE if number % _LARGE_EVERY == 0 else _SIZES[number % len(_SIZES)]
    start = b"%d:" % number
    return start + b"\r\nMSG abc" * (size // 9 + 1)  # resembles a protocol line


def number_of(value: bytes) -> int | None:
    """The number of the PUT with this value; None if no number has exactly this value."""
    digits, colon, _ = value[:24].partition(b":")
    if not colon or not digits.isdigit():
        return None
    number = int(digits)
    return number if value == value_of(number) else None


class WriteIndex:
    def __init__(self, writes: list[Write]) -> None:
        self.by_number = {write.number: write for write in writes}
        self._by_payload = {w.payload: w for w in writes if w.payload is not None}

    def find(self, value: bytes | None) -> Write | None:
        """The write with this value; None if no write has it, or for a marker."""
        if value is None:
            return None
        if (write := self._by_payload.get(value)) is not None:
            return write
        number = number_of(value)
        write = None if number is None else self.by_number.get(number)
        return write if write is not None and write.payload is None else None


class Ledger:
    """Appends to the ledger; used by the generator."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", buffering=1)  # line buffered

    def sent(self, write: Write) -> None:
        fields = (write.number, write.source, write.key, write.operation, write.ttl)
        self._append("sent", *fields, _now())

    def acked(self, number: int, seq: int) -> None:
        self._append("ack", number, seq, _now())

    def unsure(self, number: int, error: BaseException) -> None:
        """Record a write that may or may not be stored."""
        self._append("unsure", number, type(error).__name__)

    def close(self) -> None:
        self._file.close()

    def _append(self, *fields: object) -> None:
        self._file.write("\t".join(map(str, fields)) + "\n")


def read_ledger(path: Path) -> list[Write]:
    writes: dict[int, Write] = {}
    for kind, number, *rest in _lines(path):
        if kind == "sent":
            source, key, operation, ttl, at = rest
            writes[int(number)] = Write(
                int(number), source, key, operation, int(ttl), sent_at=float(at)
            )
        elif kind == "ack":
            seq, at = rest
            write = writes[int(number)]
            writes[int(number)] = replace(write, seq=int(seq), acked_at=float(at))
    return list(writes.values())


def _now() -> str:
    return f"{time.time():.3f}"


def _lines(path: Path) -> Iterator[list[str]]:
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):  # the last line may be incomplete
                yield line[:-1].split("\t")
