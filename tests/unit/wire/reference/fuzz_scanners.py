"""Fuzzing of the compiled scanner against the definition of a frame, in guarded memory.

Run it with ``python -m tests.unit.wire.reference.fuzz_scanners [SECONDS]``.

Each case is a few frames that are cut, damaged or both. The compiled scanner must give the table of
``parse_frame``, frame by frame, and the numbers of the ACK subjects; or both reject the bytes. The
reference parser and the copies of slices judge one case in eight. Bytes after the given size, and a
page that must not be read, follow each block.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import re
import sys
import time

import numpy as np
import pyarrow as pa

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.arrow_slices import slices
from nats_stream_source.wire.framing import parse as definition, scanner
from nats_stream_source.wire.framing.parse import Table
from tests.unit.wire.reference.parser import NotNatsError, parse

_PROT_NONE = 0
BLOCK = b"NATS/1.0\r\nA: b\r\n\r\n"
PREFIXES = [
    *(b"$JS.ACK.S.C.", b"$JS.ACK.S.C.", b"$JS.ACK._.h.S.C.", b"$JS.ACK.S.other-1."),
    *(b"$JS.ACK.", b"_INBOX.x", b"$JS.ACK.S.C.D.", b"$JS.ACK...."),
]
TAILS = [b"", b"", b"", b"", b".new", b".new.er", b".", b".7"]
NUMBERS = ["0", "1", "9", "10", "007", "", "-1", "+1", "1_0", "x", "9223372036854775807"]
NUMBERS += ["9223372036854775808", "99999999", "123456789", "18446744073709551616", "0" * 25]
PIECES = [b"\r\n", b"\n", b"\r", b" ", b"  ", b"\t", b".", b":", b"/", b"0", b"9", b"\x00", b"\xff"]
PIECES += [b"MSG ", b"HMSG ", b"PING\r\n", b"$JS.ACK.", b"\x80", b"\x0b", b"-", b"99999999999"]
USUAL = re.compile(
    rb"H?MSG [^\x00-\x20]+ [0-9]{1,19} [^\x00-\x20]+( [0-9]{1,19}){1,2}\r\n", re.DOTALL
)
NOT_PARSED = [-1] * 5
Outcome = tuple[list[list[int]], int, int] | str


class GuardedBlock:
    """Memory between two pages that must not be read (POSIX): the process ends if one is.

    Bytes at the end of the block adjoin the page after it, bytes at its start the page before it.
    """

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self._pages = -(-size // page)
        self._map = mmap.mmap(-1, (self._pages + 2) * page)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        for address in (first, first + (self._pages + 1) * page):
            done = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), _PROT_NONE)
            assert done == 0, ctypes.get_errno()
        self._view = memoryview(self._map)[page : (self._pages + 1) * page]

    def at_end(self, data: bytes) -> memoryview:
        """Return ``data`` before the second guard."""
        view = self._view[len(self._view) - len(data) :]
        view[:] = data
        return view

    def at_start(self, data: bytes) -> memoryview:
        """Return ``data`` after the first guard."""
        view = self._view[: len(data)]
        view[:] = data
        return view


def frame(chance: random.Random, prefix: bytes, sequence: int) -> bytes:
    """A frame as a server writes it, or nearly so."""
    if chance.random() < 0.08:
        return chance.choice(
            [b"PING\r\n", b"+OK\r\n", b"INFO {}\r\n", b"-ERR 'x'\r\n", b"PONG \r\n"]
        )
    time_ns = 1_795_226_905_622_377_000 + sequence
    numbers = [str(n) for n in (1, sequence, sequence + 7, time_ns, 9_000_000 - sequence)]
    if chance.random() < 0.15:
        numbers[chance.randrange(5)] = chance.choice(NUMBERS)
    reply = prefix + ".".join(numbers).encode() + chance.choice(TAILS)
    words = [
        b"$KV.b." + b"k" * chance.randint(0, 19),
        chance.choice([b"7", b"7", b"7", b"12", b"007"]),
    ]
    if chance.random() < 0.9:
        words.append(reply)
    payload = chance.choice([b"", b"x", b"value", b"\r\nMSG x 1 5\r\nhello", chance.randbytes(20)])
    header = BLOCK if chance.random() < 0.3 else b""
    sizes = [len(header)] if header else []
    sizes.append(len(header) + len(payload))
    if chance.random() < 0.05:
        sizes[chance.randrange(len(sizes))] += chance.choice([-1, 1, len(payload) + 1, 1 << 31])
    words += [b"%d" % size for size in sizes]
    return b"%s %s\r\n%s%s\r\n" % (b"HMSG" if header else b"MSG", b" ".join(words), header, payload)


def case(chance: random.Random) -> bytes:
    """A few frames, mostly alike, and perhaps damaged."""
    prefix = chance.choice(PREFIXES)
    sequence = chance.choice([0, 7, 98, 9_998, 99_999_998, 10**15 - 2])
    parts = []
    for _ in range(chance.choice([1, 2, 3, 6])):
        if chance.random() < 0.1:
            prefix = chance.choice(PREFIXES)
        sequence += 1
        parts.append(frame(chance, prefix, sequence))
    data = b"".join(parts)
    for _ in range(chance.choice([0, 1, 1, 2])):
        place = chance.randrange(len(data) + 1)
        piece = chance.choice([*PIECES, b"", chance.randbytes(1)])
        data = data[:place] + piece + data[place + chance.randint(0, 2) :]
    return data


def defined(data: memoryview, begin: int, size: int) -> Outcome:
    """What the definition finds; the numbers of unusual lines are parsed later."""
    rows: list[list[int]] = []
    while begin < size:
        try:
            row = definition.parse_frame(data, begin, size)
        except ProtocolError as error:
            return str(error)
        if isinstance(row, int):
            return rows, begin, row
        usual = USUAL.match(data, begin, size)
        numbers = defined_numbers(bytes(data[row[6] : row[7]])) if usual else NOT_PARSED
        rows.append([*row, *numbers])
        begin = row[1]
    return rows, begin, 0


def defined_numbers(reply: bytes) -> list[int]:
    """The five numbers of an ACK subject, or -1 if it is another subject or has other tokens."""
    tokens = reply.split(b".")
    if reply.startswith(b"$JS.ACK.") and (len(tokens) == 9 or len(tokens) >= 11):
        first = 4 if len(tokens) == 9 else 6
        five = tokens[first : first + 5]
        if all(word.isdigit() and len(word) <= 19 and int(word) < 1 << 63 for word in five):
            return [int(word) for word in five]
    return NOT_PARSED


def compiled(data: memoryview, begin: int, size: int) -> Outcome:
    """What the compiled scanner finds."""
    try:
        table, position, needed = scanner.find_frames_compiled(data, begin, size)
    except ProtocolError as error:
        return str(error)
    return np.ascontiguousarray(table.T).tolist(), position, needed


def compare(data: bytes, chance: random.Random, block: GuardedBlock) -> None:
    """Compare the scanners on one case; AssertionError at a difference."""
    size = chance.choice([len(data), len(data), chance.randint(0, len(data))])
    # Bytes of an earlier frame precede the frames, as in a block.
    before = chance.choice([b"", b"", b"MSG a 1 2\r\nxx\r\n"])
    place = block.at_end if chance.random() < 0.8 else block.at_start
    if chance.random() < 0.5:
        data = data[:size]  # otherwise bytes that belong to nothing follow
    view = place(before + data)
    begin, end = len(before), len(before) + size
    expected = defined(view, begin, end)
    assert compiled(view, begin, end) == expected
    if chance.random() > 0.125:
        return
    if not isinstance(expected, str):
        table = np.array(np.array(expected[0], np.int64).reshape(-1, 16).T, order="C")
        compare_columns(view, table)
    try:
        frames, rest = parse(data[:size])
    except NotNatsError:
        assert isinstance(expected, str)
    else:
        assert not isinstance(expected, str)
        assert (len(frames), len(rest)) == (len(expected[0]), end - expected[1])


def compare_columns(view: memoryview, table: Table) -> None:
    """Compare the copies of subjects, without a prefix, header blocks and payloads."""
    for first, last, prefix in ((4, 5, b""), (4, 5, b"$KV.b."), (8, 9, b""), (9, 10, b"")):
        found: list[list[bytes] | str] = []
        for way in ("compiled", "python"):
            scanner.select(way)
            try:
                column = slices(view, table[first], table[last], pa.binary(), prefix)
                found.append(column.to_pylist())
            except ValueError as error:
                found.append(str(error))
        assert found[0] == found[1]


def fuzz_scanners(seed: int, cases: int, block: GuardedBlock | None = None) -> None:
    """Compare ``cases`` cases; AssertionError at a difference."""
    block = block or GuardedBlock(1 << 16)
    for number in range(cases):
        chance = random.Random(seed * 1_000_003 + number)
        data = case(chance)
        try:
            compare(data, chance, block)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, case {number}: {data!r}") from error


if __name__ == "__main__":
    began = time.monotonic()
    seconds = float(sys.argv[1] if len(sys.argv) > 1 else 60)
    memory = GuardedBlock(1 << 16)
    seed, count = random.randrange(1 << 32), 0
    while time.monotonic() < began + seconds:
        seed, count = seed + 1, count + 1000
        fuzz_scanners(seed, 1000, memory)
    print(f"no difference in {count:,} cases; last seed {seed}")
