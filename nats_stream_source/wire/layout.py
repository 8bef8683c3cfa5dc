"""Numbers in text, many at once: eight digits are one 64-bit integer.

Theory of operation. The replies of one consumer's deliveries look alike: as long as no number grows
by a digit, each token stands at the same distance from the reply's end. So the layout of one reply
is read plainly (:func:`layout_of`), and then as many others as have it are read together
(:meth:`Layout.read`). That a reply has the layout is checked, not assumed: all that stands before
the numbers byte for byte, a digit wherever there must be one, and a dot before each number.

The arithmetic. A word of eight ASCII digits, the first in its lowest byte, becomes its value in
three steps: neighbouring digits make pairs, pairs make fours, fours make the number; each step is
one multiplication that adds ten (a hundred, ten thousand) times the one to the other, in all parts
of the word at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
Words = NDArray[np.uint64]

V1_TOKENS, V2_TOKENS = 9, 11
FIELDS = 5
"""delivered, stream_seq, consumer_seq, time in nanoseconds, pending: the order of a reply's end."""

_ACK_PREFIX = b"$JS.ACK."
_UPPER_HALVES = np.uint64(0xF0F0F0F0F0F0F0F0)
_TENS, _HUNDREDS, _TEN_THOUSANDS = (np.uint64(1 + (10**k << 8 * k)) for k in (1, 2, 4))
_PAIRS, _FOURS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
_EIGHT, _SIXTEEN, _THIRTY_TWO = np.uint64(8), np.uint64(16), np.uint64(32)
_ZEROS, _SPACES = np.uint64(0x3030303030303030), np.uint64(0x2020202020202020)
_SIXES = np.uint64(0x0606060606060606)
_LOW_SEVEN = np.uint64(0x7F7F7F7F7F7F7F7F)
# The k last bytes of a word, those in its upper end.
_LAST = np.array([0, *((1 << 64) - (1 << 64 - 8 * k) for k in range(1, 8)), 0], np.uint64)
_LOWEST = np.array([*_LAST[:8], (1 << 64) - 1], np.uint64)  # and all eight of them

MOST_DIGITS = 18
"""A number of so many digits fits into 64 bits."""


def bytes_at(buffer: bytes | memoryview, begin: Positions, width: int) -> NDArray[Any]:
    """The ``width`` bytes from each position on, as one element of a new array each."""
    # An array over the buffer whose elements overlap: the i-th begins at byte i.
    overlapping: NDArray[Any] = np.ndarray((len(buffer) - width + 1,), f"V{width}", buffer, 0, (1,))
    found: NDArray[Any] = overlapping[begin]
    return found


def words_at(buffer: bytes | memoryview, begin: Positions) -> Words:
    """The eight bytes from each position on as an integer, the first byte in its lowest part."""
    return bytes_at(buffer, begin, 8).view("<u8")


def number_before(
    buffer: bytes | memoryview, end: Positions
) -> tuple[Positions, Positions, NDArray[np.bool_]]:
    """The number after the last space of ``buffer[:end]``, for each end.

    Returns:
        the number of digits, at most 8; the number; whether it has 1 to 7 digits and stands behind
        a space, without which the two others mean nothing.
    """
    word = words_at(buffer, end - 8)
    spaces = word ^ _SPACES
    # The highest bit of each byte that was a space, and no other bit.
    spaces = ~(((spaces & _LOW_SEVEN) + _LOW_SEVEN) | spaces | _LOW_SEVEN)
    # The position of the highest one, from the exponent of a float.
    digits = (1086 - (spaces.astype(np.float64).view(np.int64) >> 52)) >> 3
    digits = np.minimum(digits, 8)
    good = (digits > 0) & (digits < 8)
    word ^= _ZEROS
    word &= _LAST[digits]
    good &= ((word | (word + _SIXES)) & _UPPER_HALVES) == 0
    return digits, _value(word), good


def numbers_between(
    buffer: bytes | memoryview, begin: Positions, end: Positions
) -> tuple[Positions, NDArray[np.bool_]]:
    """The decimal numbers that stand at ``buffer[begin:end]``.

    Args:
        end: at least 24 bytes behind the buffer's begin.

    Returns:
        the numbers; which of them are such, of 1 to 18 digits: the others mean nothing.
    """
    width = end - begin
    good = (width > 0) & (width <= MOST_DIGITS)
    total = np.zeros(end.size, np.int64)
    longest = int(width.max(initial=0, where=good))
    for done in range(0, longest, 8):
        word = words_at(buffer, end - (done + 8))
        word ^= _ZEROS
        word &= _LOWEST[np.clip(width - done, 0, 8)]
        good &= ((word | (word + _SIXES)) & _UPPER_HALVES) == 0
        total += _value(word) * 10**done
    return total, good


