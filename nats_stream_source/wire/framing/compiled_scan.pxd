# The constants and types of compiled_scan.pyx, which includes this file by its name.

from libc.stdint cimport int64_t, uint8_t, uint64_t

cdef enum:  # as table.Field
    _BEGIN
    _STOP
    _KIND
    _SID
    _SUBJECT_BEGIN
    _SUBJECT_END
    _REPLY_BEGIN
    _REPLY_END
    _HEADER_BEGIN
    _PAYLOAD_BEGIN
    _PAYLOAD_END
    _DELIVERED  # with it, the _NUMBERS of the ACK subject begin

cdef enum:
    _NUMBERS = 5
    _FIELDS = 16  # _DELIVERED + _NUMBERS; C needs the number
    _MAX_LINE = 1 << 20
    _MAX_DIGITS = 19
    _SPACE = 32
    _CR = 13
    _LF = 10
    _DOT = 46
    _V1_TOKENS = 9
    _V2_TOKENS = 11

cdef enum _Outcome:
    _FOUND
    _OTHER
    _UNFINISHED

cdef struct _Block:
    const uint8_t *data
    Py_ssize_t size

cdef struct _Delivery:
    # The control line of the last delivery, from the end of its subject: " <sid> $JS.ACK.<...>.",
    # followed by the five numbers.
    Py_ssize_t begin
    Py_ssize_t length  # of the bytes before the first number; 0 before the first delivery
    Py_ssize_t reply  # position of "$JS.ACK." in these bytes
    int64_t sid
    Py_ssize_t[_NUMBERS] widths

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    static const int64_t _MAX_PAYLOAD = 0x7FFFFFFF;
    static const uint64_t _MAX_INT64 = 0x7FFFFFFFFFFFFFFFULL;
    static const uint64_t _LOW_SEVEN = 0x7F7F7F7F7F7F7F7FULL;
    static const uint64_t _BIT_SEVEN = 0x8080808080808080ULL;
    static const uint64_t _ABOVE_SPACE = 0x5F5F5F5F5F5F5F5FULL;  /* bit 7 of a byte above 32 */
    static const uint64_t _ABOVE_NINE = 0x7676767676767676ULL;  /* bit 7 of a byte above 9 */
    static const uint64_t _ZEROS = 0x3030303030303030ULL;
    static const uint64_t _TENS = 1 + (10ULL << 8), _PAIRS = 0x00FF00FF00FF00FFULL;
    static const uint64_t _HUNDREDS = 1 + (100ULL << 16), _FOURS = 0x0000FFFF0000FFFFULL;
    static const uint64_t _TEN_THOUSANDS = 1 + (10000ULL << 32);
    static const uint64_t _POWERS[9] = {
        1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};
    static const uint64_t _ACK_PREFIX = 0x2E4B43412E534A24ULL;  /* "$JS.ACK." */
    #if defined(__GNUC__) || defined(__clang__)
    #define _trailing_zeros(word) __builtin_ctzll(word)
    #else  /* of words whose lowest set bit is bit 7 of a byte */
    #define _trailing_zeros(word) \
        ((int) (((((word) - 1) & ~(word) & _BIT_SEVEN) >> 7) * 0x0101010101010101ULL >> 56) << 3)
    #endif
    static inline uint64_t _load(const uint8_t *at) {
        uint64_t word;
        memcpy(&word, at, sizeof word);
    #if PY_BIG_ENDIAN
        uint64_t reversed = 0;
        for (int i = 0; i < 8; i++) reversed |= ((word >> (8 * i)) & 0xFF) << (56 - 8 * i);
        word = reversed;
    #endif
        return word;
    }
    static const uint64_t _BIT_63 = 0x8000000000000000ULL;
    static const uint64_t _MSG_WORD = 0x2047534DULL;  /* "MSG " */
    static const uint64_t _HMSG_WORD = 0x2047534D48ULL;  /* "HMSG " */
    """
    const int64_t _MAX_PAYLOAD
    const uint64_t _MAX_INT64, _LOW_SEVEN, _BIT_SEVEN, _ABOVE_SPACE, _ABOVE_NINE, _ZEROS, _BIT_63
    const uint64_t _TENS, _PAIRS, _HUNDREDS, _FOURS, _TEN_THOUSANDS
    const uint64_t *_POWERS
    const uint64_t _ACK_PREFIX, _MSG_WORD, _HMSG_WORD
    uint64_t _load(const uint8_t *at) noexcept nogil
    int _trailing_zeros(uint64_t word) noexcept nogil
