"""Writes to streams that store messages without PubAcks: refused before the first message."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pyarrow as pa
import pytest

from nats_stream_source.errors import AckTimeoutError, ConfigurationError
from nats_stream_source.jetstream import KeyValue, ObjectStore, connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.batch_writer import KvBatchWriter
from nats_stream_source.jetstream.publish.batch_publisher import (
    BatchPublisher,
    FastIngestPublisher,
    MessageColumns,
)
from nats_stream_source.jetstream.publish.publisher import Publisher
from tests.support.nats.buckets import api, skip_before
from tests.support.nats.streams import create_stream, stream_state

pytestmark = pytest.mark.servers


async def publish(
    publisher: BatchPublisher | FastIngestPublisher | KvBatchWriter, prefix: str
) -> None:
    async with publisher:
        subjects = pa.array([f"{prefix}.a", f"{prefix}.b"])
        await publisher.send(MessageColumns(subjects, pa.array([b"v", b"v"])))
        await publisher.flush()


@pytest.mark.parametrize("publisher", [BatchPublisher, FastIngestPublisher])
async def test_columns_for_stream_without_pub_acks_refused(
    url: str, jetstream: JetStream, publisher: type[BatchPublisher | FastIngestPublisher]
) -> None:
    config = {}
    if publisher is FastIngestPublisher:
        skip_before(url, 14)
        config["allow_batched"] = True
    name = publisher.__name__
    create_stream(url, name, no_ack=True, **config)
    with pytest.raises(ConfigurationError, match=f"'{name}': its stream has no_ack, expected"):
        await publish(publisher(jetstream, name), name)
    assert stream_state(url, name)["messages"] == 0
    updated = {"name": name, "subjects": [f"{name}.>"], **config}
    api(url, f"STREAM.UPDATE.{name}", updated)
    await publish(publisher(jetstream, name), name)
    assert stream_state(url, name)["messages"] == 2


async def test_bucket_without_pub_acks_refuses_writes(url: str, jetstream: JetStream) -> None:
    create_stream(
        url,
        "KV_silent",
        "$KV.silent.>",
        no_ack=True,
        max_msgs_per_subject=1,
        allow_rollup_hdrs=True,
    )
    kv = await KeyValue.open(jetstream, "silent")
    writes: list[Callable[[], Awaitable[object]]] = [
        lambda: kv.put("a", b"v"),
        lambda: kv.create("a", b"v"),
        lambda: kv.update("a", b"v", 0),
        lambda: kv.delete("a"),
        lambda: kv.purge("a"),
        lambda: publish(KvBatchWriter(jetstream, kv.bucket), "$KV.silent"),
    ]
    for write in writes:
        with pytest.raises(ConfigurationError, match="silent': its stream has no_ack"):
            await write()
    assert await kv.keys() == []
    assert stream_state(url, "KV_silent")["last_seq"] == 0


async def test_object_store_without_pub_acks_refuses_writes(url: str, jetstream: JetStream) -> None:
    store = await ObjectStore.create(jetstream, "silent", no_ack=True)
    for write in (store.put("a", b"v"), store.delete("a")):
        with pytest.raises(ConfigurationError, match="store 'silent': its stream has no_ack"):
            await write
    assert stream_state(url, "OBJ_silent")["last_seq"] == 0


async def test_publish_without_pub_ack_names_no_ack(url: str) -> None:
    create_stream(url, "mute", no_ack=True)
    async with connect(url, request_timeout=0.3) as jetstream:
        publisher = jetstream.connection.service(Publisher)
        problem = "message on 'mute.a': no PubAck .* a stream with no_ack, for example, stores it"
        with pytest.raises(AckTimeoutError, match=problem):
            await publisher.publish("mute.a")
    assert stream_state(url, "mute")["messages"] == 1
