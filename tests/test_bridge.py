"""The bridge to nats-py: the private names exist, and both sides get what is theirs."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import Transport

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.bridge import open_inbox, tapped_client
from nats_stream_source.wire.frames import Frames


def test_the_private_names_of_nats_py_are_as_the_bridge_needs_them() -> None:
    parser = Client()._ps
    assert inspect.iscoroutinefunction(parser.parse)
    assert list(inspect.signature(parser.parse).parameters) == ["data"]
    assert callable(parser.reset)
    assert Client()._transport is None
    assert callable(Transport.close)
    # The read loop must ask the client for its parser each time, not keep one.
    assert "await self._ps.parse(b)" in inspect.getsource(Client._read_loop)


def test_a_subscription_has_its_sid(shared_server: NatsServer) -> None:
    async def work() -> None:
        client = tapped_client()
        await client.connect(shared_server.url)
        try:
            inbox = await open_inbox(client, "x")
            assert inbox.sid in client._subs
            await inbox.close()
            assert inbox.sid not in client._subs
        finally:
            await client.close()

    asyncio.run(work())


def test_tapped_and_ordinary_subscriptions_side_by_side(shared_server: NatsServer) -> None:
    """Interleaved messages, payloads that look like frames, and frames larger than a read."""
    payloads = [b"x" * (i * 37 % 5000) + b"\r\nMSG tapped 1 3\r\nabc\r\n" for i in range(400)]
    payloads[7] = b"y" * 900_000

    async def work() -> tuple[list[bytes], list[bytes]]:
        client = tapped_client()
        await client.connect(shared_server.url)
        plain: list[bytes] = []
        tapped: list[Frames] = []

        async def on_message(message: Msg) -> None:
            plain.append(message.data)

        try:
            inbox = await open_inbox(client, "tapped")
            await client.subscribe("plain", cb=on_message)
            for index, payload in enumerate(payloads):
                headers = {"N": str(index)} if index % 3 == 0 else None
                await client.publish("tapped", payload, headers=headers)
                await client.publish("plain", payload)
                if index % 50 == 0:
                    await client.flush()
            # Not flush(): nats-py's PING overtakes the messages that it still buffers.
            deadline = asyncio.get_running_loop().time() + 10
            while min(len(plain), sum(map(len, tapped))) < len(payloads):
                assert asyncio.get_running_loop().time() < deadline
                await asyncio.sleep(0.01)
                tapped += inbox.take()
            await inbox.close()
        finally:
            await client.close()
        return plain, [frames.payload(i) for frames in tapped for i in range(len(frames))]

    plain, tapped = asyncio.run(work())
    assert plain == payloads
    assert tapped == payloads


def test_closing_an_inbox_in_the_middle_of_a_flood_keeps_the_rest_sound(
    shared_server: NatsServer,
) -> None:
    """A frame that is cut by the read's end must not reach nats-py's parser in two halves."""

    async def work() -> list[bytes]:
        client, writer = tapped_client(), Client()
        await client.connect(shared_server.url)
        await writer.connect(shared_server.url)
        answers = []

        async def echo(message: Msg) -> None:
            await message.respond(message.data)

        try:
            await writer.subscribe("echo", cb=echo)
            await writer.flush()
            for round_ in range(5):
                inbox = await open_inbox(client, "flood")
                await client.flush()
                for _ in range(300):
                    await writer.publish("flood", b"z" * 1000)
                await writer.flush()
                assert await inbox.wait(5)
                await inbox.close()
                answers.append((await client.request("echo", b"%d" % round_, 5)).data)
        finally:
            await client.close()
            await writer.close()
        return answers

    assert asyncio.run(work()) == [b"0", b"1", b"2", b"3", b"4"]


def test_after_a_reconnect_both_kinds_of_subscription_live(nats_server: NatsServer) -> None:
    async def work() -> tuple[int, bytes]:
        client = tapped_client()
        again = asyncio.Event()

        async def on_reconnect() -> None:
            again.set()

        options: dict[str, Any] = {"reconnect_time_wait": 0.05, "max_reconnect_attempts": -1}
        await client.connect(nats_server.url, reconnected_cb=on_reconnect, **options)
        try:
            inbox = await open_inbox(client, "tapped")

            async def echo(message: Msg) -> None:
                await message.respond(message.data)

            await client.subscribe("echo", cb=echo)
            await asyncio.to_thread(nats_server.restart)
            await asyncio.wait_for(again.wait(), 10)
            await client.publish("tapped", b"1")
            answer = (await client.request("echo", b"2", 5)).data
            frames = sum(len(one) for one in inbox.take())
            await inbox.close()
            return frames, answer
        finally:
            await client.close()

    assert asyncio.run(work()) == (1, b"2")
