"""Writes frames to the socket of a nats-py client: in large pieces, or one by one into its buffer.

nats-py publishes one message per call. This module passes many frames to the socket at once, after
the commands that nats-py has buffered. asyncio buffers what the socket does not accept, so the
caller bounds the bytes that it has in flight; a websocket needs ``drain``, which sends.

:meth:`SocketWriter.buffer` adds one frame to nats-py's buffer, as ``Client.publish`` does, at a
third of its cost: the caller has checked subject and headers.

Private names of nats-py in use, verified by
``tests/integration/jetstream/connection/test_socket_tap.py``: ``Client._pending``,
``Client._pending_data_size``, ``Client._max_pending_size``, ``Client._flush_queue``,
``Client._flush_pending`` and ``Client._transport`` (with ``write``, ``writelines``, ``drain``).
"""

from __future__ import annotations

from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport


class SocketWriter:
    """Writes frames to the socket of ``client``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def write(self, frames: memoryview) -> None:
        """Write whole frames.

        Raises:
            OSError: the client is not connected, or the socket is broken.
        """
        client = self._client
        transport: Any = client._transport
        if transport is None or not client.is_connected:
            raise ConnectionError("not connected")
        try:
            if client._pending_data_size > 0:
                commands, client._pending, client._pending_data_size = client._pending, [], 0
                transport.writelines(commands)
            transport.write(frames)
            if not isinstance(transport, TcpTransport):
                await transport.drain()
        except (nats.errors.Error, RuntimeError, AttributeError) as error:
            # RuntimeError, AttributeError: asyncio's transport was lost while nats-py still has it.
            raise ConnectionError(str(error) or type(error).__name__) from error

    def buffer(self, frame: bytes) -> bool:
        """Add a frame to nats-py's buffer; returns whether :meth:`flush` must be awaited.

        Raises:
            nats.errors.Error: the client is closed, or is not connected and its buffer is full.
        """
        client = self._client
        if client.is_closed:
            raise nats.errors.ConnectionClosedError
        size = client._pending_data_size + len(frame)
        full = 0 < client._max_pending_size < size
        if full and not client.is_connected:
            raise nats.errors.OutboundBufferLimitError
        client._pending.append(frame)
        client._pending_data_size = size
        return full or client._flush_queue is None or client._flush_queue.empty()

    async def flush(self) -> None:
        """Wake nats-py's flusher; wait for it while its buffer is full."""
        client = self._client
        await client._flush_pending(
            force_flush=client._pending_data_size > client._max_pending_size > 0
        )
