"""Direct Get against a real server: each form of the request, and each answer (ADR-31)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from buckets import api, consumers, create_bucket, publish, with_client
from direct import direct, seqs, version
from nats.aio.client import Client
from topology import with_user

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    BadRequestError,
    ConfigurationError,
    DataLossError,
    MessageNotFoundError,
    PermissionDeniedError,
    ServerTooOldError,
    StreamNotFoundError,
    TooManySubjectsError,
)
from nats_stream_source.jetstream.api import StoredMessage
from nats_stream_source.jetstream.direct_get import DirectGet
from nats_stream_source.jetstream.direct_request import ask
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.wire.columns import payloads

pytestmark = pytest.mark.servers


async def listed(messages: AsyncIterator[StoredMessage]) -> list[StoredMessage]:
    return [message async for message in messages]


def make(url: str, name: str, count: int = 10, **config: Any) -> None:
    """A stream with ``count`` messages: ``<name>.<n % 4>``, payload ``v<n>``, from n = 1."""
    wanted = {"name": name, "subjects": [f"{name}.>"], "allow_direct": True, **config}
    api(url, f"STREAM.CREATE.{name}", wanted)
    publish(url, [(f"{name}.{n % 4}", b"v%d" % n, None) for n in range(1, count + 1)])


def skip_before(url: str, minor: int) -> None:
    if version(url) < (2, minor):
        pytest.skip(f"needs nats-server 2.{minor}")


# One message


def test_single_messages(shared_server: NatsServer) -> None:
    url = shared_server.url
    make(url, "ONE")

    async def work(get: DirectGet) -> list[StoredMessage]:
        return [
            await get.get(3),
            await get.last("ONE.2"),
            await get.last("ONE.*"),
            await get.next("ONE.1", seq=2),
            await get.next(seq=10),
        ]

    found = direct(url, "ONE", work)
    assert [(one.subject, one.seq, one.data) for one in found] == [
        ("ONE.3", 3, b"v3"),
        ("ONE.2", 10, b"v10"),
        ("ONE.2", 10, b"v10"),
        ("ONE.1", 5, b"v5"),
        ("ONE.2", 10, b"v10"),
    ]
    assert [one.headers for one in found] == [b""] * 5


@pytest.mark.parametrize("allow_direct", [True, False], ids=["direct", "leader"])
def test_what_is_not_there(shared_server: NatsServer, allow_direct: bool) -> None:
    name = f"NONE{allow_direct}"
    make(shared_server.url, name, allow_direct=allow_direct)

    async def work(get: DirectGet) -> None:
        for missing in (
            lambda: get.get(11),
            lambda: get.last(f"{name}.9"),
            lambda: get.last("other.*"),
            lambda: get.next(f"{name}.1", seq=10),
        ):
            with pytest.raises(MessageNotFoundError) as caught:
                await missing()
            assert caught.value.code == 404
        assert await seqs(get.batch("other.>")) == []
        for bad in (lambda: get.get(0), lambda: get.next(seq=0), lambda: get.last("a..b")):
            with pytest.raises(BadRequestError):
                await bad()

    direct(shared_server.url, name, work)


def test_a_stream_that_is_not_there(shared_server: NatsServer) -> None:
    async def work(get: DirectGet) -> None:
        for call in (get.get(1), get.last("x"), seqs(get.batch()), seqs(get.last_for(["x"]))):
            with pytest.raises(StreamNotFoundError):
                await call

    direct(shared_server.url, "NOWHERE", work)


@pytest.mark.parametrize("allow_direct", [True, False], ids=["direct", "leader"])
def test_from_a_time(shared_server: NatsServer, allow_direct: bool) -> None:
    url, name = shared_server.url, f"TIME{allow_direct}"
    make(url, name, allow_direct=allow_direct)

    async def work(get: DirectGet) -> None:
        fifth = await get.get(5)
        moment = datetime.fromtimestamp(nanoseconds(fifth.time) // 10**9, timezone.utc)
        if version(url) < (2, 11):
            with pytest.raises(ServerTooOldError, match=r"2\.11"):
                await get.next(start_time=moment + timedelta(days=1))
            return
        assert (await get.next(start_time=fifth.time)).seq == 5
        assert (await get.next(start_time=nanoseconds(fifth.time) + 1)).seq == 6
        assert (await get.next(f"{name}.1", start_time=fifth.time)).seq == 5
        assert (await get.next(f"{name}.0", start_time=fifth.time)).seq == 8
        assert (await get.next(start_time=moment - timedelta(days=1))).seq == 1
        with pytest.raises(MessageNotFoundError):
            await get.next(start_time=moment + timedelta(days=1))
        assert await seqs(get.batch(start_time=fifth.time)) == [5, 6, 7, 8, 9, 10]
        assert await seqs(get.batch(f"{name}.1", start_time=fifth.time, batch=1)) == [5, 9]
        assert await seqs(get.batch(start_time=fifth.time, max_bytes=1)) == [5, 6, 7, 8, 9, 10]
        assert await seqs(get.batch(start_time=moment + timedelta(days=1))) == []
        with pytest.raises(ConfigurationError, match="time zone"):
            await get.next(start_time=datetime(2026, 1, 1))

    direct(url, name, work)


def test_a_publishers_headers_are_data(shared_server: NatsServer) -> None:
    """Whatever a publisher writes, also what looks like the server's own words (DESIGN 3.17)."""
    url = shared_server.url
    make(url, "HDR", count=0)
    blocks = [
        b"NATS/1.0\r\nStatus: 404\r\nNats-Sequence: 77\r\nNats-Stream: OTHER\r\n\r\n",
        b"NATS/1.0\r\na: 1\r\na: 2\r\n\r\n",
        b"NATS/1.0\r\nStatus: 503\r\n\r\n",
        b"NATS/1.0 404 Message Not Found\r\nx: y\r\n\r\n",
    ]

    async def put(url: str) -> None:
        port = int(url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b'CONNECT {"headers": true, "verbose": false}\r\n')
        for block in blocks:
            sizes = b"%d %d" % (len(block), len(block) + 2)
            writer.write(b"HPUB HDR.a " + sizes + b"\r\n" + block + b"hi\r\n")
        writer.write(b"PING\r\n")
        await writer.drain()
        while b"PONG" not in await reader.readline():
            pass
        writer.close()
        await writer.wait_closed()

    asyncio.run(put(url))

    async def work(get: DirectGet) -> None:
        one_by_one = [await get.get(n) for n in range(1, 5)]
        assert [one.headers for one in one_by_one[:3]] == blocks[:3]
        assert one_by_one[3].data == b"hi"  # servers take the status line out
        assert [one.seq for one in one_by_one] == [1, 2, 3, 4]
        assert {one.subject for one in one_by_one} == {"HDR.a"}
        assert await get.last("HDR.a") == one_by_one[3]
        leaders = [await get.jetstream.message("HDR", seq=n) for n in range(1, 5)]
        assert one_by_one == leaders
        if version(url) >= (2, 11):
            assert await listed(get.batch()) == one_by_one
            assert await listed(get.last_for(["HDR.a"])) == [one_by_one[3]]

    direct(url, "HDR", work)


