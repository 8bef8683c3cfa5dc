"""What a leader reports of a stream, and the comparison with what was known of the stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from nats_stream_source.errors import RequestTimeoutError
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.stream_identity import (
    Identity,
    KnownStream,
    StreamChangedError,
    compare,
    verify_unchanged,
)
from nats_stream_source.jetstream.stream_info import Replica, StreamInfo

OLD, NEW = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
EARLIER, READ, LATER = "2026-01-01T01:00:00Z", "2026-01-01T02:00:00Z", "2026-01-01T03:00:00Z"
REWRITTEN = "2026-01-02T01:00:00Z"
SAME, RESTORED = Identity.SAME, Identity.RESTORED
ROLLED_BACK, RECREATED = Identity.ROLLED_BACK, Identity.RECREATED
LAGGING = Identity.LAGGING

KNOWN = KnownStream(OLD, 10, READ)
GAP = KnownStream(OLD, 10, gap=True)
UNKNOWN = KnownStream(OLD, 10)
INFO = StreamInfo("S", OLD, 1, 20, LATER, 1, 20, 100, {}, first_time=EARLIER)
RESTORE = replace(INFO, created=NEW)
REWRITE = replace(INFO, created=NEW, first_time=REWRITTEN, last_time=REWRITTEN)
MIRROR = replace(INFO, config={"mirror": {"name": "O"}})
REMIRROR = replace(MIRROR, created=NEW)
NO_REQUEST = cast("JetStream", None)
BEFORE = {"last_seq": 5, "last_time": EARLIER}


def at(seq: int, time: str) -> StoredMessage:
    return StoredMessage("s", seq, time, b"", b"")


@pytest.mark.parametrize(
    ("known", "info", "message", "expected"),
    [
        (KNOWN, INFO, at(10, READ), SAME),
        (KNOWN, INFO, None, SAME),
        (KNOWN, INFO, at(10, LATER), ROLLED_BACK),
        (KNOWN, replace(INFO, **BEFORE), None, ROLLED_BACK),
        (GAP, INFO, None, SAME),
        (GAP, INFO, at(10, READ), ROLLED_BACK),
        (UNKNOWN, INFO, at(10, READ), SAME),
        (KNOWN, RESTORE, at(10, READ), RESTORED),
        (KNOWN, RESTORE, at(11, LATER), RESTORED),
        (KNOWN, RESTORE, at(11, EARLIER), ROLLED_BACK),
        (KNOWN, RESTORE, None, RESTORED),
        (KNOWN, replace(RESTORE, last_time=EARLIER), None, ROLLED_BACK),
        (KNOWN, RESTORE, at(10, REWRITTEN), ROLLED_BACK),
        (KNOWN, replace(RESTORE, **BEFORE), None, ROLLED_BACK),
        (GAP, RESTORE, at(11, LATER), RESTORED),
        (GAP, RESTORE, at(10, LATER), ROLLED_BACK),
        (UNKNOWN, RESTORE, None, RESTORED),
        (UNKNOWN, replace(RESTORE, **BEFORE), None, ROLLED_BACK),
        (KnownStream(OLD, 0, gap=True), RESTORE, None, RESTORED),
        # all messages up to the known one were removed since the restore
        (KNOWN, replace(RESTORE, first_seq=11, first_time=LATER), at(11, LATER), RESTORED),
        (KNOWN, replace(RESTORE, first_seq=21, first_time=None), None, RESTORED),
        (KNOWN, REWRITE, at(10, REWRITTEN), RECREATED),
        # the message at the known sequence was superseded in the re-created stream
        (KNOWN, REWRITE, at(11, REWRITTEN), RECREATED),
        (KNOWN, replace(REWRITE, first_seq=15), at(15, REWRITTEN), RECREATED),
        (KNOWN, replace(REWRITE, last_seq=5), None, RECREATED),
        # the clock of the stream's leader is behind that of the server that created it
        (KNOWN, replace(REWRITE, created="2026-01-02T02:00:00Z"), None, RECREATED),
        (UNKNOWN, REWRITE, None, RECREATED),
        (KNOWN, replace(INFO, created=NEW, last_seq=0, first_time=None, last_time=None),
         None, RECREATED),
        (KNOWN, replace(MIRROR, **BEFORE), None, LAGGING),
        (KNOWN, replace(REMIRROR, **BEFORE), None, LAGGING),
        (GAP, replace(REMIRROR, **BEFORE), None, LAGGING),
        (UNKNOWN, replace(REMIRROR, **BEFORE), None, LAGGING),
        (KNOWN, replace(REMIRROR, last_seq=0, first_time=None, last_time=None), None, LAGGING),
        (KNOWN, REMIRROR, at(10, READ), RESTORED),
        (KNOWN, MIRROR, at(10, LATER), ROLLED_BACK),
        # a mirror that was re-created with its origin: the gap does not have a time to compare
        (GAP, replace(REMIRROR, first_time=READ), at(10, LATER), ROLLED_BACK),
        (GAP, replace(REMIRROR, first_time=READ), at(11, LATER), RESTORED),
        (KNOWN, replace(REMIRROR, last_seq=5, first_time=REWRITTEN, last_time=REWRITTEN),
         None, RECREATED),
    ],
)  # fmt: skip
def test_identity(
    known: KnownStream, info: StreamInfo, message: StoredMessage | None, expected: Identity
) -> None:
    assert compare(known, info, message) is expected


@pytest.mark.parametrize(
    ("mirror", "expected"),
    [
        (replace(MIRROR, **BEFORE), ROLLED_BACK),
        (replace(REMIRROR, **BEFORE), ROLLED_BACK),
        (replace(REMIRROR, last_seq=0, first_time=None, last_time=None), RECREATED),
    ],
)
def test_identity_of_mirror_that_is_not_waited_for(mirror: StreamInfo, expected: Identity) -> None:
    assert compare(KNOWN, mirror, may_lag=False) is expected


@pytest.mark.parametrize(
    ("known", "info", "received", "observed"),
    [
        (KNOWN, INFO, replace(KNOWN, time=LATER), "rolled back .* sequence 10 does not have"),
        (KNOWN, replace(INFO, last_seq=10, last_time=READ), replace(KNOWN, time=LATER), "rolled"),
        (KNOWN, replace(INFO, **BEFORE), None, "last sequence is 5, expected 10 or later"),
        (KNOWN, REWRITE, KNOWN, f"re-created .* created at {NEW}, expected {OLD}"),
    ],
)
async def test_change_of_stream_names_what_shows_it(
    known: KnownStream, info: StreamInfo, received: KnownStream | None, observed: str
) -> None:
    with pytest.raises(StreamChangedError, match=observed) as caught:
        await verify_unchanged(NO_REQUEST, info, [known], received)
    assert caught.value.known is known


@pytest.mark.parametrize(
    ("info", "lags"),
    [(replace(INFO, last_seq=10, last_time=READ), False), (replace(MIRROR, **BEFORE), True)],
)
async def test_stream_unchanged_or_lagging(info: StreamInfo, lags: bool) -> None:
    assert await verify_unchanged(NO_REQUEST, info, [UNKNOWN, KNOWN], KNOWN) is lags


SECOND = 10**9
ANSWER: dict[str, Any] = {
    "config": {"name": "KV_b"},
    "created": "2026-01-01T00:00:00Z",
    "state": {
        "first_seq": 1,
        "last_seq": 2,
        "first_ts": "2026-01-01T00:00:00Z",
        "last_ts": "2026-01-01T00:00:00Z",
        "messages": 2,
        "bytes": 100,
    },
}


def described(*replicas: dict[str, Any]) -> StreamInfo:
    return StreamInfo.parse({**ANSWER, "cluster": {"leader": "a", "replicas": list(replicas)}})


def test_replicas() -> None:
    assert StreamInfo.parse(ANSWER).replicas == ()
    assert StreamInfo.parse({**ANSWER, "cluster": {"leader": "a"}}).replicas == ()
    found = described({"name": "b", "current": True, "active": 5}, {"name": "c", "lag": 7})
    assert found.replicas == (Replica("b", 0, 5), Replica("c", 7, 0))


@pytest.mark.parametrize(
    ("silent_for", "believed"),
    [
        ((), True),
        ((SECOND,), True),
        ((9 * SECOND,), False),
        ((SECOND, 9 * SECOND), True),
        # As the leader has one that was down when it was elected, however long ago.
        ((0, 9 * SECOND), False),
        ((0, SECOND), True),
        ((9 * SECOND, 9 * SECOND), False),
        ((SECOND, SECOND, 0, 9 * SECOND), True),
        ((SECOND, 9 * SECOND, 0, 9 * SECOND), False),
    ],
)
def test_majority_of_replicas(silent_for: tuple[int, ...], believed: bool) -> None:
    info = described(*({"name": str(i), "active": one} for i, one in enumerate(silent_for)))
    if believed:
        info.verify_majority()
    else:
        with pytest.raises(
            RequestTimeoutError,
            match="stream leader a of KV_b has not heard from most of its replicas",
        ):
            info.verify_majority()


def led_by(leader: str, last_seq: int = 2, created: str = "2026-01-01T00:00:00Z") -> StreamInfo:
    info = described({"name": "b", "active": 1}, {"name": "c", "active": 1})
    config = {**info.config, "num_replicas": 3}
    return replace(info, config=config, leader=leader, last_seq=last_seq, created=created)


@pytest.mark.parametrize(
    "now",
    [led_by("b"), led_by("a", 1), led_by("a", created="2026-01-02T00:00:00Z")],
    ids=["another leader", "it has less", "another stream"],
)
def test_missing_at_former_leader_proves_nothing(now: StreamInfo) -> None:
    with pytest.raises(RequestTimeoutError, match="changed from a to"):
        led_by("a").verify_same_leader(now, 2)


def test_missing_at_leader_is_proof() -> None:
    led_by("a").verify_same_leader(led_by("a", 3), 2)
    described().verify_same_leader(replace(described(), leader="b"), 2)  # no replicas
