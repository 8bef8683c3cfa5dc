"""Frames written to the socket of a nats-py client, in order with its own commands."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream import connect
from tests.support.wait import wait_until_async


async def test_frames_follow_buffer_of_client(shared_server: NatsServer) -> None:
    async with connect(shared_server.url) as jetstream:
        connection = jetstream.connection
        client = connection.client
        received = await client.subscribe("a")
        client._pending.append(b"PUB a 1\r\n1\r\n")
        client._pending_data_size += 1
        await connection.writer.write(memoryview(b"PUB a 1\r\n2\r\nPUB a 1\r\n3\r\n"))
        await client.publish("a", b"4")
        found = [(await received.next_msg(timeout=5)).data for _ in range(4)]
        assert found == [b"1", b"2", b"3", b"4"]


async def test_lost_connection_is_os_error(nats_server: NatsServer) -> None:
    async with connect(nats_server.url) as jetstream:
        connection = jetstream.connection
        nats_server.kill()
        await wait_until_async(lambda: not connection.online.is_set(), "the connection is lost")
        with pytest.raises(OSError, match="not connected"):
            await connection.writer.write(memoryview(b"PUB a 0\r\n\r\n"))
