"""Each outcome and each verdict of the fault proxy."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable

import pytest
from nats.aio.client import Client

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import with_client
from tests.support.proxy.fault_proxy import (
    After,
    CutAt,
    Delay,
    Outcome,
    Proxy,
    Twice,
)
from tests.support.recorded_stream import RecordedStream

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


def test_cut_ends_within_frame(shared_server: NatsServer) -> None:
    """A client that reads bytes gets these, and then a reset."""

    async def work() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(HELLO)
        await asyncio.wait_for(reader.readuntil(b"PONG\r\n"), 60)
        await asyncio.to_thread(publish_all, shared_server)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while data := await asyncio.wait_for(reader.read(1000), 60):
                got += data
        writer.close()
        return got

    with Proxy(shared_server.port, third(CutAt(9))) as proxy:
        assert asyncio.run(work()).endswith(b"\r\n2\r\nMSG x.y 1")


def test_freeze_stops_all_frames_until_thaw(shared_server: NatsServer) -> None:
    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)
        proxy.freeze()
        writer.write(HELLO)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(100), 0.2)
        proxy.thaw()
        await asyncio.wait_for(reader.readuntil(b"PONG\r\n"), 60)
        writer.close()

    with Proxy(shared_server.port) as proxy:
        asyncio.run(work())


def test_rate_limits_bytes_per_second(shared_server: NatsServer) -> None:
    """A lower bound: 100,000 bytes at 200,000 a second take half a second or more."""
    recorded = RecordedStream("stream", shared_server.url).create()
    recorded.write(100, size=1000)
    with Proxy(shared_server.port, rate=200_000) as proxy, recorded.query(proxy.url) as query:
        began = time.monotonic()
        query.until(100)
        assert time.monotonic() - began > 0.5
