"""A mirror whose stored times jump, by an hour or a day, back and forth: see :class:`ClockSkew`."""

from __future__ import annotations

import re

from tests.support.nats.topology import Line

_ACK = re.compile(rb"(\$JS\.ACK\.[^ ]*\.(\d+)\.\d+\.)(\d{19})(?=\.\d+[@ ])")
_HOUR, _DAY = 3600 * 10**9, 86_400 * 10**9


def jumped(seq: int) -> int:
    """By how many nanoseconds the clock is wrong when ``seq`` is stored."""
    return {0: 0, 1: -_HOUR, 2: _DAY, 3: -_DAY}[seq // 100 % 4]


class ClockSkew(Line):
    """A mirror keeps its upstream's times, which are in the ACK subjects: they jump on the way.

    So a real server has a stream whose clock was set to and fro.
    """

    def changed(self, data: bytes) -> bytes:
        def set_clock(found: re.Match[bytes]) -> bytes:
            return found[1] + b"%d" % (int(found[3]) + jumped(int(found[2])))

        return _ACK.sub(set_clock, data)
