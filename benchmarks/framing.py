"""Frames of one block by both frame scanners: ``python -m benchmarks.framing [--rounds 30]``.

The deliveries of one consumer, framed in turns by the scanners of this installation, without a
server. The time is that of the best round, in nanoseconds per frame. The table is that of
``docs/internals/performance_method.md``.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nats_stream_source.wire.framing import scanner

_HEADER = b"NATS/1.0\r\nNats-Expected-Stream: KV_bench\r\nTrace: 000000000012\r\n\r\n"
_MIN_FRAMES = 200  # of a measurement: a smaller block is framed several times


@dataclass(frozen=True, slots=True)
class Case:
    """A block of ``frames`` deliveries with values of ``size`` bytes."""

    name: str
    frames: int
    size: int
    header: bytes = b""

    def block(self) -> bytes:
        """The bytes that a server sends."""
        chance = random.Random(self.size)
        values = [chance.randbytes(self.size) for _ in range(64)]
        parts = []
        for i in range(self.frames):
            sequence = 1_000_000 + i
            reply = b"$JS.ACK.KV_bench.spark-abc123-1.1.%d.%d.%d.%d" % (
                sequence,
                sequence,
                1_795_226_905_622_000_000 + i,
                4_000_000 - i,
            )
            value, header = values[i % len(values)], self.header
            words = b"$KV.bench.key.%d 7 %s" % (i % 100_000, reply)
            if header:
                sizes = len(header), len(header) + len(value)
                parts.append(b"HMSG %s %d %d\r\n%s%s\r\n" % (words, *sizes, header, value))
            else:
                parts.append(b"MSG %s %d\r\n%s\r\n" % (words, len(value), value))
        return b"".join(parts)


CASES = (
    Case("16 B", 4096, 16),
    Case("128 B", 4096, 128),
    Case("128 B and headers", 4096, 128, _HEADER),
    Case("1,024 B", 1000, 1024),
    Case("16,384 B", 60, 16384),
    Case("128 B", 1, 128),
)


def measure(case: Case, rounds: int) -> dict[scanner.Scanner, float]:
    """Nanoseconds per frame of each scanner, of its best round."""
    block = memoryview(case.block())
    times = max(1, _MIN_FRAMES // case.frames)
    best: dict[scanner.Scanner, float] = {}
    before = scanner.selected()
    try:
        for _ in range(rounds):
            for name in scanner.available():
                scanner.select(name)
                began = time.perf_counter()
                for _ in range(times):
                    table, _, _ = scanner.find_frames(block)
                spent = (time.perf_counter() - began) / times / case.frames * 1e9
                best[name] = min(spent, best.get(name, spent))
                if table.shape[1] != case.frames:
                    raise RuntimeError(f"{name}: {table.shape[1]} frames of {case.frames}")
    finally:
        scanner.select(before)
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args(arguments).rounds
    for case in CASES:
        best = measure(case, rounds)
        python = best["python"]
        compiled = best.get("compiled")
        shown = (
            [f"{compiled:,.0f}", f"{python:,.0f}", f"{python / compiled:.1f}"] if compiled else []
        )
        cells = [case.name, f"{case.frames:,}", *(shown or ["", f"{python:,.0f}", ""])]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
