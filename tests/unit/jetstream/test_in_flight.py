"""The deadlines of messages in flight."""

from __future__ import annotations

import asyncio
import time

from nats_stream_source.jetstream.publish.publisher import MessagesInFlight
from tests.support.wait import wait_until_async


async def test_deadline_counts_from_end_of_iteration() -> None:
    """The start of 100,000 tasks that publish can take longer than the timeout."""
    messages = MessagesInFlight(limit=10, timeout=0.1)
    first, message = messages.add("s", 0)
    time.sleep(0.2)  # noqa: ASYNC251
    second, _ = messages.add("s", 0)
    assert messages.overdue() == []
    await asyncio.sleep(0)
    deadline = messages.next_deadline()
    assert deadline is not None
    assert 0 < deadline - messages.now() <= 0.1
    await wait_until_async(lambda: messages.overdue() == [first, second], "the deadline passes")
    message.cancel()
