"""Puts at a constant rate, over a bare socket, each with the time of its put."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.support.raw_connection import RawConnection

_TICK = 0.001  # seconds between two looks at the clock


def put_steadily(
    port: int, rate: int, count: int, put: Callable[[int, int, int], list[bytes]]
) -> None:
    """Send ``count`` messages, ``rate`` a second.

    Args:
        put: the frames of the messages ``first`` to ``last`` (excluded) that are due at a time in
            ns: ``put(first, last, now)``.
    """
    with RawConnection(port) as connection:
        began, sent = time.perf_counter(), 0
        while sent < count:
            due = min(count, int((time.perf_counter() - began) * rate))
            if due > sent:
                connection.send(b"".join(put(sent, due, time.time_ns())))
                sent = due
            time.sleep(_TICK)
        # What was sent before the PONG has reached the server.
        connection.send(b"PING\r\n")
        while not any(frame == b"PONG\r\n" for frame, _ in connection.receive()):
            pass
