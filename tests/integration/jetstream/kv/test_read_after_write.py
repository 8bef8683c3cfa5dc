"""Read-after-write in key-value buckets (ADR-53)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import MinLastSequenceError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.config import KeyValueConfig
from nats_stream_source.jetstream.kv.store import KeyValue

pytestmark = pytest.mark.servers


async def test_min_last_revision_that_is_too_high_and_then_reached(
    shared_server: NatsServer,
) -> None:
    """The document's own test: 412, then the write that reaches it, then the same read again."""
    async with connect(shared_server.url, request_timeout=0.5) as js:
        kv = await KeyValue.create_bucket(js, KeyValueConfig("raw", history=5))
        last = await kv.put("a", b"1")
        reads: list[Callable[[int], Coroutine[Any, Any, Any]]] = [
            lambda least: kv.get("a", min_last_revision=least),
            lambda least: kv.get_revision("a", 1, min_last_revision=least),
            lambda least: kv.history("a", min_last_revision=least),
            lambda least: kv.keys(min_last_revision=least),
            lambda least: kv.watch(min_last_revision=least).initial(),
        ]
        for read in reads:
            with pytest.raises(MinLastSequenceError, match="412, 10180"):
                await read(last + 1)
            last = await kv.put("a", b"2")
            assert await read(last)
