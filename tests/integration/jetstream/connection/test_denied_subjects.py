"""Denied subjects and refused subscriptions: which callers they end, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.errors import PermissionDeniedError
from nats_stream_source.jetstream import JetStream, KeyValue, KeyValueConfig, connect
from nats_stream_source.jetstream.publish.batch_publisher import BatchPublisher
from tests.support.nats.changing_server import ChangingServer
from tests.support.wait import wait_until_async


@pytest.fixture
def guarded(tmp_path: Path) -> ChangingServer:
    return ChangingServer(tmp_path)


def as_me(guarded: ChangingServer, **settings: Any) -> AbstractAsyncContextManager[JetStream]:
    return connect(guarded.server.url, user="me", password="right", **settings)


async def is_denied(work: Callable[[], Awaitable[object]], expected: bool) -> bool:
    try:
        await work()
    except PermissionDeniedError as error:
        return expected and "'_INBOX.>'; add it to the user's permissions" in str(error)
    return not expected


async def test_denied_subject_that_differs_in_case_from_another(guarded: ChangingServer) -> None:
    guarded.write(permissions='publish: { deny: "$KV.b.SECRET" }')
    with guarded.server:
        async with as_me(guarded) as jetstream:
            bucket = await KeyValue.create_bucket(jetstream, KeyValueConfig("b"))
            results = await asyncio.gather(
                *(bucket.put(key, b"") for key in ("SECRET", "secret", "Secret")),
                return_exceptions=True,
            )
            assert isinstance(results[0], PermissionDeniedError)
            assert "'$KV.b.SECRET'" in str(results[0])
            assert results[1:] == [1, 2]


async def test_denied_message_below_inbox_prefix_concerns_its_subject(
    guarded: ChangingServer,
) -> None:
    guarded.write(permissions='publish: { deny: "app.inbox.secret" }')
    with guarded.server:
        async with as_me(guarded, inbox_prefix="app.inbox") as jetstream:
            bucket = await KeyValue.create_bucket(jetstream, KeyValueConfig("b"))
            with pytest.raises(PermissionDeniedError, match=r"'app\.inbox\.secret'"):
                await jetstream.connection.request("app.inbox.secret")
            assert await bucket.put("k", b"") == 1
            assert jetstream.connection.reconnects == 0


async def test_inboxes_denied_and_permitted_again(guarded: ChangingServer) -> None:
    with guarded.server:
        async with as_me(guarded, request_timeout=2.0) as jetstream:
            bucket = await KeyValue.create_bucket(jetstream, KeyValueConfig("b"))
            await bucket.put("k", b"")
            works: tuple[Callable[[], Awaitable[object]], ...]
            works = bucket.status, lambda: bucket.put("k", b"")
            for work in works:
                guarded.change(permissions='subscribe: { deny: "_INBOX.>" }')
                await wait_until_async(partial(is_denied, work, True), "the inboxes are denied")
                guarded.change()
                await wait_until_async(partial(is_denied, work, False), "they are permitted")


async def test_first_refused_subscription_is_that_of_pub_acks(guarded: ChangingServer) -> None:
    """The message is not sent: its PubAck would not arrive."""
    guarded.write(more="max_subscriptions: 2")
    with guarded.server:
        async with as_me(guarded) as jetstream:
            bucket = await KeyValue.create_bucket(jetstream, KeyValueConfig("b"))
            other = await jetstream.connection.open_inbox("other")
            with pytest.raises(PermissionDeniedError, match="raise max_subscriptions"):
                await bucket.put("k", b"")
            with pytest.raises(PermissionDeniedError, match="raise max_subscriptions"):
                async with BatchPublisher(jetstream, "KV_b"):
                    pass
            await jetstream.connection.close_inbox(other)
            assert await bucket.put("k", b"") == 1
