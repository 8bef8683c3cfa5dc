# cython: language_level=3, boundscheck=True, wraparound=False, cdivision=True
"""Decodes a column of Base64 in one pass: the compiled way of ``wire/codec/columns.py``.

Theory of operation. Four letters are three bytes. A table for each of the four has the bits of a
letter of the URL alphabet where they belong in the three, and ``_OTHER`` for all other bytes. So
four letters take four look-ups and one comparison. The letters left at the end of a token, at most
three, are checked on their own: one letter is not enough for a byte, and the bits to spare are 0.
The decoder stops at a token that is not exactly the encoding of its bytes, and leaves the column to
the definition.

Bounds. Offsets come from another module, so each row is compared with the data. Decoded bytes and
separators are never more than the encoded ones, and ``decoded`` must have room for all of those.
"""

from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.string cimport memchr, memcpy

cdef enum:
    _OTHER = 1 << 24
    _DOT = 46

# The first decoded byte is the lowest one of a number.
cdef uint32_t _first[256]
cdef uint32_t _second[256]
cdef uint32_t _third[256]
cdef uint32_t _fourth[256]


cdef void _fill_tables(bytes alphabet) noexcept:
    cdef uint32_t bits
    cdef uint8_t letter
    for bits in range(256):
        _first[bits] = _second[bits] = _third[bits] = _fourth[bits] = _OTHER
    for bits in range(64):
        letter = alphabet[bits]
        _first[letter] = bits << 2
        _second[letter] = bits >> 4 | (bits & 15) << 12
        _third[letter] = bits >> 2 << 8 | (bits & 3) << 22
        _fourth[letter] = bits << 16


cdef uint32_t _one = 1
cdef bint _little = (<uint8_t *> &_one)[0]

_fill_tables(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def decode(
    const uint8_t[::1] data, const int32_t[::1] offsets, bint tokens, int32_t[::1] decoded_offsets,
    uint8_t[::1] decoded,
):
    """Decode rows until one is not exactly an encoding; see the stub file."""
    cdef Py_ssize_t count = offsets.shape[0] - 1, size = data.shape[0], i, at, last, left, start, out = 0
    cdef uint32_t bits
    cdef bint little = _little
    cdef const uint8_t *source = NULL
    cdef uint8_t *target = NULL
    if count < 0 or decoded_offsets.shape[0] != count + 1:
        raise ValueError(
            f"could not decode rows: {offsets.shape[0]} and {decoded_offsets.shape[0]} offsets; "
            f"expected equal numbers of at least 1"
        )
    if not 0 <= offsets[0] <= offsets[count] <= size:
        raise ValueError(f"could not decode rows: their offsets are not within {size} bytes")
    if decoded.shape[0] < offsets[count] - offsets[0]:
        raise ValueError(
            f"could not decode rows: there is room for {decoded.shape[0]} bytes, expected "
            f"{offsets[count] - offsets[0]}"
        )
    decoded_offsets[0] = 0
    if size:
        source = &data[0]
    if decoded.shape[0]:
        target = &decoded[0]
    for i in range(count):
        at, last = offsets[i], offsets[i + 1]
        if not offsets[0] <= at <= last <= offsets[count]:
            raise ValueError(f"could not decode rows: the offsets of row {i} do not rise")
        while True:
            start = out
            while last - at >= 4:
                bits = (
                    _first[source[at]] | _second[source[at + 1]]
                    | _third[source[at + 2]] | _fourth[source[at + 3]]
                )
                if bits & _OTHER:
                    break
                if little:
                    memcpy(target + out, &bits, 4)
                else:
                    target[out] = <uint8_t> bits
                    target[out + 1] = <uint8_t> (bits >> 8)
                    target[out + 2] = <uint8_t> (bits >> 16)
                at += 4
                out += 3
            left = 0
            while left < 3 and at + left < last and _first[source[at + left]] != _OTHER:
                left += 1
            if left:
                if left == 1:
                    return i
                bits = _first[source[at]] | _second[source[at + 1]]
                if left == 3:
                    bits |= _third[source[at + 2]]
                # The bytes after the decoded ones have the bits to spare.
                if bits >> 8 * (left - 1):
                    return i
                target[out] = <uint8_t> bits
                if left == 3:
                    target[out + 1] = <uint8_t> (bits >> 8)
                at += left
                out += left - 1
            if tokens and out > start and memchr(target + start, _DOT, out - start) != NULL:
                return i
            if at == last:
                break
            if not tokens or source[at] != _DOT:
                return i
            target[out] = _DOT
            out += 1
            at += 1
        decoded_offsets[i + 1] = <int32_t> out
    return count
