"""Whether a stream has less than it had, or only the server that says so.

A server that was cut off from the others answers for 10 to 20 s as if it still led, with what it
had. While it hears nothing of its replicas, that shows it (``StreamInfo.check_majority``). When it
is joined to them again, there is a moment in which it has heard of them and does not know yet that
they have another leader. So what is less is believed when the same server says it twice.
"""

from __future__ import annotations

import asyncio

from nats_stream_source.errors import RequestTimeoutError
from nats_stream_source.jetstream.api import JetStream, StreamInfo

_AGAIN = 1.0  # seconds; a server that hears of another leader steps down within milliseconds


async def check_less(jetstream: JetStream, info: StreamInfo, seq: int) -> None:
    """Raise RequestTimeoutError unless the stream, which had ``seq``, really ends before it.

    Args:
        info: what its leader said; ``info.last_seq`` is less than ``seq``.
    """
    info.check_majority()
    if not info.replicated:
        return
    await asyncio.sleep(_AGAIN)
    now = await jetstream.stream_info(info.name)
    info.check_leads_on(now, info.last_seq)
    if now.last_seq >= seq:
        raise RequestTimeoutError(
            f"stream {info.name} ended at {info.last_seq} a moment ago, and at {now.last_seq} now: "
            f"it has to be looked at again"
        )
