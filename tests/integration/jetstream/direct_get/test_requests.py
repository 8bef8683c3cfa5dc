"""Direct Get: each form of its requests and of their responses (ADR-31).

A read that Direct Get does not complete is completed by the stream leader or by a consumer. So the
result of a call does not show that Direct Get works. In some tests one user may only send Direct
Gets, and one may also request the state of the stream ``S`` and single messages from its leader,
which verify a read of many messages. Calls fail where they need anything else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import datetime, timedelta, timezone
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
from nats_stream_source.jetstream.api import StoredMessage
from nats_stream_source.jetstream.direct_get.client import DirectGet
from nats_stream_source.jetstream.direct_get.readers import MAX_BYTES
from nats_stream_source.jetstream.direct_get.request import send_request
from nats_stream_source.jetstream.times import nanoseconds
from tests.support.nats.buckets import api, server_version, skip_before
from tests.support.nats.direct_get import direct_get, listed, make, new_direct_get, seqs
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import configured_server, with_user
from tests.support.proxy.fault_proxy import Proxy, subject_of

pytestmark = pytest.mark.servers


@pytest.mark.parametrize("allow_direct", [True, False], ids=["direct", "leader"])
async def test_message_missing(url: str, allow_direct: bool) -> None:
    name = f"NONE{allow_direct}"
    async with new_direct_get(url, name, allow_direct=allow_direct) as get:
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


async def test_stream_missing(url: str) -> None:
    async with direct_get(url, "NOWHERE") as get:
        for call in (get.get(1), get.last("x"), seqs(get.batch()), seqs(get.last_for(["x"]))):
            with pytest.raises(StreamNotFoundError):
                await call


@pytest.mark.parametrize("allow_direct", [True, False], ids=["direct", "leader"])
async def test_message_from_time(url: str, allow_direct: bool) -> None:
    name = f"TIME{allow_direct}"
    async with new_direct_get(url, name, allow_direct=allow_direct) as get:
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

    reader, writer = await asyncio.open_connection("127.0.0.1", shared_server.port)
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


async def test_subject_appended_form_for_restricted_user() -> None:
    config = """
        authorization { users: [
            { user: all, password: all }
            { user: one, password: one, permissions: {
                publish: ["$JS.API.DIRECT.GET.RES.RES.1", "$JS.API.DIRECT.GET.RES.none"
                          "$JS.API.STREAM.INFO.OFF"]
                subscribe: "_INBOX.>" } }
        ] }
    """
    with configured_server(config) as server:
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


async def test_requests_that_cannot_be(url: str) -> None:
    """408, as the server reports it: for a body in the subject-appended form and other nonsense."""
    async with new_direct_get(url, "BAD") as get:
        connection = get.jetstream.connection
        for subject, body in (
            ("DIRECT.GET.BAD.BAD.1", {"seq": 1, "next_by_subj": "BAD.1"}),
            ("DIRECT.GET.BAD", {"seq": 1, "last_by_subj": "BAD.1"}),
            ("DIRECT.GET.BAD", {}),
            ("DIRECT.GET.BAD", None),
        ):
            assert (await send_request(connection, subject, body)).code == 408


async def test_arguments_are_refused_when_called(url: str) -> None:
    """No request is sent: a server would report no match, or name another field."""
    async with new_direct_get(url, "ARGS", 1) as get:
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


async def test_allow_direct_is_off_unless_requested(url: str) -> None:
    """No released server sets it because of ``max_msgs_per_subject``; where off, 503 at once."""
    for name, more in (("ASKED", {"allow_direct": True}), ("UNASKED", {})):
        config = create_stream(url, name, max_msgs_per_subject=1, **more)["config"]
        assert bool(config.get("allow_direct")) == bool(more)

    async with direct_get(url, "UNASKED") as get:
        reply = await send_request(get.jetstream.connection, "DIRECT.GET.UNASKED", {"seq": 1})
        assert reply.code == 503


Request = tuple[str, dict[str, Any] | None]
"""The subject below the API prefix, and the body; None for an empty one."""


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """A server with the streams ``S`` and ``OFF``, and the users."""
    config = """
        authorization { users: [
            { user: all, password: all }
            { user: direct, password: direct, permissions: {
                publish: "$JS.API.DIRECT.GET.>", subscribe: "_INBOX.>" } }
            { user: verify, password: verify, permissions: {
                publish: ["$JS.API.DIRECT.GET.S", "$JS.API.STREAM.INFO.S",
                          "$JS.API.STREAM.MSG.GET.S"], subscribe: "_INBOX.>" } }
        ] }
    """
    with configured_server(config) as server:
        make(with_user(server.url, "all"), "S", 10)
        make(with_user(server.url, "all"), "OFF", 10, allow_direct=False)
        yield server


def requests(proxy: Proxy) -> list[Request]:
    """The API requests that were sent through the proxy, in order."""
    prefix = "$JS.API."
    found = []
    for frame in proxy.sent:
        if frame.startswith(b"PUB ") and subject_of(frame).startswith(prefix):
            body = frame.split(b"\r\n")[1]
            found.append((subject_of(frame).removeprefix(prefix), json.loads(body or b"null")))
    return found


def direct_requests(proxy: Proxy) -> list[Request]:
    """The Direct Gets that were sent; the leader was not requested for last messages."""
    sent = requests(proxy)
    assert not any("last_by_subj" in body for _, body in sent if body)
    return [(subject, body) for subject, body in sent if subject.startswith("DIRECT.GET.")]


async def fifth_time(server: NatsServer) -> str:
    """The timestamp of message 5, as the server reports it."""
    message = api(with_user(server.url, "all"), "STREAM.MSG.GET.S", {"seq": 5})["message"]
    return str(message["time"])


async def test_user_restricted_to_direct_get(server: NatsServer) -> None:
    """The permissions of this module: requests other than Direct Get are denied."""
    async with direct_get(with_user(server.url, "direct"), "OFF") as get:
        with pytest.raises(PermissionDeniedError):
            await get.get(3)
        with pytest.raises(PermissionDeniedError):
            await seqs(get.batch())


def one(call: Callable[[DirectGet], Awaitable[StoredMessage]]) -> Any:
    async def read(get: DirectGet) -> list[int]:
        return [(await call(get)).seq]

    return read


SINGLE: dict[str, tuple[Any, Request, list[int]]] = {
    "seq": (one(lambda get: get.get(3)), ("DIRECT.GET.S", {"seq": 3}), [3]),
    "last_by_subj": (
        one(lambda get: get.last("S.*")),
        ("DIRECT.GET.S", {"last_by_subj": "S.*"}),
        [10],
    ),
    # From sequence 1, which is the same.
    "next_by_subj": (
        one(lambda get: get.next("S.3")),
        ("DIRECT.GET.S", {"seq": 1, "next_by_subj": "S.3"}),
        [3],
    ),
    "seq, next_by_subj": (
        one(lambda get: get.next("S.3", seq=4)),
        ("DIRECT.GET.S", {"seq": 4, "next_by_subj": "S.3"}),
        [7],
    ),
    "subject-appended": (one(lambda get: get.last("S.2")), ("DIRECT.GET.S.S.2", None), [10]),
}


@pytest.mark.parametrize("name", SINGLE)
async def test_request_for_one_message(server: NatsServer, name: str) -> None:
    read, request, found = SINGLE[name]
    with Proxy(server.port) as proxy:
        async with direct_get(with_user(proxy.url, "direct"), "S") as get:
            assert await read(get) == found
        assert requests(proxy) == [request]


async def test_request_for_one_message_from_time(server: NatsServer) -> None:
    skip_before(with_user(server.url, "all"), 11)
    time = await fifth_time(server)
    with Proxy(server.port) as proxy:
        async with direct_get(with_user(proxy.url, "direct"), "S") as get:
            # Of any subject: the filter ">" selects every message.
            assert (await get.next(start_time=time)).seq == 5
            assert (await get.next("S.0", start_time=time)).seq == 8
        assert requests(proxy) == [
            ("DIRECT.GET.S", {"start_time": time, "next_by_subj": ">"}),
            ("DIRECT.GET.S", {"start_time": time, "next_by_subj": "S.0"}),
        ]


Many = Callable[[DirectGet, str], AsyncIterator[StoredMessage]]

# The document's calls by their numbers. The second page of a call starts after the first one's last
# message; its EOB says that more messages match.
BATCHES: dict[str, tuple[Many, list[dict[str, Any]], list[int]]] = {
    "1": (lambda get, _: get.batch("S.1", batch=3), [{"seq": 1, "batch": 3}], [1, 5, 9]),
    "1, two pages": (
        lambda get, _: get.batch("S.1", batch=2),
        [{"seq": 1, "batch": 2}, {"seq": 6, "batch": 2}],
        [1, 5, 9],
    ),
    "2": (lambda get, _: get.batch("S.1", batch=3, seq=4), [{"seq": 4, "batch": 3}], [5, 9]),
    # The leader returns the sequence of a start time.
    "3": (
        lambda get, time: get.batch("S.1", batch=3, start_time=time),
        [{"seq": 5, "batch": 3}],
        [5, 9],
    ),
    "4": (
        lambda get, _: get.batch("S.1", batch=3, max_bytes=1, limit=2),
        [{"seq": 1, "batch": 2, "max_bytes": 1}, {"seq": 2, "batch": 1, "max_bytes": 1}],
        [1, 5],
    ),
    "5": (
        lambda get, _: get.batch("S.1", batch=3, max_bytes=1, seq=4, limit=2),
        [{"seq": 4, "batch": 2, "max_bytes": 1}, {"seq": 6, "batch": 1, "max_bytes": 1}],
        [5, 9],
    ),
    "6": (
        lambda get, time: get.batch("S.1", batch=3, max_bytes=1, start_time=time, limit=2),
        [{"seq": 5, "batch": 2, "max_bytes": 1}, {"seq": 6, "batch": 1, "max_bytes": 1}],
        [5, 9],
    ),
}


@pytest.mark.parametrize("call", BATCHES)
async def test_request_for_batch(server: NatsServer, call: str) -> None:
    """ADR-31, "Batched requests", calls 1 to 6."""
    skip_before(with_user(server.url, "all"), 11)
    read, bodies, found = BATCHES[call]
    time = await fifth_time(server)
    expected = [{"max_bytes": MAX_BYTES, "next_by_subj": "S.1", **body} for body in bodies]
    with Proxy(server.port) as proxy:
        async with direct_get(with_user(proxy.url, "verify"), "S") as get:
            assert await seqs(read(get, time)) == found
        assert direct_requests(proxy) == [("DIRECT.GET.S", body) for body in expected]
        assert len([frame for frame in proxy.seen if b"NATS/1.0 204 EOB" in frame]) == len(bodies)


async def test_request_for_all_subjects_has_no_filter(server: NatsServer) -> None:
    """The document requires a subject. Servers do without, and are faster than with ``>``."""
    skip_before(with_user(server.url, "all"), 11)
    with Proxy(server.port) as proxy:
        async with direct_get(with_user(proxy.url, "verify"), "S") as get:
            assert await seqs(get.batch()) == list(range(1, 11))
            assert await seqs(get.batch(">", seq=9)) == [9, 10]
        bodies = [body for _, body in direct_requests(proxy)]
        assert bodies == [{"batch": 8192, "max_bytes": MAX_BYTES, "seq": seq} for seq in (1, 9)]


MULTI: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[int]]] = {
    "1": ({}, [{}], [9, 10]),
    "2": ({"up_to_seq": 7}, [{"up_to_seq": 7}], [5, 6]),
    # The leader's sequence at that time, so that all pages are of one point in time.
    "3": ({"up_to_time": ...}, [{"up_to_seq": 4}], [1, 2]),
    "4": ({"batch": 1}, [{"batch": 1}, {"batch": 1, "seq": 10, "up_to_seq": 10}], [9, 10]),
    "5": (
        {"batch": 1, "up_to_seq": 7},
        [{"batch": 1, "up_to_seq": 7}, {"batch": 1, "seq": 6, "up_to_seq": 7}],
        [5, 6],
    ),
    "6": (
        {"batch": 1, "up_to_time": ...},
        [{"batch": 1, "up_to_seq": 4}, {"batch": 1, "seq": 2, "up_to_seq": 4}],
        [1, 2],
    ),
}


@pytest.mark.parametrize("call", MULTI)
async def test_last_messages(server: NatsServer, call: str) -> None:
    """ADR-31, "Multi-subject requests", calls 1 to 6."""
    skip_before(with_user(server.url, "all"), 11)
    options, bodies, found = MULTI[call]
    if "up_to_time" in options:
        options = {**options, "up_to_time": await fifth_time(server)}
    subjects = ["S.1", "S.2"]
    with Proxy(server.port) as proxy:
        async with direct_get(with_user(proxy.url, "verify"), "S") as get:
            assert await seqs(get.last_for(subjects, **options)) == found
        assert direct_requests(proxy) == [
            ("DIRECT.GET.S", {"multi_last": subjects, "max_bytes": MAX_BYTES, **body})
            for body in bodies
        ]


async def test_read_at_min_last_seq_takes_at_most_three_requests(server: NatsServer) -> None:
    """One where the message proves that its server is current; else the leader is requested."""
    with Proxy(server.port) as proxy:
        async with direct_get(with_user(proxy.url, "all"), "S") as get:
            assert (await get.get(2)).seq == 2
            assert (await get.last("S.2", min_last_seq=10)).seq == 10
            assert requests(proxy) == [("DIRECT.GET.S", {"seq": 2}), ("DIRECT.GET.S.S.2", None)]
            await get.get(2, min_last_seq=3)  # probes once whether the server supports the field
            proxy.sent.clear()
            assert (await get.get(2, min_last_seq=10)).seq == 2
            first, *others = requests(proxy)
            assert first == ("DIRECT.GET.S", {"seq": 2})
            # The Direct Get is repeated only where the leader has not responded after a second.
            assert [sent for sent in others if sent != first] == [
                ("STREAM.INFO.S", None),
                ("STREAM.MSG.GET.S", {"seq": 2}),
            ]


async def test_leader_receives_same_request(server: NatsServer) -> None:
    """The body of a Direct Get is that of a message get; only the subject differs."""
    reads = [
        (lambda get: get.get(3), {"seq": 3}),
        (lambda get: get.last("OFF.2"), {"last_by_subj": "OFF.2"}),
        (lambda get: get.next("OFF.3", seq=4), {"seq": 4, "next_by_subj": "OFF.3"}),
    ]
    with Proxy(server.port) as proxy:
        async with direct_get(with_user(proxy.url, "all"), "OFF") as get:
            for read, body in reads:
                proxy.sent.clear()
                await read(get)
                assert requests(proxy)[-1] == ("STREAM.MSG.GET.OFF", body)
