"""Parse many decimal integers at once: eight digits are one 64-bit integer.

A word of eight ASCII digits, the first one in its lowest byte, becomes its value in three steps:
adjacent digits make pairs, pairs make groups of four, groups of four make the number. Each step is
one multiplication that adds ten (a hundred, ten thousand) times one value to the other, in all
parts of the word at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
Words = NDArray[np.uint64]

_UPPER_HALVES = np.uint64(0xF0F0F0F0F0F0F0F0)
_TENS, _HUNDREDS, _TEN_THOUSANDS = (np.uint64(1 + (10**k << 8 * k)) for k in (1, 2, 4))
_PAIRS, _FOURS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
_EIGHT, _SIXTEEN, _THIRTY_TWO = np.uint64(8), np.uint64(16), np.uint64(32)
_ZEROS, _SIXES = np.uint64(0x3030303030303030), np.uint64(0x0606060606060606)
# Masks of the last k bytes of a word, which are in its upper end.
_LAST = np.array(
    [0, *((1 << 64) - (1 << 64 - 8 * k) for k in range(1, 8)), (1 << 64) - 1], np.uint64
)

MAX_DIGITS = 18
"""Each number of at most so many digits fits into a signed 64-bit integer."""


def bytes_at(buffer: bytes | memoryview, begin: Positions, width: int) -> NDArray[Any]:
    """Return a new array whose elements are the ``width`` bytes from each position on."""
    # An array over the buffer with overlapping elements: element i starts at byte i.
    overlapping: NDArray[Any] = np.ndarray((len(buffer) - width + 1,), f"V{width}", buffer, 0, (1,))
    result: NDArray[Any] = overlapping[begin]
    return result


def _words_at(buffer: bytes | memoryview, begin: Positions) -> Words:
    """Return the eight bytes from each position on as an integer, little-endian."""
    return bytes_at(buffer, begin, 8).view("<u8")


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
        word = _words_at(buffer, end - (done + 8))
        word ^= _ZEROS
        word &= _LAST[np.clip(width - done, 0, 8)]
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


def is_int64(token: bytes) -> bool:
    """Whether a token is an integer as servers write it, without a sign."""
    return token.isdigit() and len(token) < 20 and int(token) < 1 << 63
