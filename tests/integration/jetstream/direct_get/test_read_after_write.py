"""Read-after-write, by the test plan of ADR-53 and with real lag; last messages as columns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ApiError,
    MessageNotFoundError,
    MinLastSequenceError,
    RequestTimeoutError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_get import last_messages as module
from nats_stream_source.jetstream.direct_get.client import DirectGet
from nats_stream_source.jetstream.direct_get.last_messages import LAST_MESSAGES, last_columns
from nats_stream_source.jetstream.direct_get.request import send_request
from nats_stream_source.jetstream.leader import leader_message, wait_for_last_seq
from tests.support.nats.buckets import (
    api,
    create_bucket,
    delete,
    fill_bucket,
    publish,
    purge,
    put_many,
    server_version,
    skip_before,
)
from tests.support.nats.cluster import Cluster
from tests.support.nats.direct_get import direct_get, outsider, pause_a_responder, seqs
from tests.support.nats.streams import create_stream, stream_state
from tests.support.wait import wait_until

pytestmark = pytest.mark.servers


Read = Callable[..., Any]
"""A read of a :class:`DirectGet`, with options."""


def make(url: str, name: str, count: int = 3, *, allow_direct: bool = True, **config: Any) -> None:
    create_stream(url, name, allow_direct=allow_direct, **config)
    publish(url, [(f"{name}.a", b"v%d" % n, None) for n in range(1, count + 1)])


async def _last_columns(get: DirectGet) -> list[int]:
    info = await get.jetstream.stream_info(get.stream)
    found = await last_columns(get.jetstream, info, pa.array([f"{get.stream}.a"]))
    return [int(seq) for seq in found["sequence"].to_pylist()]


async def _leader(get: DirectGet, **more: Any) -> StoredMessage:
    message = await leader_message(get.jetstream, get.stream, seq=3, **more)
    assert message is not None
    return message


READS: dict[str, tuple[Read, list[int]]] = {
    "get": (lambda get, **more: get.get(2, **more), [2]),
    "last": (lambda get, **more: get.last(f"{get.stream}.a", **more), [4]),
    "next": (lambda get, **more: get.next(f"{get.stream}.*", **more), [1]),
    "batch": (lambda get, **more: get.batch(**more), [1, 2, 3, 4]),
    "last_for": (lambda get, **more: get.last_for([f"{get.stream}.>"], **more), [4]),
    "message get": (_leader, [3]),
}


async def _found(read: Read, get: DirectGet, timeout: float) -> list[int]:
    """The sequences that a read finds once the stream has sequence 4."""
    found = read(get, min_last_seq=4, timeout=timeout)
    return await seqs(found) if hasattr(found, "__aiter__") else [(await found).seq]


@pytest.mark.parametrize("allow_direct", [True, False], ids=["direct", "leader"])
@pytest.mark.parametrize("name", READS)
async def test_sequence_too_high_until_written(url: str, name: str, allow_direct: bool) -> None:
    """ADR-53, "Note about testing": the error; then the publish, and the read succeeds."""
    if name in ("batch", "last_for"):
        skip_before(url, 11)
    read, expected = READS[name]
    stream = f"PLAN_{name.replace(' ', '_')}_{allow_direct}"
    make(url, stream, allow_direct=allow_direct)

    async with direct_get(url, stream) as get:
        with pytest.raises(MinLastSequenceError) as caught:
            await _found(read, get, 0.3)
        assert (caught.value.code, caught.value.err_code) == (412, 10180)
        waiting = asyncio.ensure_future(_found(read, get, 20.0))
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
        await get.jetstream.connection.client.request(f"{stream}.a", b"v4")
        assert await waiting == expected


async def test_missing_message_is_reported_after_sequence(url: str) -> None:
    make(url, "GONE")

    async with direct_get(url, "GONE") as get:
        with pytest.raises(MessageNotFoundError):
            await get.last("GONE.x", min_last_seq=3)
        with pytest.raises(MinLastSequenceError):
            await get.last("GONE.x", min_last_seq=4, timeout=0.3)


async def test_wait_for_last_seq_fails_without_stream_or_response(nats_server: NatsServer) -> None:
    make(nats_server.url, "DEAF")

    async with direct_get(nats_server.url, "DEAF") as get:
        jetstream = get.jetstream
        assert (await wait_for_last_seq(jetstream, "DEAF", 3)).last_seq == 3
        with pytest.raises(StreamNotFoundError):
            await wait_for_last_seq(jetstream, "NOWHERE", 1)
        nats_server.pause()
        try:
            with pytest.raises(RequestTimeoutError):
                await wait_for_last_seq(jetstream, "DEAF", 3, timeout=0.2)
        finally:
            nats_server.resume()
        assert (await wait_for_last_seq(jetstream, "DEAF", 3)).last_seq == 3


async def test_min_last_seq_is_ignored_by_released_servers(url: str) -> None:
    """Direct Get ignores it, message get ignores or refuses it: this is why it is not relied on."""
    make(url, "FIELD")

    async with direct_get(url, "FIELD") as get:
        connection = get.jetstream.connection
        reply = await send_request(
            connection, "DIRECT.GET.FIELD", {"seq": 1, "min_last_seq": 1 << 62}
        )
        assert reply.page.stream_seq.tolist() == [1]
        message = get.jetstream.message("FIELD", seq=1, min_last_seq=1 << 62)
        if server_version(url) < (2, 12):
            assert await message
        else:
            with pytest.raises(ApiError, match="10025"):
                await message


async def test_lagging_follower_is_never_read_early() -> None:
    """A real R3 stream: a paused follower resumes and responds with its old state."""
    with Cluster(4) as cluster:
        make(cluster.url, "LAG", num_replicas=3)
        cluster.wait_current("LAG")
        asked, leader = outsider(cluster, "LAG"), cluster.leader_of("LAG")
        batches = server_version(leader.url) >= (2, 11)
        for round_ in range(3):
            follower = await pause_a_responder(cluster, "LAG")
            (least,) = publish(leader.url, [("LAG.a", b"new%d" % round_, None)])
            async with direct_get(asked.url, "LAG") as get:
                reads = [get.last("LAG.a", min_last_seq=least) for _ in range(10)]
                columns = [_last_columns(get) for _ in range(10)]
                gathered, of_columns = asyncio.gather(*reads), asyncio.gather(*columns)
                follower.resume()
                assert {one.seq for one in await gathered} == {least}
                assert await of_columns == [[least]] * 10
                wild = [await get.last("LAG.*", min_last_seq=least) for _ in range(10)]
                assert {one.seq for one in wild} == {least}
                if batches:
                    later = {"min_last_seq": least, "timeout": 5.0}
                    assert await seqs(get.batch(**later)) == list(range(1, least + 1))
                    assert await seqs(get.last_for(["LAG.>"], **later)) == [least]
            cluster.wait_current("LAG")


async def test_mirror_response_does_not_prove_freshness(nats_server: NatsServer) -> None:
    """A mirror with lower limits responds to Direct Gets; its responses are ignored."""
    url = nats_server.url
    make(url, "SRC", 3)
    stuck = {
        "name": "STUCK",
        "mirror": {"name": "SRC"},
        "allow_direct": True,
        "mirror_direct": True,
        "max_msgs": 3,
        "discard": "new",
    }
    api(url, "STREAM.CREATE.STUCK", stuck)
    wait_until(lambda: bool(stream_state(url, "STUCK")["messages"] == 3), "the mirror has 3")
    (least,) = publish(url, [("SRC.a", b"new", None)])

    async with direct_get(url, "SRC") as get:
        connection = get.jetstream.connection
        raw = [
            await send_request(connection, "DIRECT.GET.SRC", {"last_by_subj": "SRC.a"})
            for _ in range(60)
        ]
        assert {int(reply.page.stream_seq[0]) for reply in raw} == {3, 4}  # the mirror is behind
        found = {(await get.last("SRC.a", min_last_seq=least)).seq for _ in range(60)}
        assert found == {least}


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
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    leader_requests: Counter[str],
    way: str,
) -> None:
    """Each half of the keys exists; three are markers."""
    name = f"many{way[:3]}"
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


async def test_missing_subjects_cost_few_requests(url: str, leader_requests: Counter[str]) -> None:
    create_bucket(url, "empty")
    fill_bucket(url, "one", [("k", b"v")])
    async with direct_get(url, "KV_empty") as get:
        assert await read(get, (f"$KV.empty.{i}" for i in range(2000))) == {}
    assert leader_requests.total() == 0
    async with direct_get(url, "KV_one") as get:
        assert await read(get, (f"$KV.one.{i}" for i in range(2000))) == {}
    if server_version(url) >= (2, 11):
        assert leader_requests.total() == 2  # one for each 404


async def test_replies_behind_leader_do_not_count(url: str, leader_requests: Counter[str]) -> None:
    fill_bucket(url, "lags", [("k", b"v")])
    async with direct_get(url, "KV_lags") as get:
        info = await get.jetstream.stream_info("KV_lags")
        of_leader = replace(info, last_seq=info.last_seq + 1)
        subjects = pa.array(["$KV.lags.k", "$KV.lags.none"])
        found = await last_columns(get.jetstream, of_leader, subjects)
    assert found["sequence"].to_pylist() == [1]
    assert leader_requests["KV_lags"] == 2


async def test_long_subjects(url: str) -> None:
    """A request does not exceed the payload that a server accepts."""
    create_bucket(url, "long")
    keys = [f"{i:04}" + "x" * 2000 for i in range(1200)]
    put_many(url, "long", ((key, b"v") for key in keys))
    async with direct_get(url, "KV_long") as get:
        found = await read(get, (f"$KV.long.{key}" for key in keys))
    assert len(found) == 1200