def test_the_subject_appended_form_is_what_a_restricted_user_may_ask(tmp_path: Path) -> None:
    config = tmp_path / "server.conf"
    config.write_text(
        """
        authorization { users: [
            { user: all, password: all }
            { user: one, password: one, permissions: {
                publish: ["$JS.API.DIRECT.GET.RES.RES.1", "$JS.API.DIRECT.GET.RES.none"]
                subscribe: "_INBOX.>" } }
        ] }
        """
    )

    async def work(get: DirectGet) -> None:
        assert (await get.last("RES.1")).seq == 9
        with pytest.raises(PermissionDeniedError):
            await get.last("RES.2")
        with pytest.raises(PermissionDeniedError):
            await get.last("RES.*")
        with pytest.raises(MessageNotFoundError, match="leader was not asked"):
            await get.last("none")

    with NatsServer(config=config) as server:
        make(with_user(server.url, "all"), "RES")
        direct(with_user(server.url, "one"), "RES", work)


def test_requests_that_cannot_be(shared_server: NatsServer) -> None:
    """408, as the server says it: for a body in the subject-appended form and other nonsense."""
    url = shared_server.url
    make(url, "BAD")

    async def work(get: DirectGet) -> dict[str, int | None]:
        connection = get.jetstream.connection
        asked = {
            "appended": ("DIRECT.GET.BAD.BAD.1", {"seq": 1, "next_by_subj": "BAD.1"}),
            "both": ("DIRECT.GET.BAD", {"seq": 1, "last_by_subj": "BAD.1"}),
            "nothing": ("DIRECT.GET.BAD", {}),
            "no body": ("DIRECT.GET.BAD", None),
        }
        return {name: (await ask(connection, *one)).code for name, one in asked.items()}

    assert set(direct(url, "BAD", work).values()) == {408}

    async def refused(get: DirectGet) -> None:
        for call in (
            lambda: seqs(get.batch(seq=1, start_time="2026-01-01T00:00:00Z")),
            lambda: seqs(get.batch(seq=0)),
            lambda: seqs(get.batch(batch=0)),
            lambda: seqs(get.batch(max_bytes=0)),
            lambda: seqs(get.last_for([])),
            lambda: seqs(get.last_for(["a"], up_to_seq=1, up_to_time=0)),
            lambda: seqs(get.last_for(["a"], up_to_seq=0)),
        ):
            with pytest.raises(BadRequestError):
                await call()

    direct(url, "BAD", refused)


