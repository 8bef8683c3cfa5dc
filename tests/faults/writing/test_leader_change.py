"""A replicated stream gets another leader while messages wait for their PubAcks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial

import pytest

from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.kv.batch_writer import KvBatchWriter
from tests.faults.cluster.replica_state import FAULTS, LeaderLoss
from tests.faults.writing.publishing import (
    FAST_INGEST,
    AtPubAck,
    Messages,
    PublisherKind,
    each_publisher,
    open_bucket,
    puts,
    revisions,
    with_and_without_ids,
    write,
)
from tests.support.nats.buckets import create_bucket
from tests.support.nats.cluster import Cluster
from tests.support.proxy.fault_proxy import Proxy
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

COUNT, AT = 2000, 500


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def creates(cluster: Cluster, kind: PublisherKind, stream: str) -> bool:
    """Create the stream; False while the cluster elects a meta leader."""
    try:
        kind.create_stream(cluster.url, stream, num_replicas=3)
    except RuntimeError as error:
        if "10008" not in str(error):
            raise
        return False
    return True


@pytest.mark.parametrize("fault", FAULTS)
@each_publisher
@with_and_without_ids
async def test_publish(cluster: Cluster, fault: str, kind: PublisherKind, ids: bool) -> None:
    """With ids each message is stored once, by fast ingest in order; without, at least once.

    The new leader may continue a batch of fast ingest or end it. Without ids, messages that were
    sent before the reconnect, or to a server that was stopped, may be stored late. With PubAcks,
    the new leader may store messages that follow lost ones.
    """
    messages = Messages(f"{fault}_{kind.name}_{ids}".replace(" ", "_"), COUNT, ids=ids)
    wait_until(partial(creates, cluster, kind, messages.stream), "a meta leader")
    cluster.wait_ready(messages.stream)
    with (
        contextlib.closing(LeaderLoss(cluster, messages.stream, fault)) as goes,
        Proxy(goes.outside.port, at := kind.at_ack(kind.middle, goes)) as proxy,
    ):
        await kind.publish_all(proxy.url, messages, request_timeout=1, retry_timeout=60)
        # The client knows the addresses of the other servers: it may have gone on at once.
        wait_until(lambda: at.done == 1, "another leader")
        assert goes.after not in (None, goes.before)
    cluster.wait_ready(messages.stream)
    messages.check(goes.outside.url, in_order=ids and kind is FAST_INGEST)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "stopped"])
async def test_writers_create_same_keys(cluster: Cluster, fault: str) -> None:
    """Each key has one revision, of one of the writers, and the other one has skipped it."""
    name = f"both_{fault}".replace(" ", "_")
    create_bucket(cluster.url, name, history=5, num_replicas=3)
    cluster.wait_ready(f"KV_{name}")

    async def create(url: str, job: str) -> tuple[int, int]:
        async with connect(url, request_timeout=1) as jetstream:
            bucket = await open_bucket(jetstream, name)
            async with KvBatchWriter(
                jetstream, bucket, skip_conflicts=True, max_in_flight=300, retry_timeout=60
            ) as writer:
                # In opposite directions, so that both of them win.
                numbers = range(COUNT) if job == "up" else range(COUNT - 1, -1, -1)
                await write(writer, puts(name, numbers, expected=0, job=job))
                return writer.stored, writer.skipped

    with (
        contextlib.closing(LeaderLoss(cluster, f"KV_{name}", fault)) as goes,
        Proxy(goes.outside.port, at := AtPubAck(AT, goes)) as proxy,
    ):
        results = await asyncio.gather(create(proxy.url, "up"), create(proxy.url, "down"))
        wait_until(lambda: at.done == 1, "another leader")
    assert [stored + skipped for stored, skipped in results] == [COUNT, COUNT]
    assert sum(stored for stored, _ in results) == COUNT
    assert min(stored for stored, _ in results) > 0
    cluster.wait_ready(f"KV_{name}")
    found = revisions(cluster.url, name)
    assert sorted(key for _, key, _ in found) == sorted(f"k{n}" for n in range(COUNT))
