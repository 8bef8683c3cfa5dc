"""Connecting and closing, cancelled or out of time in every turn of the event loop.

Up to Python 3.11 a cancellation in the same turn as the awaited result can be lost.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConnectError

GREETING = (
    b'INFO {"server_id":"x","version":"2.12.0","max_payload":1048576,"proto":1,"headers":true}\r\n'
)
_TIMEOUT = 0.3  # seconds


@pytest.mark.parametrize("turns", range(5))
async def test_greeting_after_deadline(turns: int) -> None:
    """And silence after it: connecting ends with an error, and does not begin again."""
    loop = asyncio.get_running_loop()
    greeted = 0
    deadline = loop.time() + _TIMEOUT
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal greeted
        if not greeted:
            greeted += 1
            await asyncio.sleep(deadline - loop.time() - 0.02)
            writer.write(GREETING)
            for _ in range(turns):
                await asyncio.sleep(0)
            # The bytes and the deadline come in one turn.
            time.sleep(max(0.0, deadline + 0.01 - loop.time()))  # noqa: ASYNC251
        await over.wait()
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = ConnectionSettings(servers=(url,), connect_timeout=_TIMEOUT)
    opening = asyncio.ensure_future(Connection.open(settings))
    done, _ = await asyncio.wait({opening}, timeout=20)
    assert done, "it goes on and on"
    with pytest.raises(ConnectError):
        opening.result()
    over.set()
    server.close()
    await asyncio.sleep(0.05)
    assert greeted == 1


async def test_close_cancelled(shared_server: NatsServer) -> None:
    """The connection closes nevertheless, and the cancelled task is cancelled."""
    tried = forgotten = 0
    for turns in range(1, 60):
        settings = ConnectionSettings(servers=(shared_server.url,), connect_timeout=20.0)
        connection = await Connection.open(settings)
        if turns % 2:
            connection.reconnect()
        went_on = False

        async def caller(connection: Connection = connection) -> None:
            nonlocal went_on
            await connection.close()
            went_on = True
            await asyncio.sleep(0)

        task = asyncio.ensure_future(caller())
        for _ in range(turns):
            await asyncio.sleep(0)
        closed = went_on
        if not task.done():
            tried += not closed
            task.cancel()
        await asyncio.wait({task})
        forgotten += went_on and not closed
        assert connection.client.is_closed
        assert asyncio.all_tasks() == {asyncio.current_task()}
    assert tried, "some were cancelled before they had closed"
    assert not forgotten