# Batches


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "what is there"])
def test_batches(shared_server: NatsServer, complete: bool) -> None:
    url, name = shared_server.url, f"BATCH{complete}"
    skip_before(url, 11)
    make(url, name, 50)
    api(url, f"STREAM.MSG.DELETE.{name}", {"seq": 7})
    api(url, f"STREAM.MSG.DELETE.{name}", {"seq": 50})
    whole = [n for n in range(1, 50) if n != 7]

    async def work(get: DirectGet) -> None:
        async def read(subject: str = ">", **options: Any) -> list[int]:
            return await seqs(get.batch(subject, complete=complete, **options))

        assert await read() == whole
        assert await read(batch=1) == whole
        assert await read(batch=8) == whole
        assert await read(f"{name}.>", batch=7) == whole
        assert await read(f"{name}.1", batch=5) == [n for n in whole if n % 4 == 1]
        assert await read(seq=40) == [n for n in whole if n >= 40]
        assert await read(seq=7, limit=3, batch=2) == [8, 9, 10]
        assert await read(limit=0) == []
        assert await read(limit=12, batch=6) == whole[:12]
        assert await read(seq=49) == [49]
        assert await read(seq=50) == []
        assert await read(seq=5000) == []
        assert await read(max_bytes=1) == whole  # one message a page
        assert await read(max_bytes=100) == whole

    direct(url, name, work)


def test_an_empty_stream(shared_server: NatsServer) -> None:
    make(shared_server.url, "EMPTY", 0)

    async def work(get: DirectGet) -> None:
        assert await seqs(get.batch()) == []
        if version(shared_server.url) >= (2, 11):
            assert await seqs(get.batch(complete=False)) == []
            assert await seqs(get.last_for(["EMPTY.a"])) == []
            assert await seqs(get.last_for(["EMPTY.>"], complete=False)) == []

    direct(shared_server.url, "EMPTY", work)


def test_pages_are_as_large_as_asked_and_give_columns(shared_server: NatsServer) -> None:
    url = shared_server.url
    skip_before(url, 11)
    make(url, "PAGES", 20)

    async def work(get: DirectGet) -> None:
        pages = [page async for page in get.pages(batch=8)]
        assert [len(page) for page in pages] == [8, 8, 4]
        assert pages[1].sequences.tolist() == list(range(9, 17))
        assert payloads(pages[1].frames).to_pylist() == [b"v%d" % n for n in range(9, 17)]
        assert [page.last_seq async for page in get.pages(max_bytes=1, limit=3)] == [1, 2, 3]

    direct(url, "PAGES", work)


