"""What the queries leave on the servers when all of them have ended.

A reader that was killed cannot delete its consumer; the server does, after a minute.
"""

from __future__ import annotations

import time
from typing import Protocol

from soak.servers import NO_ANSWER

DEADLINE = 90.0
"""Seconds for what is on its way out."""


class Counted(Protocol):
    """Who has consumers and connections."""

    def consumers(self) -> list[str]: ...
    def connections(self) -> list[str]: ...


def left_behind(servers: Counted, deadline: float = DEADLINE) -> list[str]:
    """Consumers and connections that are there, and do not go away."""
    end = time.monotonic() + deadline
    while True:
        try:
            # In this order: to ask for consumers takes a connection.
            left = [f"connection: {one}" for one in servers.connections()]
            left += [f"consumer: {one}" for one in servers.consumers()]
        except NO_ANSWER as error:
            left = [f"not counted: {error!r}"]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.5)
