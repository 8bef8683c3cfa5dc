"""Read the stream sequences of a subscription's messages."""

from __future__ import annotations

from typing import Any


async def sequences(subscription: Any, count: int) -> list[int]:
    """The stream sequences of the next messages, each acknowledged."""
    found = []
    for _ in range(count):
        message = await subscription.next(15)
        found.append(message.metadata.stream_seq)
        await message.ack()
    return found
