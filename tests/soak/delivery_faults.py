"""Faults of single deliveries that only the soak injects, for the proxies of the servers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.soak.servers import UNAVAILABLE
from tests.support.proxy.fault_proxy import is_delivery, pending
from tests.support.proxy.verdicts import FrameFault


class DeleteConsumer(FrameFault):
    """Drops one delivery, and deletes the reader's consumer that sent it.

    Args:
        request: sends a JetStream API request.

    Attributes:
        consumer: the deleted consumer and its stream, as text.
    """

    def __init__(self, request: Callable[[str], object]) -> None:
        super().__init__(False)
        self._request = request
        self._lock = threading.Lock()
        self.consumer = ""

    def hits(self, frame: bytes) -> bool:
        if not is_delivery(frame) or not self._lock.acquire(blocking=False):
            return False  # each proxy has its own thread
        try:
            stream, consumer = _consumer(frame)
            if self.done or not consumer.startswith("spark-"):
                return False
            self._request(f"CONSUMER.DELETE.{stream}.{consumer}")
        except UNAVAILABLE:
            return False  # no leader now; retry with a later delivery
        finally:
            self._lock.release()
        self.consumer = f"{consumer} of {stream}"
        return True


class LastDelivery(FrameFault):
    """Selects deliveries after which their consumer has no pending message."""

    def hits(self, frame: bytes) -> bool:
        return is_delivery(frame) and pending(frame) == 0


def _consumer(frame: bytes) -> tuple[str, str]:
    """The stream and the consumer of a delivery, from its ACK subject of 9 tokens."""
    tokens = frame.split(b"\r\n", 1)[0].split(b" $JS.ACK.", 1)[1].split(b".")
    return tokens[0].decode(), tokens[1].decode()
