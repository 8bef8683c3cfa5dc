"""Configurations of consumers and decisions of the subscribe workflow (ADR-15), as tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nats_stream_source.errors import (
    ConfigurationError,
    ConsumerDiffersError,
    ConsumerModeError,
    DeliverGroupError,
    DuplicateSubscriptionError,
    QueueStatusError,
    SubjectMismatchError,
    SubscribeError,
)
from nats_stream_source.jetstream.consumers import ConsumerInfo
from nats_stream_source.jetstream.ordered.consumer import consumer_config
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.subscriptions.validation import (
    ConsumerConfig,
    SubscribeRequest,
    build_consumer_config,
    differences,
    validate_ordered,
    validate_request,
    verify_consumer,
)

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
    ("reach", "position", "seen_through", "policy", "start"),
    [
        (20, 18, 0, "last_per_subject", None),
        (20, 18, 19, "last_per_subject", None),
        (20, 18, 20, "by_start_sequence", 19),
        (0, 0, 0, "by_start_sequence", 1),  # there are none
    ],
)
def test_initial_values_read_are_not_restarted(
    reach: int, position: int, seen_through: int, policy: str, start: int | None
) -> None:
    request = RangeRequest(
        "S", KNOWN, 0, ENDLESS, (">",), last_per_subject=True, min_last_seq=reach
    )
    config = consumer_config(request, position, "inbox", seen_through=seen_through)
    assert (config["deliver_policy"], config.get("opt_start_seq")) == (policy, start)


@pytest.mark.parametrize(
    ("end", "reach", "target"), [(20, None, 20), (ENDLESS, None, 3), (ENDLESS, 7, 7), (20, 7, 7)]
)
def test_required_sequence(end: int, reach: int | None, target: int) -> None:
    assert RangeRequest("S", KNOWN, 3, end, min_last_seq=reach).target == target


Config = ConsumerConfig


def request(subject: str | None = "s.a", **more: Any) -> SubscribeRequest:
    """The arguments; fields of the configuration are those that the request lacks."""
    own = {
        name: more.pop(name) for name in [*more] if name in SubscribeRequest.__dataclass_fields__
    }
    return SubscribeRequest(subject, config=Config(**more), **own)


# The request


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (request(None), "neither subject nor stream is set"),
        (request(None, bind="c"), "neither subject nor stream is set"),
        (request(pull=True, ack_policy="none"), "'explicit'"),
        (request(pull=True, ack_policy="all"), "'explicit'"),
        (request(pull=True, deliver_subject="d"), "deliver_subject"),
        (request(stream="a.b"), "stream is 'a.b', not a valid name"),
        (request(durable="a b"), "durable is 'a b', not a valid name"),
        (request(bind="*"), "bind is '\\*', not a valid name"),
        (request(durable_name="a.b"), "durable_name is 'a.b', not a valid name"),
        (request(queue="a.b"), "queue \\(as the durable name\\)"),
        (request(queue=""), "queue is '', not a valid subject"),
        (request("a..b"), "not a valid subject"),
        (request("a.>.b"), "not a valid subject"),
        (request("a b"), "not a valid subject"),
        (request(bind="c", deliver_group="a b"), "deliver_group"),
        (request(None, stream="S", filter_subject="a b"), "filter_subject"),
        (request(filter_subjects=("s.a", "s..b")), "s..b"),
        (request(deliver_subject="a\r\nb"), "deliver_subject"),
        (request(durable="a", durable_name="b"), "durable is 'a' and durable_name is 'b'; set one"),
        (request(durable="a", bind="b"), "set one of them"),
        (request(queue="a", deliver_group="b"), "set one of them"),
        (request(filter_subject="s.b"), "set one of them"),
    ],
)
def test_contradictory_arguments_are_refused(asked: SubscribeRequest, text: str) -> None:
    with pytest.raises(SubscribeError, match=text) as raised:
        validate_request(asked)
    assert type(raised.value) is SubscribeError
    assert isinstance(raised.value, ConfigurationError)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Config(ack_policy="all", max_deliver=3), "does not accept ack_policy, max_deliver"),
        # Where an ordered subscription begins is decided here, not by the server.
        (Config(opt_start_seq=3), "set both or neither"),
        (Config(deliver_policy="by_start_sequence"), "set both or neither"),
        (
            Config(deliver_policy="new", opt_start_time="2020-01-01T0:0Z"),
            "'by_start_time' requires opt_start_time",
        ),
    ],
)
def test_configuration_of_ordered_subscription_is_refused(config: Config, text: str) -> None:
    validate_ordered(Config(headers_only=True))
    with pytest.raises(SubscribeError, match=text):
        validate_ordered(config)


def test_validation_follows_document_order() -> None:
    wrong = request(None, queue="q", pull=True, idle_heartbeat=1, ack_policy="all")
    statuses = ({"idle_heartbeat": 1}, {"flow_control": True})
    for asked in (wrong, *(request(deliver_group="q", **given) for given in statuses)):
        with pytest.raises(QueueStatusError, match="random members"):
            validate_request(asked)
    wrong = replace(wrong, config=Config(ack_policy="all"))
    with pytest.raises(SubscribeError, match="neither subject nor stream is set"):
        validate_request(wrong)
    with pytest.raises(SubscribeError, match="ack_policy is 'all'"):
        validate_request(replace(wrong, stream="S"))


@pytest.mark.parametrize(
    ("asked", "durable", "consumer", "queue"),
    [
        (request(), None, None, None),
        (request(None, stream="S"), None, None, None),
        (request(durable="d"), "d", "d", None),
        (request(durable_name="d"), "d", "d", None),
        (request(bind="c"), None, "c", None),
        (request(bind="c", durable="c"), None, "c", None),
        # A queue without a name for its consumer gives its own.
        (request(queue="q"), "q", "q", "q"),
        (request(deliver_group="q"), "q", "q", "q"),
        (request(queue="q", durable="d"), "d", "d", "q"),
        (request(queue="a.b", bind="c"), None, "c", "a.b"),
        (request(pull=True, durable="d", ack_policy="explicit"), "d", "d", None),
    ],
)
def test_valid_arguments_are_accepted(
    asked: SubscribeRequest, durable: str | None, consumer: str | None, queue: str | None
) -> None:
    checked = validate_request(asked)
    assert (checked.durable, checked.consumer, checked.queue) == (durable, consumer, queue)


# The configuration of a new consumer

NEW = {"name": "n", "ack_policy": "explicit"}
PUSH = {**NEW, "deliver_subject": "_INBOX.x"}
GIVEN = {
    "ack_policy": "none",
    "deliver_subject": "mine",
    "flow_control": True,
    "metadata": {"a": "b"},
}


@pytest.mark.parametrize(
    ("asked", "inbox", "config"),
    [
        (request(), "_INBOX.x", {**PUSH, "filter_subject": "s.a"}),
        (request(None, stream="S"), "_INBOX.x", PUSH),
        (
            request(queue="q"),
            "_INBOX.x",
            {**PUSH, "durable_name": "q", "deliver_group": "q", "filter_subject": "s.a"},
        ),
        (
            request(
                "s.>",
                durable="d",
                filter_subjects=("s.a", "s.b"),
                idle_heartbeat=0.5,
                inactive_threshold=2,
                backoff=(1, 2.5),
                **GIVEN,
            ),
            "_INBOX.x",
            {
                **GIVEN,
                "name": "n",
                "durable_name": "d",
                "filter_subjects": ["s.a", "s.b"],
                "idle_heartbeat": 500_000_000,
                "inactive_threshold": 2_000_000_000,
                "backoff": [1_000_000_000, 2_500_000_000],
            },
        ),
        (
            request(pull=True, max_ack_pending=5, ack_wait=1.5, max_expires=10),
            None,
            {
                **NEW,
                "ack_wait": 1_500_000_000,
                "max_ack_pending": 5,
                "max_expires": 10_000_000_000,
                "filter_subject": "s.a",
            },
        ),
    ],
)
def test_consumer_configuration(
    asked: SubscribeRequest, inbox: str | None, config: dict[str, Any]
) -> None:
    assert build_consumer_config(validate_request(asked), "n", inbox) == config


# A consumer that exists


def info(push: bool = True, bound: bool = False, **config: Any) -> ConsumerInfo:
    if push:
        config.setdefault("deliver_subject", "d")
    config.setdefault("ack_policy", "explicit")
    return ConsumerInfo("S", "c", config, bound, 0, 0, None)


def bind(subject: str | None = None, **more: Any) -> SubscribeRequest:
    return request(subject, stream="S", bind="c", **more)


BIND, QUEUE, PULL = bind(), bind(queue="q"), bind(pull=True)


@pytest.mark.parametrize(
    ("asked", "found", "kind", "text"),
    [
        (BIND, info(bound=True), DuplicateSubscriptionError, "already has a subscription"),
        # Deliver group: its four cases, whatever push_bound says.
        (BIND, info(deliver_group="q"), DeliverGroupError, "'q', expected None"),
        (BIND, info(bound=True, deliver_group="q"), DeliverGroupError, "'q', expected None"),
        (QUEUE, info(deliver_group="other"), DeliverGroupError, "'other', expected 'q'"),
        (QUEUE, info(bound=True, deliver_group="o"), DeliverGroupError, "'o', expected 'q'"),
        (QUEUE, info(), DeliverGroupError, "None, expected 'q'"),
        (QUEUE, info(bound=True), DeliverGroupError, "None, expected 'q'"),
        # The other checks.
        (bind("s.a"), info(filter_subject="s.b"), SubjectMismatchError, "s.b, expected s.a"),
        (
            bind("s.a"),
            info(filter_subjects=["s.a", "s.b"]),
            SubjectMismatchError,
            "has the filter s.a, s.b, expected s.a",
        ),
        (bind(filter_subjects=("s.a",)), info(), SubjectMismatchError, "for the whole stream"),
        (PULL, info(), ConsumerModeError, "is a push consumer"),
        (PULL, info(bound=True, deliver_group="q"), ConsumerModeError, "is a push consumer"),
        (BIND, info(push=False), ConsumerModeError, "is a pull consumer"),
        (
            bind(max_deliver=3, ack_policy="all"),
            info(max_deliver=-1),
            ConsumerDiffersError,
            "ack_policy is 'explicit', not 'all'; max_deliver is -1, not 3",
        ),
        (QUEUE, info(deliver_group="q", flow_control=True), QueueStatusError, "flow_control"),
        (QUEUE, info(deliver_group="q", idle_heartbeat=10**9), QueueStatusError, "idle_heartbeat"),
    ],
)
def test_consumer_mismatch_is_refused(
    asked: SubscribeRequest, found: ConsumerInfo, kind: type[SubscribeError], text: str
) -> None:
    with pytest.raises(kind, match=text) as raised:
        verify_consumer(asked, found)
    assert type(raised.value) is kind
    assert "'c' of stream 'S'" in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (BIND, info()),
        (BIND, info(filter_subject="s.b")),
        (QUEUE, info(deliver_group="q")),
        (QUEUE, info(bound=True, deliver_group="q")),
        (PULL, info(push=False)),
        (PULL, info(push=False, bound=True)),
        (bind("s.a"), info()),
        (bind("s.a"), info(filter_subject="s.a")),
        (bind("s.a"), info(filter_subjects=["s.a"])),
        (bind(filter_subjects=("s.b", "s.a")), info(filter_subjects=["s.a", "s.b"])),
        # A deliver subject may differ: the consumer's own is used.
        (bind(deliver_subject="mine"), info()),
    ],
)
def test_consumer_match_is_accepted(asked: SubscribeRequest, found: ConsumerInfo) -> None:
    verify_consumer(asked, found)


@pytest.mark.parametrize(
    ("given", "existing", "found"),
    [
        (Config(), {"ack_policy": "all"}, []),
        (Config(ack_wait=30), {"ack_wait": 30_000_000_000}, []),
        (Config(ack_wait=30), {"ack_wait": 1}, ["ack_wait is 1, not 30000000000"]),
        (Config(ack_wait=30, backoff=(1,)), {"ack_wait": 10**9, "backoff": [10**9]}, []),
        (Config(backoff=(1,)), {}, ["backoff is None, not [1000000000]"]),
        (Config(flow_control=False), {}, []),
        (Config(flow_control=False), {"flow_control": True}, ["flow_control is True, not False"]),
        (Config(headers_only=True), {}, ["headers_only is False, not True"]),
        (Config(max_deliver=0, description=""), {"max_deliver": -1, "description": "x"}, []),
        (Config(metadata={"a": "1"}), {"metadata": {"a": "1", "_nats.level": "0"}}, []),
        (Config(metadata={"a": "1"}), {}, ["metadata is {'a': None}, not {'a': '1'}"]),
        (
            Config(opt_start_time="2026-01-01T01:00:00+01:00"),
            {"opt_start_time": "2026-01-01T00:00:00Z"},
            [],
        ),
        (Config(opt_start_time="2026-01-01T00:00:00Z"), {}, ["opt_start_time"]),
        (Config(sample_freq="50%"), {"sample_freq": "10%"}, ["sample_freq is '10%', not '50%'"]),
    ],
)
def test_differences(given: ConsumerConfig, existing: dict[str, Any], found: list[str]) -> None:
    said = differences(given, existing)
    assert len(said) == len(found)
    for text, start in zip(said, found, strict=True):
        assert text.startswith(start)


def test_configuration_shows_given_fields() -> None:
    assert repr(Config(ack_wait=1.5, durable_name="d")) == (
        "ConsumerConfig(ack_wait=1.5, durable_name='d')"
    )
