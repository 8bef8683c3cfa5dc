"""Frames and subscriptions through a proxy for the tests of push subscriptions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import NatsSourceError, NextTimeoutError
from nats_stream_source.jetstream.subscriptions.push import Subscription
from nats_stream_source.jetstream.subscriptions.subscribe import ConsumerConfig, subscribe
from tests.support.nats.subscriptions import connected
from tests.support.proxy.fault_proxy import Proxy, Verdict

# A server that gets no processor for three intervals has fallen silent, which is an alarm: so they
# are long where that is not what a test is about.
CALM = ConsumerConfig(ack_policy="none", idle_heartbeat=30.0)


@contextlib.asynccontextmanager
async def through_proxy(
    server: NatsServer,
    stream: str,
    verdict: Verdict | None = None,
    upward: Verdict | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Proxy, Subscription]]:
    """A push subscription through a proxy."""
    with Proxy(server.port, verdict, upward) as proxy:
        async with (
            connected(proxy.url) as jetstream,
            await subscribe(
                jetstream, stream=stream, **{"config": CALM, **options}
            ) as subscription,
        ):
            yield proxy, subscription


def hmsg(frame: bytes, block: bytes, reply: bytes = b"") -> bytes:
    """A message for the subscription that ``frame`` is for, with that header block."""
    _, subject, sid, *_ = frame.split(b"\r\n", 1)[0].split(b" ")
    size = b"%d" % len(block)
    words = [b"HMSG", subject, sid, *([reply] if reply else []), size, size]
    return b" ".join(words) + b"\r\n" + block + b"\r\n"


async def all_of(subscription: Subscription, last: int) -> tuple[list[int], list[NatsSourceError]]:
    """The stream sequences up to ``last``, and what was raised on the way."""
    found: list[int] = []
    errors: list[NatsSourceError] = []
    while last not in found:
        try:
            found.append((await subscription.next(15)).metadata.stream_seq)
        except NextTimeoutError:
            raise
        except NatsSourceError as error:
            errors.append(error)
    return found, errors
