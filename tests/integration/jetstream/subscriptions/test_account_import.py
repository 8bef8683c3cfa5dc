"""Pull requests and acknowledgements of another account: what an import must pass (ADR-19)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from nats_stream_source.errors import AckError, SingleResponseError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.publish.publisher import Publisher
from nats_stream_source.jetstream.subscriptions.subscribe import subscribe_pull
from tests.support.nats.buckets import api, publish
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import (
    ADR19_API_PREFIX,
    ADR19_INBOX_PREFIX,
    adr19_server,
    configured_server,
)
from tests.support.wait import wait_until_async


@asynccontextmanager
async def importing(**exports: bool) -> AsyncIterator[tuple[str, JetStream]]:
    """The exporter's address, and account I's JetStream; the stream S has the subjects ``s.>``."""
    with adr19_server(**exports) as accounts:
        create_stream(accounts.exporter, "S", "s.>")
        async with connect(
            accounts.importer,
            api_prefix=ADR19_API_PREFIX,
            inbox_prefix=ADR19_INBOX_PREFIX,
            request_timeout=2.0,
        ) as jetstream:
            yield accounts.exporter, jetstream


IMPORTS = {"one response": False, "responses up to an empty one": True}


@pytest.mark.parametrize("streamed", IMPORTS.values(), ids=IMPORTS)
@pytest.mark.parametrize("timeout", [2.0, None])
async def test_import_with_single_response(streamed: bool, timeout: float | None) -> None:
    """Nine of ten messages are lost on the way: an error that names the export."""
    async with importing(streamed=streamed) as (exporter, jetstream):
        publish(exporter, [(f"s.{i}", b"" if streamed else b"x", None) for i in range(12)])
        async with await subscribe_pull(jetstream, "s.>", stream="S") as pull:
            with pytest.raises(SingleResponseError, match=r"1 of 10 .*MSG\.NEXT\.>' with resp"):
                await pull.fetch(10, timeout)
            assert [len(await pull.fetch(1, 5)) for _ in range(2)] == [1, 1]
        assert api(exporter, "CONSUMER.NAMES.S")["consumers"] == []


async def test_import_with_single_response_by_single_messages() -> None:
    """Without heartbeats: one would be the one response that arrives."""
    async with (
        importing() as (exporter, jetstream),
        await subscribe_pull(jetstream, "s.>", stream="S") as pull,
    ):
        assert await pull.fetch(1, 2) == []
        publish(exporter, [("s.1", b"", None)])
        assert [one.subject for one in await pull.fetch(1, 5)] == ["s.1"]


@pytest.mark.parametrize("acks", [False, True])
async def test_acknowledgements_over_import(acks: bool) -> None:
    """``$JS.ACK`` is an export of its own (docs/security.md)."""
    async with (
        importing(streamed=True, acks=acks) as (exporter, jetstream),
        await subscribe_pull(jetstream, "s.>", stream="S") as pull,
    ):
        publish(exporter, [(f"s.{i}", b"x", None) for i in range(10)])
        messages = await pull.fetch(10, 5)
        assert len(messages) == 10
        if acks:
            for message in messages[:-1]:
                await message.ack()
            await messages[-1].ack_sync()
        else:
            for call in (messages[0].ack, messages[0].nak, messages[0].ack_sync):
                with pytest.raises(AckError, match=r"import '\$JS\.ACK\.S\.>' as a service"):
                    await call()
        info = await jetstream.consumer_info("S", pull.info.name)
        assert info["num_ack_pending"] == (0 if acks else 10)


async def test_acknowledgements_that_are_denied(caplog: pytest.LogCaptureFixture) -> None:
    """The server reports it apart from the acknowledgement: it is logged; the next one fails."""
    denied = 'permissions: { publish: { deny: "$JS.ACK.>" } }'
    config = f"authorization {{ users = [{{ user: u, password: p, {denied} }}] }}"
    with configured_server(config) as server:
        async with connect(server.url, user="u", password="p") as jetstream:
            await jetstream.call("STREAM.CREATE.S", {"name": "S", "subjects": ["s.>"]})
            await jetstream.connection.service(Publisher).publish("s.1")
            await jetstream.connection.service(Publisher).publish("s.2")
            async with await subscribe_pull(jetstream, "s.>", stream="S") as pull:
                first, second = await pull.fetch(2, 5)
                await first.ack()
                await wait_until_async(
                    lambda: "acknowledgements are denied" in caplog.text, "the violation is logged"
                )
                with pytest.raises(AckError, match=r"denied the subject '\$JS\.ACK\.>'"):
                    await second.ack()
                with pytest.raises(AckError, match=r"denied the subject '\$JS\.ACK"):
                    await second.ack_sync()
