"""What happens to frames in a soak only; the rest is in ``faults/harm.py``."""

from __future__ import annotations

import threading
from collections.abc import Callable

from faults.harm import Harm
from faults.proxy import is_delivery, pending

from soak.servers import NO_ANSWER


class Bereave(Harm):
    """Once: a delivery does not come, and the reader's consumer that made it is deleted."""

    def __init__(self, call: Callable[[str], object]) -> None:
        super().__init__(False)
        self._call = call
        self._lock = threading.Lock()
        self.consumer = ""

    def hits(self, frame: bytes) -> bool:
        if not is_delivery(frame) or not self._lock.acquire(blocking=False):
            return False  # every proxy has a thread of its own
        try:
            stream, consumer = _consumer(frame)
            if self.done or not consumer.startswith("spark-"):
                return False
            self._call(f"CONSUMER.DELETE.{stream}.{consumer}")
        except NO_ANSWER:
            return False  # no leader now; the next one perhaps
        finally:
            self._lock.release()
        self.consumer = f"{consumer} of {stream}"
        return True


class Newest(Harm):
    """Deliveries after which the consumer has nothing more."""

    def hits(self, frame: bytes) -> bool:
        return is_delivery(frame) and pending(frame) == 0


def _consumer(frame: bytes) -> tuple[str, str]:
    """The stream and the consumer of a delivery, by its ACK subject of 9 tokens."""
    tokens = frame.split(b"\r\n", 1)[0].split(b" $JS.ACK.", 1)[1].split(b".")
    return tokens[0].decode(), tokens[1].decode()
