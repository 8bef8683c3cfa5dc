"""A long list of last messages whose frames are lost or doubled: it is complete, and in order."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.wire.consumer import intake
from tests.integration.jetstream.kv.watches import opened
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.proxy.fault_proxy import Proxy, Twice
from tests.support.proxy.verdicts import Share

KEYS = 4000


@pytest.fixture(scope="module")
def bucket(shared_server: NatsServer) -> str:
    """A bucket with a history, so that readers request a list; every third key has two entries."""
    create_bucket(shared_server.url, "long", 3)
    entries = [(f"k{i}", b"old") for i in range(0, KEYS, 3)]
    put_many(shared_server.url, "long", entries + [(f"k{i}", b"%d" % i) for i in range(KEYS)])
    return "long"


FAULTS = {
    "0.4 % lost": Share(0.004, seed=1),
    "1 % lost": Share(0.01, seed=2),
    "1 % doubled": Share(0.01, seed=3, outcome=Twice()),
}


@pytest.mark.parametrize("how", FAULTS)
async def test_watch_receives_every_key(shared_server: NatsServer, bucket: str, how: str) -> None:
    fault = FAULTS[how]
    with Proxy(shared_server.port, fault) as proxy:
        async with opened(proxy.url, bucket) as kv:
            found: list[tuple[str, bytes, int]] = []
            async with kv.watch() as watch:
                async for entry in watch:
                    if entry is None:
                        break
                    found.append((entry.key, entry.value, entry.revision))
        assert fault.done > 5
        assert len(proxy.created) < 12
        assert set(proxy.created) == set(proxy.deleted)
    assert {key: value for key, value, _ in found} == {f"k{i}": b"%d" % i for i in range(KEYS)}
    revisions = [revision for _, _, revision in found]
    assert all(one < other for one, other in itertools.pairwise(revisions)), "in order, once"


async def test_few_rows_may_wait_in_memory(
    shared_server: NatsServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full memory the list is read in several parts, each from its beginning."""
    monkeypatch.setattr(intake, "_MAX_HELD_BYTES", 30_000)
    fault = Share(0.004, seed=4)
    with Proxy(shared_server.port, fault) as proxy:
        async with opened(proxy.url, bucket) as kv:
            keys = await asyncio.wait_for(kv.keys(), 120)
        assert fault.done > 5
    assert sorted(keys) == sorted(f"k{i}" for i in range(KEYS))