def test_a_batch_is_what_was_there_when_it_began(shared_server: NatsServer) -> None:
    """Under steady writes it ends, and shows nothing of later."""
    url = shared_server.url
    skip_before(url, 11)
    make(url, "STEADY", 20)

    async def work(get: DirectGet) -> list[int]:
        found = []
        async for message in get.batch(batch=5):
            found.append(message.seq)
            await get.jetstream.connection.client.request("STEADY.new", b"")
        return found

    assert direct(url, "STEADY", work) == list(range(1, 21))


def test_where_direct_get_is_off_a_consumer_reads(shared_server: NatsServer) -> None:
    url = shared_server.url
    make(url, "OFF", 30, allow_direct=False)

    async def work(get: DirectGet) -> None:
        assert (await get.get(3)).data == b"v3"
        assert "leader only" in repr(get)
        assert (await get.last("OFF.1")).seq == 29
        assert (await get.next("OFF.1", seq=2)).seq == 5
        whole = await listed(get.batch(batch=7))
        assert whole == [await get.jetstream.message("OFF", seq=n) for n in range(1, 31)]
        assert await seqs(get.batch("OFF.2", seq=9, limit=2)) == [10, 14]
        assert await seqs(get.batch(complete=False, seq=29)) == [29, 30]
        assert await seqs(get.last_for(["OFF.1", "OFF.*", "OFF.7"])) == [27, 28, 29, 30]
        assert await seqs(get.last_for(["OFF.*"], up_to_seq=4)) == [1, 2, 3, 4]
        assert await seqs(get.last_for(["OFF.*"], complete=False)) == [27, 28, 29, 30]

    direct(url, "OFF", work)
    assert api(url, "CONSUMER.NAMES.OFF").get("consumers") in (None, [])


def test_a_server_without_batches(shared_server: NatsServer) -> None:
    url = shared_server.url
    if version(url) >= (2, 11):
        pytest.skip("this server has batches")
    make(url, "OLD")

    async def work(get: DirectGet) -> None:
        for call in (
            seqs(get.batch()),
            seqs(get.batch(complete=False)),
            seqs(get.last_for(["OLD.1"])),
            seqs(get.last_for(["OLD.1"], complete=False)),
        ):
            with pytest.raises(ServerTooOldError, match=r"2\.11"):
                await call

    direct(url, "OLD", work)


# Many subjects


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "what is there"])
def test_last_for(shared_server: NatsServer, complete: bool) -> None:
    url, name = shared_server.url, f"MULTI{complete}"
    skip_before(url, 11)
    make(url, name, 20)

    async def work(get: DirectGet) -> None:
        async def read(*subjects: str, **options: Any) -> list[int]:
            subjects = tuple(f"{name}.{one}" for one in subjects)
            return await seqs(get.last_for(subjects, complete=complete, **options))

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
        assert await seqs(get.last_for(f"{name}.1", complete=complete)) == [17]

    direct(url, name, work)


@pytest.mark.parametrize("complete", [True, False], ids=["complete", "what is there"])
def test_pages_of_one_point_in_time(shared_server: NatsServer, complete: bool) -> None:
    """What is written between two pages does not show in the later one."""
    url, name = shared_server.url, f"POINT{complete}"
    skip_before(url, 11)
    make(url, name, 8)

    async def work(get: DirectGet) -> list[bytes]:
        found = []
        async for message in get.last_for([f"{name}.>"], batch=1, complete=complete):
            found.append(message.data)
            for n in range(4):
                await get.jetstream.connection.client.request(f"{name}.{n}", b"new")
        return found

    assert direct(url, name, work) == [b"v5", b"v6", b"v7", b"v8"]


def test_a_key_overwritten_between_two_pages_is_not_lost(shared_server: NatsServer) -> None:
    """A bucket with history 1 forgets the value of the point in time: the newer one comes."""
    url = shared_server.url
    skip_before(url, 11)
    create_bucket(url, "pages", history=1)
    publish(url, [(f"$KV.pages.{key}", b"old", None) for key in "abcd"])

    async def work(get: DirectGet) -> dict[str, bytes]:
        found = {}
        async for message in get.last_for(["$KV.pages.>"], batch=1):
            if not found:
                await get.jetstream.connection.client.request("$KV.pages.c", b"new")
            found[message.subject[-1]] = message.data
        return found

    assert direct(url, "KV_pages", work) == {"a": b"old", "b": b"old", "c": b"new", "d": b"old"}


