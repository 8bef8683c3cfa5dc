"""The consumer's configuration as a table."""

from __future__ import annotations

from typing import Any

import pytest

from nats_stream_source.jetstream.ordered.consumer import consumer_config
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.stream_identity import KnownStream

KNOWN = KnownStream("now")

ALWAYS = {
    "deliver_subject": "inbox",
    "ack_policy": "none",
    "max_ack_pending": -1,
    "max_deliver": 1,
    "mem_storage": True,
    "num_replicas": 1,
    "idle_heartbeat": 500_000_000,
    "inactive_threshold": 60_000_000_000,
}
FROM_8 = {"deliver_policy": "by_start_sequence", "opt_start_seq": 8, "flow_control": True}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the whole stream": ({}, FROM_8),
    "one filter": ({"filters": ("a.>",)}, {**FROM_8, "filter_subject": "a.>"}),
    "two filters": ({"filters": ("a", "b")}, {**FROM_8, "filter_subjects": ["a", "b"]}),
    "without payloads": ({"headers_only": True}, {**FROM_8, "headers_only": True}),
    "heartbeats": ({"heartbeat": 0.1}, {**FROM_8, "idle_heartbeat": 100_000_000}),
    "last values begin anew": (
        {"last_per_subject": True, "filters": (">",)},
        {"deliver_policy": "last_per_subject", "filter_subject": ">", "flow_control": True},
    ),
}


@pytest.mark.parametrize(("asked", "expected"), CASES.values(), ids=CASES)
def test_config(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    request = RangeRequest("S", KNOWN, 3, 20, **asked)
    assert consumer_config(request, 7, "inbox") == {**ALWAYS, **expected}


def test_request_without_flow_control() -> None:
    config = consumer_config(RangeRequest("S", KNOWN, 3, 20), 7, "inbox", flow_control=False)
    assert "flow_control" not in config
    assert config["idle_heartbeat"]


@pytest.mark.parametrize(
    ("seen_through", "policy"),
    [(0, "last_per_subject"), (19, "last_per_subject"), (20, "by_start_sequence")],
)
def test_initial_values_read_are_not_restarted(seen_through: int, policy: str) -> None:
    request = RangeRequest("S", KNOWN, 0, ENDLESS, (">",), last_per_subject=True, min_last_seq=20)
    config = consumer_config(request, 18, "inbox", seen_through=seen_through)
    assert config["deliver_policy"] == policy
    assert config.get("opt_start_seq") == (19 if policy == "by_start_sequence" else None)


def test_initial_values_empty_end_at_once() -> None:
    request = RangeRequest("S", KNOWN, 0, ENDLESS, (">",), last_per_subject=True, min_last_seq=0)
    config = consumer_config(request, 0, "inbox", seen_through=0)
    assert (config["deliver_policy"], config["opt_start_seq"]) == ("by_start_sequence", 1)


@pytest.mark.parametrize(
    ("end", "reach", "target"), [(20, None, 20), (ENDLESS, None, 3), (ENDLESS, 7, 7), (20, 7, 7)]
)
def test_required_sequence(end: int, reach: int | None, target: int) -> None:
    assert RangeRequest("S", KNOWN, 3, end, min_last_seq=reach).target == target
