"""The column ``headers`` of both formats from a real server, the same by both ways of reading."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.ordered import reader as ordered_reader
from tests.support.nats import buckets
from tests.support.nats.streams import create_stream, stream_state
from tests.support.query_driver.driver import QueryDriver, Record, new_query, sequences
from tests.support.wait import wait_until
from tests.unit.wire.test_headers import block, plainly

pytestmark = pytest.mark.servers

_names = (f"H{i}" for i in itertools.count())

Raw = tuple[str, bytes, bytes]
"""The subject's last token, the header block as it is on the wire (empty: none), the payload."""


def publish_raw(server: NatsServer, prefix: str, messages: list[Raw]) -> None:
    """Publish messages whose header blocks no client would write."""

    async def work(client: Any) -> None:
        for name, headers, payload in messages:
            subject = f"{prefix}{name}".encode()
            if headers:
                sizes = b"%d %d" % (len(headers), len(headers) + len(payload))
                frame = b"HPUB %s %s\r\n%s%s\r\n" % (subject, sizes, headers, payload)
            else:
                frame = b"PUB %s %d\r\n%s\r\n" % (subject, len(payload), payload)
            client._transport.write(frame)
        await client.flush()

    buckets.with_client(server.url, work)


def stored(server: NatsServer, stream: str, prefix: str) -> None:
    """Wait until the stream has all that was published before."""
    last = buckets.publish(server.url, [(f"{prefix}end", b"", None)])[0]
    wait_until(lambda: stream_state(server.url, stream)["last_seq"] >= last, "all messages")


def both_ways(make: Any) -> list[Record]:
    """The rows by small ranges, which are those by a consumer, but for ``delta``."""
    with make() as query:
        few = query.read_new()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered_reader, "MAX_SEQUENCES", 0)
        with make() as query:
            many = query.read_new()
    assert _without_delta(few) == _without_delta(many)
    return few


def _without_delta(rows: list[Record]) -> list[Record]:
    return [{name: v for name, v in row.items() if name != "delta"} for row in rows]


BLOCKS = [
    b"",
    block(),
    block("A: 1"),
    block("A: 1", "a: 2", "A:  3 "),
    block("odd", ": x", "A: 1"),
    block(b"A: \xff", b"\xfe: 1"),
    block("Status: 404", "Description: x"),
    block("KV-Operation: DEL"),
    block("KV-Operation: NEWS"),
    block("Nats-Marker-Reason: MaxAge"),
    block("Nats-Msg-Size: 77"),
    block("nats-msg-size: 5"),
    b"NA",  # not of one byte: with headers_only, nats-server 2.15.1 ends with a panic over those
    b"NAT",
    b"garbage",
    b"NATS/1.0\r\nA: 1\r\nno end",
    b"NATS/1.0 \r\nA: 1\r\n\r\n",
]
MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.one_of(
            st.sampled_from(BLOCKS),
            st.binary(max_size=12).map(lambda one: b"NATS/1.0\r\n" + one + b"\r\n\r\n"),
        ),
        st.sampled_from([b"", b"v", b"NATS/1.0\r\n\r\n"]),
    ),
    min_size=1,
    max_size=20,
)
MANY = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@MANY
@given(messages=MESSAGES, headers_only=st.booleans())
def test_streams(shared_server: NatsServer, messages: list[Raw], headers_only: bool) -> None:
    name = next(_names)
    url = shared_server.url
    create_stream(url, name)
    publish_raw(shared_server, f"{name}.", messages)
    stored(shared_server, name, f"{name}.")
    found = both_ways(
        lambda: new_query(url, stream=name, includeHeaders=True, headersOnly=headers_only)
    )[:-1]
    plain = both_ways(lambda: new_query(url, stream=name, headersOnly=headers_only))[:-1]
    assert [row | {"headers": None} for row in found] == [row | {"headers": None} for row in plain]
    assert sequences(found) == list(range(1, len(found) + 1))
    if not headers_only:
        by_seq = [plainly(headers) for _, headers, _ in messages]
        assert [_dict(row["headers"]) for row in found] == by_seq
        assert [row["data"] for row in found] == [payload for _, _, payload in messages]


@MANY
@given(messages=MESSAGES, meta_only=st.booleans(), ignore_deletes=st.booleans())
def test_buckets(
    shared_server: NatsServer, messages: list[Raw], meta_only: bool, ignore_deletes: bool
) -> None:
    name = next(_names)
    buckets.create_bucket(shared_server.url, name, history=64)
    publish_raw(shared_server, f"$KV.{name}.", messages)
    stored(shared_server, f"KV_{name}", f"$KV.{name}.")

    def query() -> QueryDriver:
        given = {"includeHistory": True, "metaOnly": meta_only, "ignoreDeletes": ignore_deletes}
        return new_query(shared_server.url, bucket=name, includeHeaders=True, **given)

    found = both_ways(query)[:-1]
    assert all(row["operation"] == "PUT" for row in found) or not ignore_deletes
    if not meta_only:
        for row in found:
            assert _dict(row["headers"]) == plainly(messages[row["revision"] - 1][1])


def _dict(pairs: list[tuple[str, list[str]]] | None) -> dict[str, list[str]] | None:
    return None if pairs is None else dict(pairs)


def test_headers_of_server(shared_server: NatsServer) -> None:
    """The payload's size, where the payload was left out; a marker's operation."""
    name = next(_names)
    url = shared_server.url
    buckets.create_bucket(url, name, history=5)
    buckets.put(url, name, "a", b"12345", {"Trace": "x"})
    buckets.purge(url, name, "b")
    given = {"includeHistory": True, "metaOnly": True, "includeHeaders": True}
    first, second = both_ways(lambda: new_query(url, bucket=name, **given))
    assert (first["operation"], second["operation"]) == ("PUT", "PURGE")
    assert first["headers"] == [("Trace", ["x"]), ("Nats-Msg-Size", ["5"])]
    assert second["headers"] == [
        ("KV-Operation", ["PURGE"]),
        ("Nats-Rollup", ["sub"]),
        ("Nats-Msg-Size", ["0"]),
    ]
