"""JetStream in another account or domain (ADR-19): every call, under the document's own setup.

A *place* is a bucket's owner, who uses plain subjects, and the settings of a client that reaches
the same bucket through a prefix: account I of the document's configuration, the same with the two
imports that ordered reading and batches want, and a client of a leaf node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.errors import (
    ConsumerLostError,
    JetStreamNotEnabledError,
    KeyExistsError,
    MessageNotFoundError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.direct_get.client import DirectGet
from nats_stream_source.jetstream.direct_get.last_messages import last_columns
from nats_stream_source.jetstream.direct_get.request import count_messages
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.subjects import api_prefix
from nats_stream_source.jetstream.subscriptions.subscribe import (
    subscribe,
    subscribe_ordered,
    subscribe_pull,
)
from nats_stream_source.jetstream.subscriptions.validation import ConsumerConfig
from nats_stream_source.wire.consumer.cursor import Rebuild
from tests.support.nats.buckets import (
    api,
    bucket_info,
    bucket_state,
    connected as nats_client,
    consumers,
    create_bucket,
    delete_bucket,
    flushed,
    put,
    put_many,
    server_version,
)
from tests.support.nats.topology import (
    ADR19_API_PREFIX,
    ADR19_INBOX_PREFIX,
    adr19_server,
    hub_and_leaf,
)

pytestmark = pytest.mark.servers

ROWS = 2000
"""Entries of 4 KB: several of the server's flow-control windows."""

_V2 = "feature_flags { js_ack_fc_v2: true }"


@dataclass(frozen=True)
class Place:
    """``owner`` is the bucket's own address; ``settings`` reach it through a prefix."""

    owner: str
    settings: ConnectionSettings

    @asynccontextmanager
    async def jetstream(self) -> AsyncIterator[JetStream]:
        """JetStream through the prefix."""
        async with await Connection.open(self.settings) as connection:
            yield JetStream(connection)


def _imported(**variant: bool) -> Iterator[Place]:
    with adr19_server(object_store=True, **variant) as accounts:
        settings = ConnectionSettings(
            servers=(accounts.importer,),
            api_prefix=ADR19_API_PREFIX,
            inbox_prefix=ADR19_INBOX_PREFIX,
        )
        yield Place(accounts.exporter, settings)


def _in_domain(options: str = "") -> Iterator[Place]:
    with hub_and_leaf(options=options) as both:
        settings = ConnectionSettings(servers=(both.leaf.url,), api_prefix=api_prefix(domain="hub"))
        yield Place(both.hub.url, settings)


_PLACES: dict[str, Callable[[], Iterator[Place]]] = {
    "account": _imported,
    "account, all imports": lambda: _imported(streamed=True, flow_control=True),
    "domain": _in_domain,
}


