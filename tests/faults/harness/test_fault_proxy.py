"""Each outcome of a frame in the fault proxy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest
from nats.aio.client import Client

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import with_client
from tests.support.proxy.fault_proxy import (
    After,
    Delay,
    Outcome,
    Proxy,
    Twice,
)

SENT = [b"%d" % i for i in range(1, 7)]


def through(proxy: Proxy, server: NatsServer, expected: str) -> str:
    """The payloads that a subscriber behind the proxy receives of ``SENT``."""

    async def work() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(HELLO)
        await asyncio.wait_for(reader.readuntil(b"PONG\r\n"), 60)
        await asyncio.to_thread(publish_all, server)
        got = b""
        try:
            while len(_MESSAGE.findall(got)) < len(expected):
                got += await asyncio.wait_for(reader.read(1000), 60)
        finally:
            writer.close()
        return b"".join(_MESSAGE.findall(got)).decode()

    return asyncio.run(work())


HELLO = b'CONNECT {"verbose":false}\r\nSUB x.y 1\r\nPING\r\n'
_MESSAGE = re.compile(rb"MSG x\.y 1 1\r\n(.)\r\n")


def publish_all(server: NatsServer) -> None:
    async def work(client: Client) -> None:
        for payload in SENT:
            await client.publish("x.y", payload)

    with_client(server.url, work)


def third(outcome: Outcome) -> Callable[[bytes], Outcome]:
    return lambda frame: outcome if frame.startswith(b"MSG x.y") and b"\r\n3\r\n" in frame else True


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (True, "123456"),
        (False, "12456"),
        (b"MSG x.y 1 1\r\n9\r\n", "129456"),
        (Twice(), "1233456"),
        (Delay(0.05), "123456"),
        (After(1), "124356"),
    ],
)
def test_outcome_changes_what_subscriber_receives(
    shared_server: NatsServer, outcome: Outcome, expected: str
) -> None:
    with Proxy(shared_server.port, third(outcome)) as proxy:
        assert through(proxy, shared_server, expected) == expected
    assert len(proxy.dropped) == (outcome is not True)
