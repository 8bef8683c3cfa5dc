"""The stream changes, is full, or refuses messages while they are written."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    AckTimeoutError,
    BucketNotFoundError,
    NatsSourceError,
    PermissionDeniedError,
    PublishError,
    StreamFullError,
    StreamNotFoundError,
    UnexpectedStreamError,
)
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.batch_writer import KvBatchWriter
from nats_stream_source.jetstream.publish.column_publisher import ColumnPublisher
from tests.faults.writing.publishing import (
    AtPubAck,
    Messages,
    open_bucket,
    publish,
    publish_all,
    publishing,
    puts,
    stored,
    write,
)
from tests.support.nats.buckets import api, create_bucket, delete_bucket
from tests.support.nats.store_files import small_disk
from tests.support.nats.streams import create_stream, stream_state
from tests.support.proxy.fault_proxy import Proxy
from tests.support.wait import wait_until_async

COUNT = 3000
AT = 500
"""The number of the PubAck at which the fault happens."""

AT_ONCE = 20.0
"""Seconds; less than the timeouts of the publishers that must not wait for them."""


async def test_purged(shared_server: NatsServer) -> None:
    """The messages before the purge are removed; the publisher continues after it."""
    messages = Messages("PURGED", COUNT)
    url = shared_server.url
    create_stream(url, messages.stream)
    purged: list[int] = []
    purge = AtPubAck(AT, lambda: purged.append(api(url, "STREAM.PURGE.PURGED")["purged"]))
    with Proxy(shared_server.port, purge) as proxy:
        await publish_all(proxy.url, messages, max_in_flight=100, request_timeout=0.3)
    assert purged[0] >= AT
    numbers = [number for _, number in stored(url, messages.stream)]
    assert numbers[-1] == COUNT - 1
    # The message whose PubAck was lost is sent again with those after it: none is missing.
    assert set(numbers) == set(range(min(numbers), COUNT))


def test_publish_to_deleted_stream(shared_server: NatsServer) -> None:
    messages = Messages("DELETED", COUNT)
    url = shared_server.url
    create_stream(url, messages.stream)

    async def write(servers: str) -> None:
        async with publishing(
            servers, messages.stream, max_in_flight=100, request_timeout=2
        ) as publisher:
            await publish(publisher, messages)

    fails_at_once(
        shared_server,
        lambda: api(url, "STREAM.DELETE.DELETED"),
        write,
        StreamNotFoundError,
        "stream not found",
    )


def test_write_to_deleted_bucket(shared_server: NatsServer) -> None:
    url = shared_server.url
    create_bucket(url, "deleted")

    async def write_to(servers: str) -> None:
        async with connect(servers, request_timeout=2) as jetstream:
            bucket = await open_bucket(jetstream, "deleted")
            async with KvBatchWriter(jetstream, bucket, max_in_flight=100) as writer:
                await write(writer, puts("deleted", range(COUNT)))

    fails_at_once(
        shared_server,
        lambda: delete_bucket(url, "deleted"),
        write_to,
        BucketNotFoundError,
        "bucket 'deleted' does not exist",
    )


def fails_at_once(
    server: NatsServer,
    act: Callable[[], object],
    write: Callable[[str], Any],
    kind: type[NatsSourceError],
    text: str,
) -> None:
    """Run ``write``, during which ``act`` is called; it fails before ``retry_timeout``.

    A server that deletes a stream drops the messages that it has received for it without a
    response: if those fill the window, the publisher learns of it after ``request_timeout``.
    """
    deleted = AtPubAck(AT, act)
    with Proxy(server.port, deleted) as proxy:
        with pytest.raises(kind, match=text):
            asyncio.run(asyncio.wait_for(write(proxy.url), AT_ONCE))
        assert deleted.done == 1


async def test_subjects_belong_to_other_stream(shared_server: NatsServer) -> None:
    messages = Messages("OLD", COUNT)
    url = shared_server.url
    create_stream(url, "OLD")

    def replace() -> None:
        api(url, "STREAM.DELETE.OLD")
        create_stream(url, "NEW", "OLD.>")

    replaced = AtPubAck(AT, replace)
    with Proxy(shared_server.port, replaced) as proxy:
        async with publishing(proxy.url, "OLD", max_in_flight=100) as publisher:
            with pytest.raises(
                UnexpectedStreamError,
                match=r"to stream 'OLD': stream 'NEW' has stored the message on 'OLD\.\d'",
            ):
                await publish(publisher, messages)
    assert replaced.done == 1


FULL = {
    "max_bytes": ({"max_bytes": 50_000, "discard": "new"}, "maximum bytes exceeded"),
    "max_msgs": ({"max_msgs": 100, "discard": "new"}, "maximum messages exceeded"),
    "per subject": (
        {"max_msgs_per_subject": 20, "discard": "new", "discard_new_per_subject": True},
        "maximum messages per subject exceeded",
    ),
}


@pytest.mark.parametrize("limit", FULL)
async def test_full_stream(shared_server: NatsServer, limit: str) -> None:
    config, reason = FULL[limit]
    name = f"FULL_{limit}".replace(" ", "_")
    messages = Messages(name, COUNT, size=100)
    create_stream(shared_server.url, name, **config)
    async with publishing(shared_server.url, name) as publisher:
        with pytest.raises(StreamFullError, match=rf"to '{name}\.\d': {reason}"):
            await publish(publisher, messages)
        assert publisher.stored == stream_state(shared_server.url, name)["messages"]
    found = [number for _, number in stored(shared_server.url, name)]
    assert found == list(range(len(found)))


STORAGES = {
    10002: (
        "jetstream {}\n"
        "accounts { A { jetstream { max_file: 1M }, users: [{user: a, password: a}] } }\n"
        "no_auth_user: a"
    ),
    10023: "jetstream { max_file_store: 1M }",
}


@pytest.mark.parametrize("err_code", STORAGES)
async def test_storage_used_up_of_account_or_server(tmp_path: Path, err_code: int) -> None:
    config = tmp_path / "nats.conf"
    config.write_text(STORAGES[err_code])
    messages = Messages("USED", COUNT, size=1_000)
    with NatsServer(config=config) as server:
        create_stream(server.url, messages.stream)
        async with publishing(server.url, messages.stream) as publisher:
            with pytest.raises(StreamFullError, match=rf"'USED\.\d': .*err_code {err_code}"):
                await publish(publisher, messages)
            assert publisher.stored == stream_state(server.url, messages.stream)["messages"] > 500


async def test_full_bucket(shared_server: NatsServer) -> None:
    create_bucket(shared_server.url, "full", max_bytes=20_000)
    async with connect(shared_server.url) as jetstream:
        bucket = await open_bucket(jetstream, "full")
        async with KvBatchWriter(jetstream, bucket) as writer:
            with pytest.raises(
                StreamFullError, match=r"to '\$KV\.full\.k\d+': maximum bytes exceeded"
            ):
                await write(writer, puts("full", range(COUNT)))


DISKS = {
    # The server does not respond to a message that it could not write.
    "no space left on device": ("1GB", AckTimeoutError, "check the server's log"),
    "resource limits exceeded": ("12MB", PublishError, "insufficient resources"),
}
"""By what the server's log reports: what the server may store, and the publisher's error."""


@pytest.mark.parametrize("reported", DISKS)
async def test_full_disk(tmp_path: Path, reported: str) -> None:
    limit, kind, text = DISKS[reported]
    messages = Messages("ORDERS", COUNT, size=10_000)
    disk, config = tmp_path / "disk", tmp_path / "server.conf"
    config.write_text(f"jetstream {{ max_file_store: {limit} }}\n")
    with small_disk(disk, 24), NatsServer(store=disk, config=config) as server:
        create_stream(server.url, messages.stream)
        async with publishing(
            server.url, messages.stream, request_timeout=0.4, retry_timeout=1
        ) as publisher:
            with pytest.raises(kind, match=rf"on 'ORDERS\.\d'.*{text}|to 'ORDERS\.\d': {text}"):
                await publish(publisher, messages)
            assert 0 < publisher.stored < messages.count
        assert reported in server.log


async def test_full_disk_that_is_enlarged(tmp_path: Path) -> None:
    """The publisher waits while the server is restarted with more space, and continues."""
    messages = Messages("ORDERS", COUNT, size=10_000)
    disk, config = tmp_path / "disk", tmp_path / "server.conf"
    config.write_text("jetstream { max_file_store: 1GB }\n")
    with small_disk(disk, 24) as resize, NatsServer(store=disk, config=config) as server:
        create_stream(server.url, messages.stream)
        async with publishing(server.url, messages.stream, request_timeout=1) as publisher:
            publishes = asyncio.create_task(publish(publisher, messages))
            await wait_until_async(lambda: "no space left" in server.log, "the disk is full")
            assert not publishes.done()
            resize(128)
            server.restart()
            await publishes
            assert publisher.stored == messages.count
        messages.check(server.url)


async def test_sealed(shared_server: NatsServer) -> None:
    messages = Messages("SEALED", COUNT)
    url = shared_server.url
    create_stream(url, "SEALED")
    config = api(url, "STREAM.INFO.SEALED")["config"]
    sealed = AtPubAck(AT, lambda: api(url, "STREAM.UPDATE.SEALED", {**config, "sealed": True}))
    with Proxy(shared_server.port, sealed) as proxy:
        async with publishing(proxy.url, "SEALED", max_in_flight=100) as publisher:
            with pytest.raises(PublishError, match=r"to 'SEALED\.\d': .*sealed"):
                await publish(publisher, messages)
    assert sealed.done == 1


USERS = """
jetstream {{}}
accounts {{ A {{ jetstream: enabled, users: [
    {{user: writer, password: x, permissions: {{ publish: {{ deny: [{denied}] }} }} }}
    {{user: admin, password: x}}
] }} }}
"""


@pytest.mark.parametrize("when", ["from the start", "in the middle"])
async def test_missing_permission(tmp_path: Path, when: str) -> None:
    config = tmp_path / "server.conf"
    revoked = USERS.format(denied='"ORDERS.3"')
    config.write_text(revoked if when == "from the start" else USERS.format(denied='"other"'))
    messages = Messages("ORDERS", COUNT)
    with NatsServer(config=config) as server:
        create_stream(server.url.replace("//", "//admin:x@"), messages.stream)

        def revoke() -> None:
            config.write_text(revoked)
            os.kill(server.pid, signal.SIGHUP)

        with Proxy(server.port, AtPubAck(AT, revoke)) as proxy:
            url = proxy.url.replace("//", "//writer:x@")
            async with publishing(url, messages.stream, max_in_flight=100) as publisher:
                with pytest.raises(PermissionDeniedError, match=r"'ORDERS\.3'"):
                    await publish_repeatedly(publisher, messages)


async def publish_repeatedly(publisher: ColumnPublisher, messages: Messages) -> None:
    """The server reloads its configuration at any time after the signal."""
    for _ in range(300):
        await publish(publisher, messages)
