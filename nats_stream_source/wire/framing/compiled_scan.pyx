# cython: language_level=3, boundscheck=True, wraparound=False, cdivision=True
"""Find the frames of a block in one pass: the compiled counterpart of ``parse.py``.

``scan`` accepts MSG and HMSG frames as servers write them: one space between the fields, no other
byte up to 32 within them, a complete payload followed by CRLF. It stops at any other byte and
leaves the frame there to ``parse.parse_frame``, the definition. So it raises no ProtocolError. The
work for a frame depends on the length of its control line only: payloads are not read.

The control lines of one consumer's deliveries repeat each other: the same sid, the same ACK subject
up to its numbers, and numbers of the same widths. ``_repeats`` compares a line with the last one and
parses its numbers at known positions. Other lines are parsed byte by byte. ``in_sequence`` compares
the numbers of found frames.

Bounds. ``_word`` and ``_byte`` are the only functions that read the block. Both compare the
position with the size, and bytes outside of the block read as 0, which no field accepts. ``_store``
is the only function that writes the table, and compares the column with the number of columns.

Arithmetic. Eight bytes are tested at once, as a little-endian word. Each test works on the low
seven bits of each byte, so that no carry reaches the next byte, and marks bytes by their bit 7.
``compiled_scan.pxd`` has the constants and types.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

FIELDS = {
    "BEGIN": _BEGIN,
    "STOP": _STOP,
    "KIND": _KIND,
    "SID": _SID,
    "SUBJECT_BEGIN": _SUBJECT_BEGIN,
    "SUBJECT_END": _SUBJECT_END,
    "REPLY_BEGIN": _REPLY_BEGIN,
    "REPLY_END": _REPLY_END,
    "HEADER_BEGIN": _HEADER_BEGIN,
    "PAYLOAD_BEGIN": _PAYLOAD_BEGIN,
    "PAYLOAD_END": _PAYLOAD_END,
    "DELIVERED": _DELIVERED,
}
"""Rows of the table by their names in ``parse.Field``, up to the first number of an ACK subject."""


cdef inline uint64_t _word(_Block *block, Py_ssize_t at) noexcept nogil:
    """Return the eight bytes from ``at`` on as a little-endian integer."""
    cdef const uint8_t *data = block.data
    cdef uint64_t word = 0
    cdef Py_ssize_t i
    if at < 0 or at >= block.size:
        return 0
    if block.size - at >= 8:
        return _load(data + at)
    for i in range(block.size - at):
        word |= <uint64_t> data[at + i] << (8 * i)
    return word


cdef inline uint8_t _byte(_Block *block, Py_ssize_t at) noexcept nogil:
    """Return the byte at ``at``."""
    if at < 0 or at >= block.size:
        return 0
    return block.data[at]


cdef inline int _first_mark(uint64_t marks) noexcept nogil:
    """Return the index of the first byte whose bit 7 is set; 8 without such a byte."""
    if marks == 0:
        return 8
    return _trailing_zeros(marks) >> 3


cdef inline Py_ssize_t _token_end(_Block *block, Py_ssize_t at) noexcept nogil:
    """Return the position of the first byte up to 32 from ``at`` on, at most the size."""
    cdef uint64_t word
    while True:
        word = _word(block, at)
        word = ~(((word & _LOW_SEVEN) + _ABOVE_SPACE) | word) & _BIT_SEVEN
        if word != 0:
            return at + _first_mark(word)
        at += 8


cdef inline uint64_t _joined(uint64_t word) noexcept nogil:
    """Return the number of eight digits (0 to 9, not ASCII), the first one in the lowest byte."""
    # Adjacent digits make pairs, pairs make groups of four, and these make the number.
    word = (word * _TENS >> 8) & _PAIRS
    word = (word * _HUNDREDS >> 16) & _FOURS
    return word * _TEN_THOUSANDS >> 32


cdef inline int64_t _number(_Block *block, Py_ssize_t begin, Py_ssize_t *end) noexcept nogil:
    """Parse the digits from ``begin`` on; store the position after them in ``end``.

    Return -1 without a digit, for more than 19 digits or for a number above 63 bits.
    """
    cdef uint64_t word, value = 0
    cdef Py_ssize_t at = begin
    cdef int count = 8
    while count == 8 and at - begin <= _MAX_DIGITS:
        word = _word(block, at) ^ _ZEROS
        # The bytes above 9.
        count = _first_mark((((word & _LOW_SEVEN) + _ABOVE_NINE) | word) & _BIT_SEVEN)
        if count == 0:
            break
        # The last digit moves to the highest byte, zeros precede the first one.
        value = value * _POWERS[count] + _joined(word << (64 - 8 * count))
        at += count
    end[0] = at
    if at == begin or at - begin > _MAX_DIGITS or value > _MAX_INT64:
        return -1
    return <int64_t> value


cdef inline bint _equal(
    _Block *block, Py_ssize_t one, Py_ssize_t other, Py_ssize_t length
) noexcept nogil:
    """Whether ``length`` bytes from ``one`` and from ``other`` on are equal."""
    cdef Py_ssize_t i = 0
    while length - i >= 8:
        if _word(block, one + i) != _word(block, other + i):
            return False
        i += 8
    if i == length:
        return True
    return (_word(block, one + i) ^ _word(block, other + i)) << (64 - 8 * (length - i)) == 0


cdef inline uint64_t _digits(
    _Block *block, Py_ssize_t end, Py_ssize_t count, uint64_t *bad
) noexcept nogil:
    """Return the number of the last ``count`` digits before ``end``, 1 to 8.

    A byte that is not a digit sets bits of ``bad``.
    """
    cdef uint64_t word = _word(block, end - 8) ^ _ZEROS
    word = word >> (64 - 8 * count) << (64 - 8 * count)
    bad[0] |= (((word & _LOW_SEVEN) + _ABOVE_NINE) | word) & _BIT_SEVEN
    return _joined(word)


cdef inline bint _repeats(
    _Block *block, Py_ssize_t at, _Delivery *last, int64_t *acks, Py_ssize_t *end
) noexcept nogil:
    """Parse a line from the end of its subject on, if it repeats that of the last delivery.

    Only the digits of the numbers may differ, not their widths. So the position of each number is
    known, and the processor parses them at the same time. ``end`` becomes the end of the reply.
    """
    cdef uint64_t value, bad = 0
    cdef Py_ssize_t width, stop
    cdef int i
    if last.length == 0 or not _equal(block, last.begin, at, last.length):
        return False
    stop = at + last.length - 1
    for i in range(_NUMBERS):
        width = last.widths[i]
        stop += width + 1
        bad |= _byte(block, stop) ^ (_SPACE if i == _NUMBERS - 1 else _DOT)
        if width <= 8:
            value = _digits(block, stop, width, &bad)
        elif width <= 16:
            value = _digits(block, stop, 8, &bad)
            value += _POWERS[8] * _digits(block, stop - 8, width - 8, &bad)
        else:
            value = _digits(block, stop, 8, &bad)
            value += _POWERS[8] * _digits(block, stop - 8, 8, &bad)
            value += _POWERS[8] * _POWERS[8] * _digits(block, stop - 16, width - 16, &bad)
        bad |= value & _BIT_63
        acks[i] = <int64_t> value
    end[0] = stop
    return bad == 0


cdef bint _ack(
    _Block *block, Py_ssize_t begin, Py_ssize_t end, int64_t *acks, _Delivery *last
) noexcept nogil:
    """Parse the numbers of a reply at ``begin`` up to ``end``; store their widths in ``last``."""
    cdef Py_ssize_t at, stop = 0, first = 0, seventh = 0
    cdef int i, tokens = 1
    last.length = 0
    for at in range(begin, end):
        if _byte(block, at) == _DOT:
            tokens += 1
            if tokens == 5:
                first = at + 1
            elif tokens == 7:
                seventh = at + 1
    if tokens >= _V2_TOKENS:
        first = seventh
    elif tokens != _V1_TOKENS:
        return False
    at = first
    for i in range(_NUMBERS):
        acks[i] = _number(block, at, &stop)
        if acks[i] < 0 or (i < _NUMBERS - 1 and _byte(block, stop) != _DOT):
            return False
        last.widths[i] = stop - at
        at = stop + 1
    if stop != end:
        # v2 may have more tokens after its numbers.
        return tokens > _V2_TOKENS and _byte(block, stop) == _DOT
    last.reply = begin - last.begin
    last.length = first - last.begin
    return True


cdef inline _Outcome _frame(
    _Block *block, Py_ssize_t begin, int64_t *row, _Delivery *last
) noexcept nogil:
    """Parse the frame at ``begin`` into ``row``; row[_STOP] is its stop, also if it is unfinished."""
    cdef uint64_t head = _word(block, begin)
    cdef Py_ssize_t at, subject_end, sid_end, reply_begin, reply_end, after, payload_end
    cdef Py_ssize_t end = 0
    cdef int64_t kind, length, sid = 0, header_length = 0
    cdef bint has_ack = False
    cdef int i
    if <uint32_t> head == _MSG_WORD:
        kind, at = 1, begin + 4
    elif head << 24 == _HMSG_WORD << 24:
        kind, at = 2, begin + 5
    else:
        return _OTHER
    row[_SUBJECT_BEGIN] = at
    subject_end = _token_end(block, at)
    if subject_end == at or _byte(block, subject_end) != _SPACE:
        return _OTHER
    if _repeats(block, subject_end, last, row + _DELIVERED, &end):
        has_ack = True
        sid = last.sid
        reply_begin, reply_end = subject_end + last.reply, end
        last.begin = subject_end
        at = end + 1
    else:
        sid = _number(block, subject_end + 1, &sid_end)
        if sid < 0 or _byte(block, sid_end) != _SPACE:
            return _OTHER
        at = sid_end + 1
        reply_begin = reply_end = sid_end
        # With a reply, one more token precedes the last one or two.
        end = _token_end(block, at)
        if _byte(block, end) == _SPACE and (
            kind == 1 or _byte(block, _token_end(block, end + 1)) == _SPACE
        ):
            if end == at:
                return _OTHER
            reply_begin, reply_end = at, end
            if _word(block, at) == _ACK_PREFIX:
                last.begin, last.sid = subject_end, sid
                has_ack = _ack(block, at, end, row + _DELIVERED, last)
            at = end + 1
    if kind == 2:
        header_length = _number(block, at, &end)
        if header_length < 0 or _byte(block, end) != _SPACE:
            return _OTHER
        at = end + 1
    length = _number(block, at, &end)
    if length < 0 or length > _MAX_PAYLOAD or header_length > length:
        return _OTHER
    if _byte(block, end) != _CR or _byte(block, end + 1) != _LF:
        return _OTHER
    after = end + 2
    if after - begin > _MAX_LINE:
        return _OTHER
    row[_STOP] = after + length + 2
    if row[_STOP] > block.size:
        return _UNFINISHED
    payload_end = after + <Py_ssize_t> length
    if _byte(block, payload_end) != _CR or _byte(block, payload_end + 1) != _LF:
        return _OTHER
    row[_BEGIN] = begin
    row[_KIND] = kind
    row[_SID] = sid
    row[_SUBJECT_END] = subject_end
    row[_REPLY_BEGIN] = reply_begin
    row[_REPLY_END] = reply_end
    row[_HEADER_BEGIN] = after
    row[_PAYLOAD_BEGIN] = after + header_length
    row[_PAYLOAD_END] = payload_end
    if not has_ack:
        for i in range(_DELIVERED, _FIELDS):
            row[i] = -1
    return _FOUND


cdef inline bint _store(
    int64_t *table, Py_ssize_t columns, Py_ssize_t column, const int64_t *row
) noexcept nogil:
    """Write a column of the table; False if the table lacks that column."""
    cdef int i
    if column < 0 or column >= columns:
        return False
    for i in range(_FIELDS):
        table[i * columns + column] = row[i]
    return True


def in_sequence(
    const int64_t[::1] sid, const int64_t[::1] delivered, const int64_t[::1] stream_seq,
    const int64_t[::1] consumer_seq,
):
    """Find whether frames are consecutive deliveries of one consumer; see the stub file."""
    cdef Py_ssize_t count = sid.shape[0], i
    cdef bint broken = False
    cdef const int64_t *sids
    cdef const int64_t *streams
    cdef const int64_t *consumers
    cdef const int64_t *attempts
    if not count == delivered.shape[0] == stream_seq.shape[0] == consumer_seq.shape[0]:
        raise ValueError(
            f"could not compare sequences: {count} sids, {delivered.shape[0]} deliveries, "
            f"{stream_seq.shape[0]} and {consumer_seq.shape[0]} sequences; expected equal numbers"
        )
    if count == 0:
        return False
    sids, streams, consumers = &sid[0], &stream_seq[0], &consumer_seq[0]
    attempts = &delivered[0]
    if attempts[0] < 0:
        return False
    # Without a branch in the loop, which a C compiler then vectorizes.
    for i in range(1, count):
        broken |= attempts[i] < 0
        broken |= sids[i] != sids[i - 1]
        broken |= streams[i] <= streams[i - 1]
        broken |= <uint64_t> consumers[i] - <uint64_t> consumers[i - 1] != 1
    return not broken


def scan(
    const uint8_t[::1] buffer, Py_ssize_t begin, Py_ssize_t size, int64_t[:, ::1] table,
    Py_ssize_t count,
):
    """Find frames of ``buffer[begin:size]`` and append them to ``table``; see the stub file."""
    cdef _Block block
    cdef _Delivery last
    cdef _Outcome outcome
    cdef int64_t[_FIELDS] row
    cdef int64_t needed = 0
    cdef Py_ssize_t columns = table.shape[1]
    cdef int64_t *cells
    if not 0 <= begin <= size <= buffer.shape[0]:
        raise ValueError(
            f"could not scan bytes {begin} to {size}: the block has {buffer.shape[0]} bytes"
        )
    if table.shape[0] != _FIELDS or not 0 <= count <= columns:
        raise ValueError(
            f"could not append to column {count}: the table has {table.shape[0]} rows and "
            f"{columns} columns, expected {_FIELDS} rows"
        )
    if begin == size or count == columns:
        return count, begin, 0
    block.data = &buffer[0]
    block.size = size
    last.begin = last.length = last.reply = last.sid = 0
    cells = &table[0, 0]
    while begin < size and count < columns:
        outcome = _frame(&block, begin, row, &last)
        if outcome == _FOUND:
            if not _store(cells, columns, count, row):
                break
            count += 1
            begin = <Py_ssize_t> row[_STOP]
            continue
        if outcome == _UNFINISHED:
            needed = row[_STOP] - begin
        break
    return count, begin, needed
