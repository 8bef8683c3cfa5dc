"""The last messages of many subjects as columns: whichever server responds, those of the leader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_get import last_messages as module
from nats_stream_source.jetstream.direct_get.client import DirectGet
from nats_stream_source.jetstream.direct_get.last_messages import LAST_MESSAGES, last_columns
from tests.support.nats.buckets import create_bucket, delete, purge, put_many, server_version
from tests.support.nats.direct_get import direct_get

pytestmark = pytest.mark.servers


async def read(get: DirectGet, subjects: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The messages that were found, by subject."""
    info = await get.jetstream.stream_info(get.stream)
    found = await last_columns(get.jetstream, info, pa.array(list(subjects), pa.string()))
    found.validate(full=True)
    assert found.schema.equals(LAST_MESSAGES)
    rows = found.to_pylist()
    assert len({row["subject"] for row in rows}) == len(rows)
    return {row.pop("subject"): row for row in rows}


@pytest.fixture
def leader_requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the messages that are requested from leaders."""
    counted: Counter[str] = Counter()
    message = JetStream.message

    async def counting(self: JetStream, stream: str, **request: Any) -> StoredMessage | None:
        counted[stream] += 1
        return await message(self, stream, **request)

    monkeypatch.setattr(JetStream, "message", counting)
    return counted


@pytest.mark.parametrize("way", ["pages", "cut pages", "leader"])
async def test_subjects_of_several_requests(
    shared_server: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    leader_requests: Counter[str],
    way: str,
) -> None:
    """Each half of the keys exists; three are markers."""
    url, name = shared_server.url, f"many{way[:3]}"
    create_bucket(url, name, history=2, allow_direct=way != "leader")
    prefix = f"$KV.{name}."
    put_many(url, name, ((f"k{i}", b"old") for i in range(0, 2500, 2)))
    revisions = put_many(url, name, ((f"k{i}", b"v%d" % i) for i in range(0, 2500, 2)))
    expected = {f"{prefix}k{2 * i}": (seq, b"v%d" % (2 * i)) for i, seq in enumerate(revisions)}
    markers = {f"{prefix}k0": "DEL", f"{prefix}k2": "PURGE"}
    delete(url, name, "k0")
    purge(url, name, "k2")
    if way == "cut pages":
        monkeypatch.setattr(module, "MAX_BYTES", 20_000)
    async with direct_get(url, f"KV_{name}") as get:
        found = await read(get, (f"{prefix}k{i}" for i in range(2500)))
        last = await get.last(f"{prefix}k4")
    assert found.keys() == expected.keys()
    assert {key: row["operation"] for key, row in found.items() if row["operation"] != "PUT"} == (
        markers
    )
    live = {key: row for key, row in found.items() if key not in markers}
    assert {key: (row["sequence"], row["data"]) for key, row in live.items()} == {
        key: entry for key, entry in expected.items() if key not in markers
    }
    time = found[f"{prefix}k4"]["time"]
    assert time.isoformat().removesuffix("+00:00")[:26] == last.time.rstrip("Z")[:26]
    if server_version(url) >= (2, 11):
        assert (leader_requests[f"KV_{name}"] > 0) == (way == "leader")


async def test_missing_subjects_cost_few_requests(
    shared_server: NatsServer, leader_requests: Counter[str]
) -> None:
    url = shared_server.url
    create_bucket(url, "empty")
    create_bucket(url, "one")
    put_many(url, "one", [("k", b"v")])
    async with direct_get(url, "KV_empty") as get:
        assert await read(get, (f"$KV.empty.{i}" for i in range(2000))) == {}
    assert leader_requests.total() == 0
    async with direct_get(url, "KV_one") as get:
        assert await read(get, (f"$KV.one.{i}" for i in range(2000))) == {}
    if server_version(url) >= (2, 11):
        assert leader_requests.total() == 2  # one for each 404


async def test_replies_behind_leader_do_not_count(
    shared_server: NatsServer, leader_requests: Counter[str]
) -> None:
    url = shared_server.url
    create_bucket(url, "lags")
    put_many(url, "lags", [("k", b"v")])
    async with direct_get(url, "KV_lags") as get:
        info = await get.jetstream.stream_info("KV_lags")
        of_leader = replace(info, last_seq=info.last_seq + 1)
        subjects = pa.array(["$KV.lags.k", "$KV.lags.none"])
        found = await last_columns(get.jetstream, of_leader, subjects)
    assert found["sequence"].to_pylist() == [1]
    assert leader_requests["KV_lags"] == 2


async def test_long_subjects(shared_server: NatsServer) -> None:
    """A request does not exceed the payload that a server accepts."""
    url = shared_server.url
    create_bucket(url, "long")
    keys = [f"{i:04}" + "x" * 2000 for i in range(1200)]
    put_many(url, "long", ((key, b"v") for key in keys))
    async with direct_get(url, "KV_long") as get:
        found = await read(get, (f"$KV.long.{key}" for key in keys))
    assert len(found) == 1200
