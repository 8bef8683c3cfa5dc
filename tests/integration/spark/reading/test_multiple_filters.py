"""Ranges of several filters: while what one of them covers is purged, no other loses a message.

Servers before 2.15 pass messages over then, see ``jetstream.ordered.consumer``; `make
test-servers` runs this on each.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from nats_stream_source.jetstream.ordered import consumer
from nats_stream_source.jetstream.ordered.consumer import MergedFilter
from nats_stream_source.jetstream.subjects import covering, covers
from nats_stream_source.wire.columns import subjects
from nats_stream_source.wire.framing.frames import Framer
from tests.support.nats.buckets import api, publish
from tests.support.recorded_stream import RecordedStream

COVERING = {
    "a": ["a"],
    "a.*": ["a.b", "a.c"],
    "*.b": ["a.b", "c.b"],
    "a.>": ["a.b", "a.b.c"],
    ">": ["a", "a.b"],
    "a.b.>": ["a.b.>", "a.b.c.d"],
    "a.*.c": ["a.*.c", "a.b.c"],
    "*.*": ["a.b", "c.d"],
    "$KV.b.>": ["$KV.b.x", "$KV.b.y.z", "$KV.b.>"],
}


@pytest.mark.parametrize(("one", "filters"), COVERING.items(), ids=COVERING)
def test_covering(one: str, filters: list[str]) -> None:
    assert covering(filters) == one


TOKENS = st.sampled_from(["a", "b", "a-b", "ü", "x\x0b"])
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=4).map(".".join)
FILTERS = st.builds(
    lambda tokens, rest: ".".join([*tokens, *rest]),
    st.lists(TOKENS | st.just("*"), min_size=1, max_size=3),
    st.sampled_from([[], [">"]]),
)


@settings(deadline=None)
@given(st.lists(FILTERS, min_size=2, max_size=5), st.lists(SUBJECTS, max_size=20))
def test_filters_select_messages(filters: list[str], names: list[str]) -> None:
    one = MergedFilter(filters)
    expected = [name for name in names if any(covers(pattern, name) for pattern in filters)]
    assert all(covers(one.subject, name) for name in expected)
    frames = Framer().feed(b"".join(b"MSG %s 1 1\r\n.\r\n" % name.encode() for name in names))
    assert subjects(one.select(frames)).to_pylist() == expected


COUNT = 30_000
HOW = ("a marker", "the API", "the API, up to a sequence")


@pytest.mark.servers
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_purge_while_range_is_read(url: str, kind: str, how: str) -> None:
    """Of 10 MB that are under way for two filters, the only message of the first one goes."""
    recorded = RecordedStream(kind, url).create(allow_rollup_hdrs=True)
    written = [
        ("a", b"first"),
        *((f"b.{key}", value) for key, value in recorded.messages(COUNT, 300)),
    ]
    recorded.put(written)
    purged = f"{recorded.prefix}a"
    done: list[int] = []

    def purge(rows: int) -> None:
        if done:
            return
        done.append(rows)
        if how == "a marker":
            publish(recorded.url, [(purged, b"", {"Nats-Rollup": "sub"})])
        else:
            more = {"seq": COUNT} if how.endswith("sequence") else {}
            api(recorded.url, f"STREAM.PURGE.{recorded.stream}", {"filter": purged, **more})

    names = ["a", "b.*"] if kind == "kv" else [purged, f"{recorded.prefix}b.*"]
    filters = {"keys" if kind == "kv" else "filterSubjects": ",".join(names)}
    with recorded.query(minPartitions="1", failOnDataLoss="false", **filters) as query:
        assert query.plan()
        query.read(purge)
    assert 0 < done[0] < COUNT
    recorded.check(query.rows, lost=[1])


@pytest.mark.parametrize("kind", ["kv", "kv current", "stream"])
def test_messages_unmatched_are_left_out(
    url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With any server, as with lost messages: long ranges of others, rows, and others again."""
    monkeypatch.setattr(consumer, "_FIXED_IN", (99, 0))
    recorded = RecordedStream(kind, url).create()
    written: list[tuple[str, bytes]] = []
    for place in ("c", "a.x", "b", "c", "a.y", "c"):
        written += [(f"{place}.{key}", value) for key, value in recorded.messages(3000)]
    sequences = publish(
        recorded.url, [(recorded.prefix + key, value, None) for key, value in written]
    )
    wanted = [one for one in zip(sequences, written, strict=True) if one[1][0][0] != "c"]
    recorded.acknowledged.update(wanted)
    names = ["a.>", "b.*"] if recorded.is_kv else [f"{recorded.prefix}a.>", f"{recorded.prefix}b.*"]
    filters = {"keys" if recorded.is_kv else "filterSubjects": ",".join(names)}
    with recorded.query(minPartitions="3", **filters) as query:
        assert query.plan()
        query.read()
    recorded.check(query.rows)
    assert len(query.rows) == 9000