def test_at_most_1024_subjects(shared_server: NatsServer) -> None:
    url = shared_server.url
    skip_before(url, 11)
    make(url, "WIDE", 0)
    publish(url, [(f"WIDE.{n}", b"", None) for n in range(1024)])

    async def count(get: DirectGet) -> int:
        return len(await seqs(get.last_for(["WIDE.>"])))

    assert direct(url, "WIDE", count) == 1024
    publish(url, [("WIDE.more", b"", None)])

    async def refused(get: DirectGet) -> None:
        for complete in (True, False):
            with pytest.raises(TooManySubjectsError, match="narrower subjects") as caught:
                await seqs(get.last_for(["WIDE.>"], complete=complete))
            assert caught.value.code == 413

    direct(url, "WIDE", refused)


# Mirrors


def test_a_mirror_that_holds_a_part_never_speaks_for_the_stream(
    shared_server: NatsServer,
) -> None:
    url = shared_server.url
    create_bucket(url, "whole", history=5)
    publish(url, [(f"$KV.whole.{'ab'[n % 2]}.{n % 10}", b"v%d" % n, None) for n in range(100)])
    part = {
        "name": "PART",
        "mirror": {"name": "KV_whole", "filter_subject": "$KV.whole.a.>"},
        "allow_direct": True,
        "mirror_direct": True,
    }
    late = {
        "name": "LATE",
        "mirror": {"name": "KV_whole", "opt_start_seq": 71},
        "allow_direct": True,
        "mirror_direct": True,
    }
    for mirror, count in ((part, 25), (late, 30)):
        api(url, f"STREAM.CREATE.{mirror['name']}", mirror)
        for _ in range(500):
            if api(url, f"STREAM.INFO.{mirror['name']}")["state"]["messages"] == count:
                break
        assert api(url, f"STREAM.INFO.{mirror['name']}")["state"]["messages"] == count

    async def responders(get: DirectGet) -> set[str]:
        asked = [
            await ask(get.jetstream.connection, "DIRECT.GET.KV_whole", {"seq": 99})
            for _ in range(100)
        ]
        return {reply.page.answers[0].stream for reply in asked if reply.page}

    assert direct(url, "KV_whole", responders) == {"KV_whole", "PART", "LATE"}

    async def singles(get: DirectGet) -> set[tuple[int, ...]]:
        return {
            (
                (await get.get(52)).seq,
                (await get.last("$KV.whole.b.1")).seq,
                (await get.last("$KV.whole.>")).seq,
                (await get.last("$KV.whole.*.3")).seq,
                (await get.next("$KV.whole.>", seq=60)).seq,
                (await get.next("$KV.whole.b.*", seq=61)).seq,
            )
            for _ in range(100)
        }

    assert direct(url, "KV_whole", singles) == {(52, 92, 100, 94, 60, 62)}
    if version(url) < (2, 11):
        return

    async def batches(get: DirectGet) -> None:
        for n in range(30):
            assert await seqs(get.batch(batch=40)) == list(range(51, 101))
            assert await seqs(get.batch("$KV.whole.b.>", seq=90)) == list(range(90, 101, 2))
            if n < 10:
                assert await seqs(get.last_for(["$KV.whole.>"])) == list(range(91, 101))
                point = await seqs(get.last_for(["$KV.whole.>"], up_to_seq=70, batch=4))
                assert point == list(range(61, 71))

    direct(url, "KV_whole", batches)
    assert consumers(url, "whole") == []


def test_without_completeness_a_mirror_may_answer(shared_server: NatsServer) -> None:
    """The other half of the bargain: what is near by, as far as it goes."""
    url = shared_server.url
    skip_before(url, 11)
    make(url, "UP", 20)
    mirror = {
        "name": "DOWN",
        "mirror": {"name": "UP", "opt_start_seq": 11},
        "allow_direct": True,
        "mirror_direct": True,
    }
    api(url, "STREAM.CREATE.DOWN", mirror)
    for _ in range(500):
        if api(url, "STREAM.INFO.DOWN")["state"]["messages"] == 10:
            break

    async def work(get: DirectGet) -> set[tuple[int, ...]]:
        return {tuple(await seqs(get.batch(complete=False))) for _ in range(60)}

    assert direct(url, "UP", work) == {tuple(range(1, 21)), tuple(range(11, 21))}


