"""The requests of each Direct Get call (ADR-31), for users who may send few other requests.

A read that Direct Get does not complete is completed by the stream leader or by a consumer. So the
result of a call does not show that Direct Get works. Here one user may only send Direct Gets, and
one may also request the state of the stream ``S`` and single messages from its leader, which verify
a read of many messages. Calls fail where they need anything else.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import PermissionDeniedError
from nats_stream_source.jetstream.api import StoredMessage
from nats_stream_source.jetstream.direct_get.client import DirectGet
from nats_stream_source.jetstream.direct_get.pages import MAX_BYTES
from tests.integration.jetstream.direct_get.streams import make
from tests.support.nats.buckets import api, skip_before
from tests.support.nats.direct_get import direct_get, seqs
from tests.support.nats.topology import with_user
from tests.support.proxy.fault_proxy import Proxy, subject_of

pytestmark = pytest.mark.servers

Request = tuple[str, dict[str, Any] | None]
"""The subject below the API prefix, and the body; None for an empty one."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server with the streams ``S`` and ``OFF``, and the users."""
    config = tmp_path_factory.mktemp("direct") / "server.conf"
    config.write_text(
        """
        authorization { users: [
            { user: all, password: all }
            { user: direct, password: direct, permissions: {
                publish: "$JS.API.DIRECT.GET.>", subscribe: "_INBOX.>" } }
            { user: verify, password: verify, permissions: {
                publish: ["$JS.API.DIRECT.GET.S", "$JS.API.STREAM.INFO.S",
                          "$JS.API.STREAM.MSG.GET.S"], subscribe: "_INBOX.>" } }
        ] }
        """
    )
    with NatsServer(config=config) as server:
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
    "1": (
        lambda get, _: get.batch("S.1", batch=3),
        [{"seq": 1, "batch": 3}],
        [1, 5, 9],
    ),
    "1, two pages": (
        lambda get, _: get.batch("S.1", batch=2),
        [{"seq": 1, "batch": 2}, {"seq": 6, "batch": 2}],
        [1, 5, 9],
    ),
    "2": (
        lambda get, _: get.batch("S.1", batch=3, seq=4),
        [{"seq": 4, "batch": 3}],
        [5, 9],
    ),
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
    "4": (
        {"batch": 1},
        [{"batch": 1}, {"batch": 1, "seq": 10, "up_to_seq": 10}],
        [9, 10],
    ),
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
