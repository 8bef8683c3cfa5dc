"""Direct Get of one message: each form of the request, and each response (ADR-31)."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    BadRequestError,
    ConfigurationError,
    InvalidNameError,
    MessageNotFoundError,
    PermissionDeniedError,
    ServerTooOldError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.direct_get.client import DirectGet
from nats_stream_source.jetstream.direct_get.request import send_request
from nats_stream_source.jetstream.times import nanoseconds
from tests.integration.jetstream.direct_get.streams import listed, make
from tests.support.nats.buckets import server_version
from tests.support.nats.direct_get import direct_get, seqs
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import with_user

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("allow_direct", [True, False], ids=["direct", "leader"])
async def test_message_missing(shared_server: NatsServer, allow_direct: bool) -> None:
    name = f"NONE{allow_direct}"
    make(shared_server.url, name, allow_direct=allow_direct)

    async with direct_get(shared_server.url, name) as get:
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


async def test_stream_missing(shared_server: NatsServer) -> None:
    async with direct_get(shared_server.url, "NOWHERE") as get:
        for call in (get.get(1), get.last("x"), seqs(get.batch()), seqs(get.last_for(["x"]))):
            with pytest.raises(StreamNotFoundError):
                await call


@pytest.mark.parametrize("allow_direct", [True, False], ids=["direct", "leader"])
async def test_message_from_time(shared_server: NatsServer, allow_direct: bool) -> None:
    url, name = shared_server.url, f"TIME{allow_direct}"
    make(url, name, allow_direct=allow_direct)

    async with direct_get(url, name) as get:
        fifth = await get.get(5)
        moment = datetime.fromtimestamp(nanoseconds(fifth.time) // 10**9, timezone.utc)
        if server_version(url) < (2, 11):
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


async def test_publisher_headers_are_data(shared_server: NatsServer) -> None:
    """Messages of a publisher, also those that resemble headers of the server.

    See docs/internals/measurements.md, Servers 17.
    """
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

    await put(url)

    async with direct_get(url, "HDR") as get:
        one_by_one = [await get.get(n) for n in range(1, 5)]
        assert [one.headers for one in one_by_one[:3]] == blocks[:3]
        assert one_by_one[3].data == b"hi"  # servers take the status line out
        assert [one.seq for one in one_by_one] == [1, 2, 3, 4]
        assert {one.subject for one in one_by_one} == {"HDR.a"}
        assert await get.last("HDR.a") == one_by_one[3]
        leaders = [await get.jetstream.message("HDR", seq=n) for n in range(1, 5)]
        assert one_by_one == leaders
        if server_version(url) >= (2, 11):
            assert await listed(get.batch()) == one_by_one
            assert await listed(get.last_for(["HDR.a"])) == [one_by_one[3]]


async def test_subject_appended_form_for_restricted_user(tmp_path: Path) -> None:
    config = tmp_path / "server.conf"
    config.write_text(
        """
        authorization { users: [
            { user: all, password: all }
            { user: one, password: one, permissions: {
                publish: ["$JS.API.DIRECT.GET.RES.RES.1", "$JS.API.DIRECT.GET.RES.none"
                          "$JS.API.STREAM.INFO.OFF"]
                subscribe: "_INBOX.>" } }
        ] }
        """
    )

    with NatsServer(config=config) as server:
        make(with_user(server.url, "all"), "RES")
        async with direct_get(with_user(server.url, "one"), "RES") as get:
            assert (await get.last("RES.1")).seq == 9
            with pytest.raises(
                PermissionDeniedError, match=r"'\$JS\.API\.DIRECT\.GET\.RES\.RES\.2'"
            ):
                await get.last("RES.2")
            with pytest.raises(PermissionDeniedError):
                await get.last("RES.*")
            with pytest.raises(MessageNotFoundError, match="leader could not be queried"):
                await get.last("none")
        make(with_user(server.url, "all"), "OFF", allow_direct=False)
        async with direct_get(with_user(server.url, "one"), "OFF") as get:
            # There the permission for a Direct Get would not help.
            with pytest.raises(PermissionDeniedError, match=r"STREAM\.MSG\.GET\.OFF"):
                await get.last("OFF.1")


async def test_requests_that_cannot_be(shared_server: NatsServer) -> None:
    """408, as the server reports it: for a body in the subject-appended form and other nonsense."""
    url = shared_server.url
    make(url, "BAD")

    async with direct_get(url, "BAD") as get:
        connection = get.jetstream.connection
        asked = {
            "appended": ("DIRECT.GET.BAD.BAD.1", {"seq": 1, "next_by_subj": "BAD.1"}),
            "both": ("DIRECT.GET.BAD", {"seq": 1, "last_by_subj": "BAD.1"}),
            "nothing": ("DIRECT.GET.BAD", {}),
            "no body": ("DIRECT.GET.BAD", None),
        }
        assert set(
            {
                name: (await send_request(connection, *one)).code for name, one in asked.items()
            }.values()
        ) == {408}


async def test_arguments_are_refused_when_called(shared_server: NatsServer) -> None:
    """No request is sent: a server would report no match, or name another field."""
    make(shared_server.url, "ARGS", 1)
    async with direct_get(shared_server.url, "ARGS") as get:
        untyped: Any = get
        for subject in ("a b", "a.>.b", "a*", "a..b", "", ".a", None, 5, b"a"):
            for one in (untyped.last, untyped.next):
                with pytest.raises(BadRequestError, match="invalid subject"):
                    await one(subject)
            for many in (untyped.batch, untyped.pages, lambda bad: untyped.last_for(["a", bad])):
                with pytest.raises(BadRequestError, match="invalid subject"):
                    many(subject)
        for number in ("1", 1.0, True, -1, 2**64):
            with pytest.raises(BadRequestError, match="'seq'"):
                await untyped.get(number)
            for name in ("seq", "batch", "max_bytes", "limit", "min_last_seq"):
                with pytest.raises(BadRequestError, match=f"'{name}'"):
                    untyped.batch(**{name: number})
            for name in ("up_to_seq", "batch", "max_bytes", "min_last_seq"):
                with pytest.raises(BadRequestError, match=f"'{name}'"):
                    untyped.last_for(["a"], **{name: number})
            with pytest.raises(BadRequestError, match="'min_last_seq'"):
                await untyped.last("a", min_last_seq=number)
        for time in ("junk", "2026-01-01T00:00:00", 1.5, True, 10**30, b"2026"):
            with pytest.raises(BadRequestError, match="'start_time'"):
                await untyped.next(start_time=time)
            with pytest.raises(BadRequestError, match="'start_time'"):
                untyped.batch(start_time=time)
            with pytest.raises(BadRequestError, match="'up_to_time'"):
                untyped.last_for(["a"], up_to_time=time)
        for call in (lambda: untyped.get(None), lambda: untyped.get(1, timeout="x")):
            with pytest.raises(BadRequestError):
                await call()
        for excluding in (
            lambda: get.batch(seq=1, start_time=0),
            lambda: get.last_for(["a"], up_to_seq=1, up_to_time=0),
        ):
            with pytest.raises(BadRequestError, match="exclude each other"):
                excluding()
        for zero in ("seq", "batch", "max_bytes"):
            with pytest.raises(BadRequestError, match=f"'{zero}'"):
                untyped.batch(**{zero: 0})
        for subjects in ([], None, 5):
            with pytest.raises(BadRequestError, match="subjects are"):
                untyped.last_for(subjects)
        assert (await get.get(1, timeout=1)).seq == 1
        for stream in ("a b", "", "a.b", "a*", None):
            with pytest.raises(InvalidNameError, match="stream's name"):
                DirectGet(get.jetstream, stream)


async def test_allow_direct_is_off_unless_requested(shared_server: NatsServer) -> None:
    """No released server sets it because of ``max_msgs_per_subject``; where off, 503 at once."""
    url = shared_server.url
    for name, more in (("ASKED", {"allow_direct": True}), ("UNASKED", {})):
        config = create_stream(url, name, max_msgs_per_subject=1, **more)["config"]
        assert bool(config.get("allow_direct")) == bool(more)

    async with direct_get(url, "UNASKED") as get:
        assert (
            await send_request(get.jetstream.connection, "DIRECT.GET.UNASKED", {"seq": 1})
        ).code == 503