def _value(word: Words) -> Positions:
    """The number whose digits are the bytes of each word; overwrites them."""
    word *= _TENS
    word >>= _EIGHT
    word &= _PAIRS
    word *= _HUNDREDS
    word >>= _SIXTEEN
    word &= _FOURS
    word *= _TEN_THOUSANDS
    word >>= _THIRTY_TWO
    value: Positions = word.view(np.int64)
    return value


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of a reply stand.

    The numbers after ``prefix`` are cut into words of eight bytes. A word ends so many bytes before
    the reply's end, and holds up to eight digits at its end, before them a dot if there is room.

    Attributes:
        length: bytes from the begin of ``prefix`` to the reply's end.
        prefix: all up to the dot before ``stream_seq``: ``delivered`` is in it; and what was given
            to stand before the reply.
        delivered: that number.
        tail: bytes from the begin of the first word to the reply's end.
        begin: for each word, where in the tail it begins.
        expected, looked_at, room: for each word, byte by byte: what is XORed to make a digit its
            value and a dot 0; 0xFF where there is a digit or dot; what may be added to the result
            without reaching the upper half of the byte.
        number, weight: to which number a word belongs, and what it counts there.
    """

    length: int
    prefix: bytes
    delivered: int
    tail: int
    begin: tuple[int, ...]
    expected: Words
    looked_at: Words
    room: Words
    number: tuple[int, ...]
    weight: tuple[int, ...]

    def read(self, buffer: bytes | memoryview, end: Positions, numbers: Positions) -> int:
        """Read the replies that end at ``end`` into ``numbers`` (FIELDS rows).

        Returns:
            how many, from the first on, have this layout; what is behind them is undefined.
        """
        prefixes = bytes_at(buffer, end - self.length, len(self.prefix))
        # One look at the whole tail of each reply, then its words from there.
        tails = bytes_at(buffer, end - self.tail, self.tail)
        word = np.empty((len(self.begin), end.size), "<u8")
        for row, begin in zip(word, self.begin, strict=True):
            row[:] = np.ndarray(end.shape, "<u8", tails, begin, (self.tail,))
        word ^= self.expected
        word &= self.looked_at
        wrong = word + self.room
        wrong |= word
        wrong &= _UPPER_HALVES
        good = end.size
        if wrong.any():
            good = int(wrong.any(axis=0).argmax())
        if prefixes[:good].tobytes() != self.prefix * good:
            bytes_of = prefixes[:good].view(np.uint8).reshape(good, -1)
            same = bytes_of == np.frombuffer(self.prefix, np.uint8)
            good = int(same.all(axis=1).argmin())
        result = numbers[:, :good]
        result[0] = self.delivered
        result[1:] = 0
        for values, number, weight in zip(_value(word), self.number, self.weight, strict=True):
            result[number] += values[:good] * weight
        # A number of 19 digits may be too large: that one is no number.
        if good and result.min() < 0:
            good = int((result < 0).any(axis=0).argmax())
        return good


def layout_of(reply: bytes, before: bytes = b"") -> Layout | None:
    """The layout of a reply; None where there is none, also for a reply that is no delivery's.

    Args:
        before: bytes that stand before each reply.
    """
    tokens = reply.split(b".")
    if not reply.startswith(_ACK_PREFIX) or len(tokens) not in (V1_TOKENS, V2_TOKENS):
        return None
    if not all(is_int64(token) for token in tokens[-FIELDS:]):
        return None
    prefix = before + b".".join([*tokens[: 1 - FIELDS], b""])
    return _layout(prefix, tuple(len(token) for token in tokens[1 - FIELDS :]))


def is_int64(token: bytes) -> bool:
    """Whether a token is a number as servers write them, without a sign."""
    return token.isdigit() and len(token) < 20 and int(token) < 1 << 63


@functools.lru_cache(maxsize=256)
def _layout(prefix: bytes, digits: tuple[int, ...]) -> Layout:
    words = []
    end = sum(digits) + len(digits) - 1
    length = len(prefix) + end
    for number, count in enumerate(digits, 1):
        end -= count
        for word in range(count // 8 + 1):
            here = min(count - 8 * word, 8)
            expected, looked_at, room = bytearray(8), bytearray(8), bytearray(8)
            for byte in range(8 - here, 8):
                expected[byte], looked_at[byte], room[byte] = ord("0"), 0xFF, 15 - 9
            if here < 8:
                expected[7 - here], looked_at[7 - here], room[7 - here] = ord("."), 0xFF, 15
            masks = (int.from_bytes(mask, "little") for mask in (expected, looked_at, room))
            words.append((end + 8 * (word + 1), *masks, number, 10 ** (8 * word)))
        end -= 1
    back, expected_all, looked_at_all, room_all, numbers, weights = zip(*words, strict=True)
    tail = max(back)
    return Layout(
        length,
        prefix,
        int(prefix.split(b".")[-2]),
        tail,
        tuple(tail - begin for begin in back),
        np.array(expected_all, np.uint64)[:, None],
        np.array(looked_at_all, np.uint64)[:, None],
        np.array(room_all, np.uint64)[:, None],
        numbers,
        weights,
    )
