"""Parse many decimal integers at once: eight digits are one 64-bit integer.

Theory of operation. The replies of one consumer's deliveries have the same layout: until a number
gets another digit, each token has the same distance from the end of the reply. So one reply is
parsed token by token (:func:`layout_of`), and all following replies of that layout are parsed
together (:meth:`Layout.read`). The layout of each reply is verified: the bytes before the numbers
must be equal, digits must be at the positions of digits, and a dot before each number.

The arithmetic. A word of eight ASCII digits, the first one in its lowest byte, becomes its value in
three steps: adjacent digits make pairs, pairs make groups of four, groups of four make the number.
Each step is one multiplication that adds ten (a hundred, ten thousand) times one value to the
other, in all parts of the word at once.
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
"""Numbers of a reply: delivered, stream_seq, consumer_seq, time in nanoseconds, pending."""

_ACK_PREFIX = b"$JS.ACK."
_UPPER_HALVES = np.uint64(0xF0F0F0F0F0F0F0F0)
_TENS, _HUNDREDS, _TEN_THOUSANDS = (np.uint64(1 + (10**k << 8 * k)) for k in (1, 2, 4))
_PAIRS, _FOURS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
_EIGHT, _SIXTEEN, _THIRTY_TWO = np.uint64(8), np.uint64(16), np.uint64(32)
_ZEROS, _SPACES = np.uint64(0x3030303030303030), np.uint64(0x2020202020202020)
_SIXES = np.uint64(0x0606060606060606)
_LOW_SEVEN = np.uint64(0x7F7F7F7F7F7F7F7F)
# Masks of the last k bytes of a word, which are in its upper end.
_LAST = np.array([0, *((1 << 64) - (1 << 64 - 8 * k) for k in range(1, 8)), 0], np.uint64)
_LAST_OR_ALL = np.array([*_LAST[:8], (1 << 64) - 1], np.uint64)  # also of all eight

MAX_DIGITS = 18
"""Each number of at most so many digits fits into a signed 64-bit integer."""


def bytes_at(buffer: bytes | memoryview, begin: Positions, width: int) -> NDArray[Any]:
    """Return a new array whose elements are the ``width`` bytes from each position on."""
    # An array over the buffer with overlapping elements: element i starts at byte i.
    overlapping: NDArray[Any] = np.ndarray((len(buffer) - width + 1,), f"V{width}", buffer, 0, (1,))
    result: NDArray[Any] = overlapping[begin]
    return result


def words_at(buffer: bytes | memoryview, begin: Positions) -> Words:
    """Return the eight bytes from each position on as an integer, little-endian."""
    return bytes_at(buffer, begin, 8).view("<u8")


def number_before(
    buffer: bytes | memoryview, end: Positions
) -> tuple[Positions, Positions, NDArray[np.bool_]]:
    """Parse the number after the last space of ``buffer[:end]``, for each end.

    Returns:
        the number of digits, at most 8; the number; whether it has 1 to 7 digits after a space. If
        not, the two others are undefined.
    """
    word = words_at(buffer, end - 8)
    spaces = word ^ _SPACES
    # The highest bit of each byte that was a space, and no other bits.
    spaces = ~(((spaces & _LOW_SEVEN) + _LOW_SEVEN) | spaces | _LOW_SEVEN)
    # The position of the highest set bit, from the exponent of a float.
    digits = (1086 - (spaces.astype(np.float64).view(np.int64) >> 52)) >> 3
    digits = np.minimum(digits, 8)
    good = (digits > 0) & (digits < 8)
    word ^= _ZEROS
    word &= _LAST[digits]
    good &= ((word | (word + _SIXES)) & _UPPER_HALVES) == 0
    return digits, _parse_digits(word), good


def numbers_between(
    buffer: bytes | memoryview, begin: Positions, end: Positions
) -> tuple[Positions, NDArray[np.bool_]]:
    """Parse the decimal numbers at ``buffer[begin:end]``.

    Args:
        end: at least 24 bytes after the start of the buffer.

    Returns:
        the numbers; which of them are valid, with 1 to 18 digits. The others are undefined.
    """
    width = end - begin
    good = (width > 0) & (width <= MAX_DIGITS)
    total = np.zeros(end.size, np.int64)
    longest = int(width.max(initial=0, where=good))
    for done in range(0, longest, 8):
        word = words_at(buffer, end - (done + 8))
        word ^= _ZEROS
        word &= _LAST_OR_ALL[np.clip(width - done, 0, 8)]
        good &= ((word | (word + _SIXES)) & _UPPER_HALVES) == 0
        total += _parse_digits(word) * 10**done
    return total, good


def _parse_digits(word: Words) -> Positions:
    """Return the number whose digit values are the bytes of each word; overwrites the words."""
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
    """The positions of the tokens of a reply.

    The numbers after ``prefix`` are divided into words of eight bytes. A word contains up to eight
    digits at its end, and a dot before them if it has space for one.

    Attributes:
        length: bytes from the start of ``prefix`` to the end of the reply.
        prefix: the bytes before each reply, and the reply up to the dot before ``stream_seq``, with
            ``delivered``.
        delivered: the number in ``prefix``.
        tail: bytes from the start of the first word to the end of the reply.
        begin: for each word, its position in the tail.
        expected: for each word, the mask whose XOR makes a digit its value and a dot 0.
        mask: for each word, 0xFF at the bytes of digits and dots.
        headroom: for each word, the value that each byte allows to be added to a valid result
            without reaching the upper half of the byte.
        number, weight: for each word, the number it belongs to, and its weight there.
    """

    length: int
    prefix: bytes
    delivered: int
    tail: int
    begin: tuple[int, ...]
    expected: Words
    mask: Words
    headroom: Words
    number: tuple[int, ...]
    weight: tuple[int, ...]

    def read(self, buffer: bytes | memoryview, end: Positions, numbers: Positions) -> int:
        """Parse the replies that end at ``end`` into ``numbers`` (FIELDS rows).

        Returns:
            the number of replies, from the first, that have this layout; the rest of ``numbers`` is
            undefined.
        """
        prefixes = bytes_at(buffer, end - self.length, len(self.prefix))
        # One copy of the whole tail of each reply; its words are read from there.
        tails = bytes_at(buffer, end - self.tail, self.tail)
        word = np.empty((len(self.begin), end.size), "<u8")
        for row, begin in zip(word, self.begin, strict=True):
            row[:] = np.ndarray(end.shape, "<u8", tails, begin, (self.tail,))
        word ^= self.expected
        word &= self.mask
        invalid = word + self.headroom
        invalid |= word
        invalid &= _UPPER_HALVES
        good = end.size
        if invalid.any():
            good = int(invalid.any(axis=0).argmax())
        if prefixes[:good].tobytes() != self.prefix * good:
            prefix_bytes = prefixes[:good].view(np.uint8).reshape(good, -1)
            same = prefix_bytes == np.frombuffer(self.prefix, np.uint8)
            good = int(same.all(axis=1).argmin())
        result = numbers[:, :good]
        result[0] = self.delivered
        result[1:] = 0
        for values, number, weight in zip(
            _parse_digits(word), self.number, self.weight, strict=True
        ):
            result[number] += values[:good] * weight
        # A number of 19 digits may overflow: such a reply is left to the definition.
        if good and result.min() < 0:
            good = int((result < 0).any(axis=0).argmax())
        return good


def layout_of(reply: bytes, before: bytes = b"") -> Layout | None:
    """Return the layout of a reply; None for a reply that is not a valid delivery's.

    Args:
        before: bytes before each reply.
    """
    tokens = reply.split(b".")
    if not reply.startswith(_ACK_PREFIX) or len(tokens) not in (V1_TOKENS, V2_TOKENS):
        return None
    if not all(is_int64(token) for token in tokens[-FIELDS:]):
        return None
    prefix = before + b".".join([*tokens[: 1 - FIELDS], b""])
    return _layout(prefix, tuple(len(token) for token in tokens[1 - FIELDS :]))


def is_int64(token: bytes) -> bool:
    """Whether a token is an integer as servers write it, without a sign."""
    return token.isdigit() and len(token) < 20 and int(token) < 1 << 63


@functools.lru_cache(maxsize=256)
def _layout(prefix: bytes, digits: tuple[int, ...]) -> Layout:
    words = []
    end = sum(digits) + len(digits) - 1
    length = len(prefix) + end
    for number, count in enumerate(digits, 1):
        end -= count
        for word in range(count // 8 + 1):
            width = min(count - 8 * word, 8)
            expected, mask, headroom = bytearray(8), bytearray(8), bytearray(8)
            for byte in range(8 - width, 8):
                expected[byte], mask[byte], headroom[byte] = ord("0"), 0xFF, 15 - 9
            if width < 8:
                expected[7 - width], mask[7 - width], headroom[7 - width] = ord("."), 0xFF, 15
            masks = (int.from_bytes(one, "little") for one in (expected, mask, headroom))
            words.append((end + 8 * (word + 1), *masks, number, 10 ** (8 * word)))
        end -= 1
    back, expected_all, mask_all, headroom_all, numbers, weights = zip(*words, strict=True)
    tail = max(back)
    return Layout(
        length,
        prefix,
        int(prefix.split(b".")[-2]),
        tail,
        tuple(tail - begin for begin in back),
        np.array(expected_all, np.uint64)[:, None],
        np.array(mask_all, np.uint64)[:, None],
        np.array(headroom_all, np.uint64)[:, None],
        numbers,
        weights,
    )
