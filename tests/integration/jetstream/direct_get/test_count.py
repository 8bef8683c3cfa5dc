"""How many messages match: by Direct Get where it can be trusted, by a consumer where not."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.direct_get.count import count_messages
from tests.integration.jetstream.direct_get.streams import partial_mirror
from tests.support.nats.buckets import bucket_state, consumers, create_bucket, put_many

pytestmark = pytest.mark.servers


async def counts(url: str, bucket: str, *asked: tuple[int, tuple[str, ...]]) -> list[int]:
    async with connect(url) as jetstream:
        return [
            (await count_messages(jetstream, f"KV_{bucket}", seq, f)).messages for seq, f in asked
        ]


@pytest.mark.parametrize("allow_direct", [True, False], ids=["direct", "by consumer"])
async def test_counts(shared_server: NatsServer, allow_direct: bool) -> None:
    bucket = f"counts{allow_direct}"
    url = shared_server.url
    create_bucket(url, bucket, history=1, allow_direct=allow_direct)
    put_many(url, bucket, ((f"k{i % 10}.x", b"v") for i in range(100)))
    one, two = f"$KV.{bucket}.k3.x", f"$KV.{bucket}.k9.*"
    asked: list[tuple[tuple[int, tuple[str, ...]], int]] = [
        ((1, ()), 10),
        ((91, ()), 10),
        ((96, ()), 5),
        ((100, ()), 1),
        ((101, ()), 0),
        ((5000, ()), 0),
        ((1, (one,)), 1),
        ((95, (one,)), 0),
        ((1, (one, two)), 2),
        ((95, (one, two)), 1),
        ((101, (one, two)), 0),
    ]
    assert await counts(url, bucket, *(question for question, _ in asked)) == [n for _, n in asked]
    assert consumers(url, bucket) == []


async def test_stream_empty(shared_server: NatsServer) -> None:
    create_bucket(shared_server.url, "empty")
    assert await counts(shared_server.url, "empty", (1, ()), (1, ("$KV.empty.a",))) == [0, 0]


async def test_partial_mirror_never_counts_for_stream(shared_server: NatsServer) -> None:
    """Any replica or mirror responds to a Direct Get; the mirror below holds half of the keys."""
    url = shared_server.url
    create_bucket(url, "whole", history=1)
    put_many(url, "whole", ((f"{'ab'[i % 2]}.{i}", b"v") for i in range(100)))
    partial_mirror(url, "PART", 50, filter_subject="$KV.whole.a.>")
    assert set(await counts(url, "whole", *[(1, ())] * 40)) == {100}
    assert set(await counts(url, "whole", *[(90, ("$KV.whole.b.>",))] * 40)) == {6}
    assert bucket_state(url, "whole")["last_seq"] == 100