def test_many_at_once_on_one_connection(shared_server: NatsServer) -> None:
    url = shared_server.url
    skip_before(url, 11)
    make(url, "SHARED", 100)

    async def work(get: DirectGet) -> None:
        singles = asyncio.gather(*(get.get(n) for n in range(1, 101)))
        batches = asyncio.gather(*(seqs(get.batch(batch=9, seq=n)) for n in range(1, 21)))
        assert [one.seq for one in await singles] == list(range(1, 101))
        assert await batches == [list(range(n, 101)) for n in range(1, 21)]
        # Nothing is left subscribed.
        assert len(get.jetstream.connection.client._subs) <= 1

    direct(url, "SHARED", work)


def test_what_the_server_sends(shared_server: NatsServer) -> None:
    """The header fields that all of this stands on."""
    url = shared_server.url
    make(url, "FIELDS", 6)

    def raw(request: dict[str, Any], replies: int) -> list[dict[str, str]]:
        async def work(client: Client) -> list[dict[str, str]]:
            inbox = client.new_inbox()
            sub = await client.subscribe(inbox)
            payload = json.dumps(request).encode()
            await client.publish("$JS.API.DIRECT.GET.FIELDS", payload, reply=inbox)
            return [dict((await sub.next_msg(5)).headers or {}) for _ in range(replies)]

        return with_client(url, work)

    (single,) = raw({"seq": 2}, 1)
    assert {"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp"} == set(single)
    if version(url) < (2, 11):
        (old,) = raw({"seq": 1, "batch": 2, "next_by_subj": "FIELDS.>"}, 1)
        assert "Nats-Num-Pending" not in old
        return
    first, second, end = raw({"seq": 1, "batch": 2, "next_by_subj": "FIELDS.>"}, 3)
    assert (first["Nats-Last-Sequence"], second["Nats-Last-Sequence"]) == ("0", "1")
    assert (end["Status"], end["Nats-Num-Pending"], end["Nats-Last-Sequence"]) == ("204", "4", "2")
    *_, last, end = raw({"multi_last": ["FIELDS.>"], "batch": 2}, 3)
    assert (last["Nats-Num-Pending"], end["Nats-UpTo-Sequence"]) == ("2", "6")


def test_allow_direct_is_for_who_makes_the_stream_to_ask(shared_server: NatsServer) -> None:
    """No released server sets it because of ``max_msgs_per_subject``; where off, 503 at once."""
    url = shared_server.url
    for name, more in (("ASKED", {"allow_direct": True}), ("UNASKED", {})):
        wanted = {"name": name, "subjects": [f"{name}.>"], "max_msgs_per_subject": 1, **more}
        config = api(url, f"STREAM.CREATE.{name}", wanted)["config"]
        assert bool(config.get("allow_direct")) == bool(more)

    async def code(get: DirectGet) -> int | None:
        return (await ask(get.jetstream.connection, "DIRECT.GET.UNASKED", {"seq": 1})).code

    assert direct(url, "UNASKED", code) == 503


@pytest.mark.parametrize("delete", [True, False], ids=["made again", "deleted"])
def test_a_stream_that_goes_away_between_two_pages(shared_server: NatsServer, delete: bool) -> None:
    """What is read ends with an error, not as if it were whole."""
    url, name = shared_server.url, f"AWAY{delete}"
    skip_before(url, 11)

    async def work(get: DirectGet) -> None:
        for messages in (get.batch(batch=4), get.last_for([f"{name}.>"], batch=1)):
            make(url, name, 8)
            found = [await messages.__anext__()]
            api(url, f"STREAM.DELETE.{name}")
            if delete:
                make(url, name, 2)
            with pytest.raises(DataLossError if delete else StreamNotFoundError):
                found += await listed(messages)
            assert len(found) < 8
            if delete:
                api(url, f"STREAM.DELETE.{name}")

    direct(url, name, work, request_timeout=1.0)