@pytest.fixture(scope="module", params=_PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with contextlib.contextmanager(_PLACES[request.param])() as place:
        create_bucket(place.owner, "map", history=64)
        put_many(place.owner, "map", ((f"k{i % 100}", b"x" * 4000) for i in range(ROWS)))
        yield place


async def read(place: Place, end: int = ROWS, **more: Any) -> tuple[list[int], OrderedReader]:
    """Read the bucket through the prefix: stream sequences, and the reader at its end."""
    link = ReusableConnection(place.settings)
    try:
        created = bucket_info(place.owner, "map")["created"]
        asked = {"heartbeat": 0.1, **more}
        request = RangeRequest("KV_map", KnownStream(created), 0, end, **asked)
        reader = OrderedReader(link, request)
        rows: list[int] = []
        async for frames in reader.batches():
            rows += frames.stream_seq.tolist()
        return rows, reader
    finally:
        await link.drop()


async def test_stream_info_and_messages(place: Place) -> None:
    async with place.jetstream() as jetstream:
        info = await jetstream.stream_info("KV_map")
        assert (info.name, info.last_seq) == ("KV_map", ROWS)
        message = await jetstream.message("KV_map", last_by_subj="$KV.map.k7")
        assert message is not None
        # The prefix is of the way there: what is stored has the stream's own subject.
        assert (message.subject, message.seq) == ("$KV.map.k7", ROWS - 92)
        with pytest.raises(StreamNotFoundError):
            await jetstream.stream_info("KV_other")


async def test_direct_get(place: Place) -> None:
    async with place.jetstream() as jetstream:
        direct = DirectGet(jetstream, "KV_map")
        assert (await direct.get(5)).subject == "$KV.map.k4"
        assert (await direct.last("$KV.map.k7")).seq == ROWS - 92
        assert (await direct.last("$KV.map.*")).seq == ROWS
        assert (await direct.next("$KV.map.k7", seq=100)).seq == 108
        with pytest.raises(MessageNotFoundError):
            await direct.last("$KV.map.none")


async def test_direct_get_of_many(place: Place) -> None:
    async with place.jetstream() as jetstream:
        direct = DirectGet(jetstream, "KV_map")
        batch = direct.batch("$KV.map.k7", batch=3)
        last = direct.last_for(["$KV.map.k7", "$KV.map.k9"])
        info = await jetstream.stream_info("KV_map")
        subjects = pa.array(["$KV.map.k7", "$KV.map.k9", "$KV.map.none"])
        columns = await last_columns(jetstream, info, subjects)
        assert sorted(columns["sequence"].to_pylist()) == [ROWS - 92, ROWS - 90]
        assert [one.seq async for one in batch] == list(range(8, ROWS, 100))
        assert [one.seq async for one in last] == [ROWS - 92, ROWS - 90]


async def test_key_value(place: Place) -> None:
    """A write is published below the prefix; keys, values and markers are those of the bucket."""
    create_bucket(place.owner, "kv", history=5)

    try:
        async with place.jetstream() as jetstream:
            bucket = await KeyValue.open(jetstream, "kv")
            assert await bucket.put("a.b", b"1") == 1
            assert await bucket.create("c", b"1") == 2
            with pytest.raises(KeyExistsError):
                await bucket.create("c", b"2")
            assert await bucket.update("c", b"3", 2) == 3
            entry = await bucket.get("c", min_last_revision=3)
            assert (entry.key, entry.value, entry.revision) == ("c", b"3", 3)
            assert (await bucket.get_revision("c", 2)).value == b"1"
            assert [one.revision for one in await bucket.history("c")] == [2, 3]
            async with bucket.watch("a.>", "c") as watch:
                assert [one.key for one in await watch.initial()] == ["a.b", "c"]
                assert await bucket.delete("a.b") == 4
                marker = await asyncio.wait_for(watch.__anext__(), 60)
                assert (marker.key, marker.operation, marker.revision) == ("a.b", "DEL", 4)
            assert await bucket.keys() == ["c"]
            assert await bucket.purge("c") == 5
        stored = api(place.owner, "STREAM.MSG.GET.KV_kv", {"seq": 5})["message"]
        assert stored["subject"] == "$KV.kv.c"
        assert consumers(place.owner, "kv") == []
    finally:
        delete_bucket(place.owner, "kv")


async def test_prefix_is_removed_on_arrival(place: Place) -> None:
    """ADR-19, "Testing": ``nats sub '$KV.map.>'`` there, ``nats pub 'fromA.$KV.map.put'`` here.

    The API itself has no subjects below ``$JS.API.$KV``: a message there is not a write.
    """
    create_bucket(place.owner, "bin")
    try:
        async with nats_client(place.owner) as owner, place.jetstream() as jetstream:
            heard = await owner.subscribe("$KV.bin.>")
            await flushed(owner)
            await owner.publish("$JS.API.$KV.bin.not", b"")
            await flushed(owner)
            client = jetstream.connection.client
            prefix = place.settings.api_prefix
            answer = await client.request(f"{prefix}.$KV.bin.put", b"hello world", timeout=60)
            message = await heard.next_msg(60)
            assert (message.subject, message.data) == ("$KV.bin.put", b"hello world")
            assert json.loads(answer.data)["seq"] == 1
            assert bucket_state(place.owner, "bin")["last_seq"] == 1
    finally:
        delete_bucket(place.owner, "bin")


async def test_rank_through_prefix(place: Place) -> None:
    """Without an import of several responses EOB does not arrive: a consumer is created instead."""
    async with place.jetstream() as jetstream:
        assert (await count_messages(jetstream, "KV_map", 1001, ("$KV.map.k7",))).messages == 10
        assert (await count_messages(jetstream, "KV_map", 1001, ())).messages == ROWS - 1000
    assert consumers(place.owner, "map") == []


async def test_ordered_reading(place: Place, request: pytest.FixtureRequest) -> None:
    rows, reader = await read(place)
    assert rows == list(range(1, ROWS + 1))
    # In the document's own configuration, flow-control answers stay in account I.
    cured = request.node.callspec.params["place"] == "account"
    assert (Rebuild.STALLED in reader.cursor.rebuilds) is cured
    assert consumers(place.owner, "map") == []


async def test_subscriptions(place: Place) -> None:
    """Where the import allows one response, a pull request receives one message."""
    async with place.jetstream() as jetstream:
        config = ConsumerConfig(ack_policy="none")
        async with await subscribe(jetstream, "$KV.map.k7", config=config) as push:
            assert [(await push.next(10)).metadata.stream_seq for _ in range(3)] == [8, 108, 208]
        async with await subscribe_ordered(jetstream, "$KV.map.k7") as in_order:
            found = [(await in_order.next(10)).metadata.stream_seq for _ in range(3)]
            assert found == [8, 108, 208]
        async with await subscribe_pull(jetstream, "$KV.map.k7") as pull:
            assert [one.metadata.stream_seq for one in await pull.fetch(1, 5)] == [8]
    assert consumers(place.owner, "map") == []


# What leads nowhere


@pytest.mark.parametrize("prefix", ["fromB", "$JS.nowhere.API"])
async def test_prefix_without_target(place: Place, prefix: str) -> None:
    async with connect(place.settings.servers, api_prefix=prefix) as jetstream:
        with pytest.raises(JetStreamNotEnabledError, match="'domain' or 'api_prefix'"):
            await jetstream.stream_info("KV_map")


async def test_inbox_prefix_not_imported_is_error() -> None:
    """Responses to requests arrive; deliveries of a consumer do not.

    The server reports that the deliver subject has no subscriber, so three consumers are enough.
    """
    with adr19_server() as accounts:
        create_bucket(accounts.exporter, "map")
        put(accounts.exporter, "map", "k", b"v")
        settings = ConnectionSettings(servers=(accounts.importer,), api_prefix=ADR19_API_PREFIX)
        with pytest.raises(ConsumerLostError, match=r"3 consumers in a row .*'inbox_prefix'"):
            await read(Place(accounts.exporter, settings), end=1)


# Reply subjects with a domain


async def test_reply_subjects_with_domain_and_account_hash(url: str) -> None:
    """``$JS.ACK.<domain>.<account hash>.<stream>…``: ordered reading takes the numbers from it."""
    if server_version(url) < (2, 14):
        pytest.skip("servers before 2.14 send no such reply subjects")
    with contextlib.contextmanager(_in_domain)(_V2) as place:
        create_bucket(place.owner, "map", history=64)
        put_many(place.owner, "map", ((f"k{i % 100}", b"x" * 4000) for i in range(ROWS)))
        seen = await _one_reply_subject(place)
        assert seen[2] == "hub"
        assert len(seen) >= 11

        rows, reader = await read(place, heartbeat=30.0)  # no silence is taken for a loss

        assert rows == list(range(1, ROWS + 1))
        assert reader.cursor.rebuilds == []
        assert bucket_state(place.owner, "map")["consumer_count"] == 0


async def _one_reply_subject(place: Place) -> list[str]:
    async with place.jetstream() as jetstream:
        subscription = await jetstream.connection.client.subscribe("deliver")
        config = {"name": "look", "deliver_subject": "deliver", "ack_policy": "none"}
        await jetstream.add_consumer("KV_map", config)
        message = await subscription.next_msg(5)
        await jetstream.delete_consumer("KV_map", "look")
        return message.reply.split(".")
