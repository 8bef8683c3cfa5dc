# cython: language_level=3, boundscheck=True, wraparound=False, cdivision=True
"""Work on a slice of every frame: the compiled way of ``wire/arrow_slices.py`` and others.

Arrow's ``take`` reads the positions, an index and the bytes in three passes, and a prefix of the
slices is compared and cut in others. ``copy`` does all of it in one pass, into one Arrow array.
``find_lines`` finds the few header blocks that can be those of markers, without a copy of all.

Bounds. Positions come from another module, so each slice is compared with the buffer, and the
copied bytes with ``data``. A short slice is copied as ``_SHORT`` bytes, which needs no call, where
both memories have so many; the next slice overwrites the excess.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memchr, memcmp, memcpy

cdef enum:
    _SHORT = 32


def copy(
    const uint8_t[::1] buffer, const int64_t[::1] begin, const int64_t[::1] end,
    const uint8_t[::1] prefix, int32_t[::1] offsets, uint8_t[::1] data,
):
    """Copy slices of ``buffer`` without their prefix into ``data``; see the stub file."""
    cdef Py_ssize_t count = begin.shape[0], size = buffer.shape[0], skip = prefix.shape[0]
    cdef Py_ssize_t room = data.shape[0], at = 0, i
    cdef int64_t first, length
    cdef const int64_t *begins
    cdef const int64_t *ends
    cdef const uint8_t *source = NULL
    cdef const uint8_t *start = NULL
    cdef uint8_t *target = NULL
    cdef int32_t *stops
    if end.shape[0] != count or offsets.shape[0] != count + 1 or room > 0x7FFFFFFF:
        raise ValueError(
            f"could not copy slices: {count} begins, {end.shape[0]} ends, {offsets.shape[0]} "
            f"offsets and {room} bytes; expected one more offset and at most 2 GiB"
        )
    offsets[0] = 0
    if count == 0:
        return 0
    begins, ends, stops = &begin[0], &end[0], &offsets[0]
    if size:
        source = &buffer[0]
    if skip:
        start = &prefix[0]
    if room:
        target = &data[0]
    for i in range(count):
        first, length = begins[i], ends[i] - begins[i] - skip
        if first < 0 or length < 0 or ends[i] > size or length > room - at:
            return i
        if skip and memcmp(source + first, start, skip) != 0:
            return i
        first += skip
        if length <= _SHORT and size - first >= _SHORT and room - at >= _SHORT:
            memcpy(target + at, source + first, _SHORT)
        elif length:
            memcpy(target + at, source + first, length)
        at += length
        stops[i + 1] = <int32_t> at
    return count


def find_lines(
    const uint8_t[::1] buffer, const int64_t[::1] begin, const int64_t[::1] end,
    const uint8_t[::1] one, const uint8_t[::1] other, uint8_t[::1] found,
):
    """Find the slices with a line that starts with one of two texts; see the stub file."""
    cdef Py_ssize_t count = begin.shape[0], size = buffer.shape[0], width = one.shape[0], i
    cdef const uint8_t *at
    cdef const uint8_t *last
    if end.shape[0] != count or found.shape[0] != count or width < 1 or other.shape[0] != width:
        raise ValueError(
            f"could not search slices: {count} begins, {end.shape[0]} ends, {found.shape[0]} "
            f"results and texts of {width} and {other.shape[0]} bytes; expected equal numbers"
        )
    for i in range(count):
        if not 0 <= begin[i] <= end[i] <= size:
            raise ValueError(
                f"could not search slice {begin[i]} to {end[i]}: the buffer has {size} bytes"
            )
        found[i] = False
        # A line feed and the text follow each other within the slice.
        if end[i] - begin[i] <= width:
            continue
        at = &buffer[begin[i]]
        last = at + (end[i] - begin[i]) - width
        while at < last:
            at = <const uint8_t *> memchr(at, 10, last - at)
            if at == NULL:
                break
            at += 1
            if memcmp(at, &one[0], width) == 0 or memcmp(at, &other[0], width) == 0:
                found[i] = True
                break
