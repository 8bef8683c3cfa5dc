"""Direct Get of the last messages of many subjects (ADR-31)."""

from __future__ import annotations

from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import TooManySubjectsError
from nats_stream_source.jetstream.times import nanoseconds
from tests.integration.jetstream.direct_get.streams import make
from tests.support.nats.buckets import create_bucket, publish, skip_before
from tests.support.nats.cluster import Cluster
from tests.support.nats.direct_get import direct_get, seqs

pytestmark = pytest.mark.servers


async def test_last_for(shared_server: NatsServer) -> None:
    url, name = shared_server.url, "MULTI"
    skip_before(url, 11)
    make(url, name, 20)

    async with direct_get(url, name) as get:

        async def read(*subjects: str, **options: Any) -> list[int]:
            subjects = tuple(f"{name}.{one}" for one in subjects)
            return await seqs(get.last_for(subjects, **options))

        assert await read("1", "2") == [17, 18]
        assert await read("*") == [17, 18, 19, 20]
        assert await read("*", "1", ">") == [17, 18, 19, 20]
        assert await read("9") == []
        assert await read("1", "9") == [17]
        assert await read("*", batch=1) == [17, 18, 19, 20]
        assert await read("*", batch=3) == [17, 18, 19, 20]
        assert await read("*", max_bytes=1) == [17, 18, 19, 20]
        assert await read("*", up_to_seq=6) == [3, 4, 5, 6]
        assert await read("*", up_to_seq=6, batch=2) == [3, 4, 5, 6]
        assert await read("*", up_to_seq=2) == [1, 2]
        assert await read("2", up_to_seq=1) == []
        assert await read("*", up_to_seq=5000) == [17, 18, 19, 20]
        sixth = (await get.get(6)).time
        assert await read("*", up_to_time=nanoseconds(sixth) + 1, batch=3) == [3, 4, 5, 6]
        assert await read("*", up_to_time=sixth) == [2, 3, 4, 5]  # before, not at: so servers do
        assert await read("*", up_to_time="2001-01-01T00:00:00Z") == []
        assert await read("*", up_to_time="2099-01-01T00:00:00Z") == [17, 18, 19, 20]
        assert await seqs(get.last_for(f"{name}.1")) == [17]


async def test_pages_of_one_point_in_time(shared_server: NatsServer) -> None:
    """What is written between two pages does not show in the later one."""
    url, name = shared_server.url, "POINT"
    skip_before(url, 11)
    make(url, name, 8)

    async with direct_get(url, name) as get:
        found = []
        async for message in get.last_for([f"{name}.>"], batch=1):
            found.append(message.data)
            for n in range(4):
                await get.jetstream.connection.client.request(f"{name}.{n}", b"new")
        assert found == [b"v5", b"v6", b"v7", b"v8"]


@pytest.mark.parametrize("allow_direct", [True, False], ids=["direct", "leader"])
async def test_point_in_time_is_reported(shared_server: NatsServer, allow_direct: bool) -> None:
    url, name = shared_server.url, f"AT{allow_direct}"
    skip_before(url, 11)
    make(url, name, 20, allow_direct=allow_direct)

    async with direct_get(url, name) as get:

        async def point(subject: str = f"{name}.>", **options: Any) -> int | None:
            last = get.last_for([subject], **options)
            await seqs(last)
            return last.up_to_seq

        assert await point() == 20
        assert await point(up_to_seq=6) == 6
        assert await point(up_to_seq=5000) == 20
        assert await point(f"{name}.none") == 20
        assert await point(f"{name}.none", up_to_seq=6) == 6
        assert await point(up_to_time=(await get.get(7)).time) == 6
        assert await point(up_to_time="2099-01-01T00:00:00Z") == 20


async def test_key_overwritten_between_pages_is_not_lost(shared_server: NatsServer) -> None:
    """A bucket with history 1 does not keep the value of the point in time: the newer one comes."""
    url = shared_server.url
    skip_before(url, 11)
    create_bucket(url, "pages", history=1)
    publish(url, [(f"$KV.pages.{key}", b"old", None) for key in "abcd"])

    async with direct_get(url, "KV_pages") as get:
        found = {}
        async for message in get.last_for(["$KV.pages.>"], batch=1):
            if not found:
                await get.jetstream.connection.client.request("$KV.pages.c", b"new")
            found[message.subject[-1]] = message.data
        assert found == {"a": b"old", "b": b"old", "c": b"new", "d": b"old"}


async def test_replicated_stream() -> None:
    """A past point and the pages after the first one are proven by the message at the point."""
    with Cluster(3) as cluster:
        skip_before(cluster.url, 11)
        make(cluster.url, "REPLICATED", 20, num_replicas=3)
        cluster.wait_current("REPLICATED")

        async with direct_get(cluster.url, "REPLICATED") as get:
            for options, found in (
                ({}, [17, 18, 19, 20]),
                ({"up_to_seq": 6}, [3, 4, 5, 6]),
                ({"up_to_seq": 6, "max_bytes": 1}, [3, 4, 5, 6]),
                ({"batch": 2}, [17, 18, 19, 20]),
                ({"max_bytes": 1}, [17, 18, 19, 20]),
            ):
                assert await seqs(get.last_for(["REPLICATED.>"], **options)) == found
            last = get.last_for(["REPLICATED.1", "REPLICATED.none"], up_to_seq=10)
            assert (await seqs(last), last.up_to_seq) == ([9], 10)
            assert await seqs(get.last_for(["REPLICATED.none"])) == []


async def test_subjects_at_most_1024(shared_server: NatsServer) -> None:
    url = shared_server.url
    skip_before(url, 11)
    make(url, "WIDE", 0)
    publish(url, [(f"WIDE.{n}", b"", None) for n in range(1024)])

    async with direct_get(url, "WIDE") as get:
        assert len(await seqs(get.last_for(["WIDE.>"]))) == 1024
    publish(url, [("WIDE.more", b"", None)])

    async with direct_get(url, "WIDE") as get:
        with pytest.raises(TooManySubjectsError, match="narrower subjects") as caught:
            await seqs(get.last_for(["WIDE.>"]))
        assert caught.value.code == 413
        literals = [f"WIDE.{n}" for n in range(1024)]
        assert len(await seqs(get.last_for(literals))) == 1024
        with pytest.raises(TooManySubjectsError, match=r"'WIDE\.0', 'WIDE\.1'") as caught:
            await seqs(get.last_for([*literals, "WIDE.more"]))
        assert caught.value.code == 413
