"""Sessions whose frames are damaged at random; the seed is in the failure.

With any damaged frame, the rows are correct, or the query fails with an error of this package. A
changed frame that is still valid (:class:`MutatedResponses`) cannot be detected: then its own row
may be wrong, and no other one.
"""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from nats_stream_source.errors import DataLossError, ProtocolError
from tests.faults.attack.forged_frames import payload
from tests.support.attack_target import ATTACK_TARGETS, Pair, run_attack
from tests.support.proxy.fault_proxy import (
    After,
    CutAt,
    Outcome,
    Proxy,
    Twice,
    is_delivery,
    is_status,
)

BUCKET = "mutated"
ROWS = 300
BLAMES = (ProtocolError.__name__, DataLossError.__name__)
"""What is said of frames that are wrong, and of rows that are gone; not of frames that are lost."""

SENT = {seq: b"%d" % (seq - 1) for seq in range(1, ROWS + 1)}


class MutatedResponses:
    """Mutations that a client cannot detect.

    Attributes:
        forged: sequences that rows may have with any value.
        twice: sequences that two rows may have.
        hidden: sequences of which there may be no row.
    """

    def __init__(self) -> None:
        self.forged: set[int] = set()
        self.twice: set[int] = set()
        self.hidden: set[int] = set()

    def tell(self, frame: bytes, other: bytes) -> None:
        """``other`` came in the place of ``frame``."""
        if is_delivery(frame):
            self._delivery(frame, other)
        elif is_status(frame, b"Idle"):
            # How far the server is, and how many messages it has sent until there.
            if len(re.findall(rb"\r\nNats-Last-(?:Consumer|Stream): *\d", other)) == 2:
                self.hidden.update(SENT)
        elif _is_json(payload(other)):
            # Which sequences the stream has, by its leader.
            self.hidden.update(SENT)

    def _delivery(self, frame: bytes, other: bytes) -> None:
        true, said = _numbers(frame), _numbers(other)
        assert true is not None
        if said is None or said[:2] != true[:2]:
            return  # to nobody, or out of its turn: it is asked for again
        seq, other_seq = true[2], said[2]
        self.forged.add(other_seq)
        if seq != other_seq:
            # Of a consumer that goes on behind, all until there; of one that goes back, this one.
            self.hidden.update(range(seq, max(seq, other_seq) + 1))
        if frame.split(b" ", 2)[1] != other.split(b" ", 2)[1]:
            # The last value of another key, so that the true one of this key is asked for.
            self.twice.add(seq)

    def check(self, found: list[Pair]) -> None:
        """All rows are there, once and in order, but for the lies."""
        seqs = [seq for seq, _ in found]
        back = [b for a, b in itertools.pairwise(seqs) if b <= a and b not in self.twice]
        assert not back, f"again, or too late: {back}"
        wrong = [one for one in found if one[1] != SENT.get(one[0]) and one[0] not in self.forged]
        assert not wrong, f"never sent: {wrong}"
        missing = SENT.keys() - set(seqs) - self.hidden
        assert not missing, f"missing: {sorted(missing)}"


def _numbers(frame: bytes) -> tuple[bytes, int, int] | None:
    """Of a delivery: the subscription, the consumer sequence and the stream sequence."""
    words = frame.split(b"\r\n", 1)[0].split()
    if len(words) < 5 or words[0] != b"MSG":
        return None
    tokens = words[-2].split(b".")
    first = 4 if len(tokens) == 9 else 6
    numbers = tokens[first + 1 : first + 3]
    if not words[-2].startswith(b"$JS.ACK.") or len(numbers) < 2:
        return None
    if not all(one.isdigit() and len(one) < 20 for one in numbers):
        return None
    return words[2], int(numbers[1]), min(int(numbers[0]), ROWS + 1)


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class Mutation:
    """Injects a fault into any frame of the server's.

    Args:
        whole: what a consumer sends is dropped, doubled, late or cut; else bytes are changed.
    """

    def __init__(self, seed: int, *, whole: bool) -> None:
        self._chance = random.Random(seed)
        self._rate = self._chance.choice([0.003, 0.02] if whole else [0.003, 0.02, 0.3])
        self._whole = whole
        self.lies = MutatedResponses()
        self.done = 0

    def __call__(self, frame: bytes) -> Outcome:
        if self._whole and not (is_delivery(frame) or is_status(frame, b"")):
            return True  # an answer that does not come is only waited for
        if self._chance.random() > self._rate:
            return True
        self.done += 1
        if self._whole:
            size, later = self._chance.randrange(len(frame)), self._chance.randint(1, 5)
            faults: list[Outcome] = [False, Twice(), After(later), CutAt(size)]
            return self._chance.choice(faults)
        other = self._changed(frame)
        if other != frame:
            self.lies.tell(frame, other)
        return other

    def _changed(self, frame: bytes) -> bytes:
        chance, data = self._chance, bytearray(frame)
        for _ in range(chance.choice([1, 1, 3, 10])):
            at = chance.randrange(len(data) or 1)
            piece = chance.choice([b"", b"\r\n", b" ", b".", b"9", b"\x00", b"\xff", b"MSG "])
            data[at : at + chance.randint(0, 2)] = piece
        return bytes(data)


def _fuzz(proxy: Proxy, target: str, seeds: range, *, whole: bool) -> None:
    done = read = 0
    for seed in seeds:
        mutation = Mutation(seed, whole=whole)
        try:
            found = run_attack(
                proxy, target, BUCKET, mutation, lambda mutation=mutation: mutation.done
            )
            if isinstance(found, str):
                assert not (whole and found in BLAMES), found
            else:
                mutation.lies.check(found)
                read += bool(mutation.done)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        done += mutation.done
    assert done
    assert read or len(seeds) < 10  # not all of it ends with an error


FEW, MANY = {"ordered reader": 3}, {"ordered reader": 60}  # seeds; the formats have its cursor


@pytest.mark.parametrize("whole", [False, True], ids=["bytes", "whole frames"])
@pytest.mark.parametrize("target", ATTACK_TARGETS)
def test_mutated_sessions(proxy: Proxy, target: str, whole: bool) -> None:
    _fuzz(proxy, target, range(FEW.get(target, 1)), whole=whole)


@pytest.mark.faults
@pytest.mark.parametrize("whole", [False, True], ids=["bytes", "whole frames"])
@pytest.mark.parametrize("target", ATTACK_TARGETS)
def test_mutated_sessions_fail_with_named_errors(proxy: Proxy, target: str, whole: bool) -> None:
    few = FEW.get(target, 1)
    _fuzz(proxy, target, range(few, MANY.get(target, 16)), whole=whole)
