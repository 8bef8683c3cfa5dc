"""A bucket with several replicas (ADR-8, "Buckets")."""

from __future__ import annotations

from nats_stream_source.jetstream.kv.config import KeyValueConfig
from tests.integration.jetstream.kv.stores import new_bucket
from tests.support.nats.buckets import bucket_info
from tests.support.nats.cluster import Cluster


async def test_replicas_and_storage_are_those_of_stream(cluster: Cluster) -> None:
    for replicas in (1, 3):
        name = f"r{replicas}"
        async with new_bucket(cluster.url, KeyValueConfig(name, replicas=replicas)) as kv:
            if replicas > 1:
                cluster.wait_ready(f"KV_{name}")
            assert await kv.put("a", b"1") == 1
            assert (await kv.get("a", min_last_revision=1)).value == b"1"
            info = bucket_info(cluster.url, name)
            assert (info["config"]["num_replicas"], info["config"]["storage"]) == (replicas, "file")
            assert len(info["cluster"].get("replicas") or ()) == replicas - 1
            assert (await kv.status()).config.replicas == replicas
