"""Writes frames to the socket of a nats-py client in large pieces.

nats-py publishes one message per call. This module passes many frames to the socket at once, after
the commands that nats-py has buffered. asyncio buffers what the socket does not accept, so the
caller bounds the bytes that it has in flight; a websocket needs ``drain``, which sends.

Private names of nats-py in use, verified by
``tests/integration/jetstream/connection/test_socket_writer.py``: ``Client._pending``,
``Client._pending_data_size`` and ``Client._transport`` (with ``write``, ``writelines``, ``drain``).
"""

from __future__ import annotations

from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport


async def write_frames(client: Client, frames: memoryview) -> None:
    """Write whole frames to the socket of a connected client.

    Raises:
        OSError: the client is not connected, or the socket is broken.
    """
    transport: Any = client._transport
    if transport is None or not client.is_connected:
        raise ConnectionError("not connected")
    try:
        await _write(client, transport, frames)
    except (nats.errors.Error, RuntimeError, AttributeError) as error:
        # RuntimeError, AttributeError: asyncio's transport was lost while nats-py still has it.
        raise ConnectionError(str(error) or type(error).__name__) from error


async def _write(client: Client, transport: Any, frames: memoryview) -> None:
    if client._pending_data_size > 0:
        commands, client._pending, client._pending_data_size = client._pending, [], 0
        transport.writelines(commands)
    transport.write(frames)
    if not isinstance(transport, TcpTransport):
        await transport.drain()
