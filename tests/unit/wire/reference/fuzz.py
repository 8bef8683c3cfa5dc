"""Fuzzing of the framer against the plain parser.

Run it with ``python -m tests.unit.wire.reference.fuzz [SECONDS]``.

Streams of deliveries, other messages and control lines are cut anywhere and damaged at random
places. Both parsers must find the same frames, and fail alike. ``fuzz()`` with a fixed seed is part
of the test suite; left to run, each round has a new seed, and a difference names it.
"""

from __future__ import annotations

import random
import sys
import time

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.consumer.ack_subject import ack_tokens, is_delivery
from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.frames import Framer
from tests.unit.wire.reference.frames import seen
from tests.unit.wire.reference.parser import Frame, NotNatsError, parse
from tests.unit.wire.reference.streams import using

BLOCK = b"NATS/1.0\r\nA: b\r\n\r\n"
PIECES = [b"\r\n", b" ", b"MSG ", b"HMSG ", b"PING\r\n", b"$JS.ACK.", b".", b"7", b"\n", b"\x00"]


def stream(chance: random.Random) -> bytes:
    """A sound stream: mostly runs of deliveries that look alike."""
    parts = []
    sequence = chance.choice([0, 90, 9_990, 10**8 - 20])
    for _ in range(chance.randint(1, 6)):
        prefix = chance.choice([b"$JS.ACK.S.C", b"$JS.ACK._.h.S.C", b"$JS.ACK.S.other"])
        headers, size = chance.random() < 0.3, chance.choice([0, 5, 12, 130])
        for _ in range(chance.choice([1, 3, 40, 200])):
            sequence += 1
            reply = b"%s.1.%d.%d.17952269056223770%02d.%d" % (
                prefix,
                sequence,
                sequence,
                sequence % 100,
                9_000 - sequence % 9_000,
            )
            value = chance.choice([bytes(size), chance.randbytes(size), b"\r\nMSG x 1 5\r\nhello"])
            words = b"$KV.b.%s 7 %s" % (b"k" * chance.randint(1, 20), reply)
            if headers:
                sizes = len(BLOCK), len(BLOCK) + len(value)
                parts.append(b"HMSG %s %d %d\r\n%s%s\r\n" % (words, *sizes, BLOCK, value))
            else:
                parts.append(b"MSG %s %d\r\n%s\r\n" % (words, len(value), value))
        parts.append(
            chance.choice([b"PING\r\n", b"+OK\r\n", b"MSG a 9 1\r\nx\r\n", b"INFO {}\r\n"])
        )
    return b"".join(parts)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A few bytes put in, left out or changed; or nothing."""
    for _ in range(chance.choice([0, 0, 1, 1, 3])):
        place = chance.randrange(len(data) + 1)
        piece = chance.choice([*PIECES, b"", chance.randbytes(1)])
        data = data[:place] + piece + data[place + chance.randint(0, 2) :]
    return data


def read(data: bytes, chance: random.Random) -> tuple[list[Frame], int] | str:
    """What the framer makes of it, fed in pieces; and the numbers hold against plain splitting."""
    framer = Framer()
    found: list[Frame] = []
    position = 0
    try:
        while position < len(data):
            step = chance.choice([1, 50, 3_000, len(data)])
            frames = framer.feed(data[position : position + step])
            position += step
            found += seen(frames)
            deliveries = frames.select(is_delivery(frames))
            try:
                tokens = ack_tokens(deliveries)
            except ProtocolError:
                continue
            for i in range(len(deliveries)):
                words = deliveries.reply(i).split(b".")
                assert int(words[5 if len(words) == 9 else 7]) == tokens.stream_seq[i]
                assert int(words[8 if len(words) == 9 else 10]) == tokens.pending[i]
    except ProtocolError:
        return "no frame"
    return found, framer.pending


def fuzz(seed: int, rounds: int) -> None:
    """Compare ``rounds`` streams; AssertionError at a difference."""
    for round_ in range(rounds):
        chance = random.Random(f"{seed}/{round_}")
        data = damaged(stream(chance), chance)
        try:
            frames, rest = parse(data)
            expected: tuple[list[Frame], int] | str = frames, len(rest)
        except NotNatsError:
            expected = "no frame"
        state = chance.getstate()
        for name in scanner.available():
            chance.setstate(state)  # the same pieces
            with using(name):
                assert read(data, chance) == expected, f"{name}: seed {seed}, round {round_}"


if __name__ == "__main__":
    end = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 60)
    seed = random.randrange(1 << 32)
    while time.monotonic() < end:
        seed += 1
        fuzz(seed, 20)
    print(f"no difference; last seed {seed}")
