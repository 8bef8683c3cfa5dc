"""What a leader reports of its replicas, and when its response does not count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nats_stream_source.errors import RequestTimeoutError
from nats_stream_source.jetstream.stream_info import Replica, StreamInfo

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
