"""Decisions of the subscribe workflow (ADR-15), without I/O.

A :class:`SubscribeRequest` contains the arguments of a caller. The workflow calls, in this order:

1. :func:`validate_request`: rejects contradictory arguments before any request is sent.
2. :func:`verify_consumer`: compares an existing consumer with the request.
3. :func:`build_consumer_config`: otherwise builds the configuration of the consumer to create.

:func:`validate_ordered` comes before them for an ordered subscription.

The server rejects some of these errors too, but later and with a number only. It accepts others:
without a shared consumer it delivers all messages again to the second member of a "queue group".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from nats_stream_source.errors import (
    ConsumerDiffersError,
    ConsumerModeError,
    DeliverGroupError,
    DuplicateSubscriptionError,
    QueueStatusError,
    SubjectMismatchError,
    SubscribeError,
)
from nats_stream_source.jetstream.consumer_config import (
    ConsumerConfig,
    ConsumerInfo,
    differences,
)

_NAME = re.compile(r"[^\s.*>/\\]+")  # names of streams and consumers that servers accept

_ORDERED_FIELDS = {
    "deliver_policy",
    "filter_subject",
    "filter_subjects",
    "headers_only",
    "idle_heartbeat",
    "opt_start_seq",
    "opt_start_time",
}


@dataclass(frozen=True, slots=True)
class SubscribeRequest:
    """The arguments of a subscription (ADR-15, "Configuration").

    Attributes:
        subject: the subject to receive, wildcards allowed; also used to look up the stream if
            ``stream`` is None.
        stream: the stream's name.
        bind: name of an existing consumer; it is never created.
        durable: name of a durable consumer; it is created if it does not exist.
        queue: the queue group to join.
        pull: a pull subscription; otherwise a push or an ordered one.
        config: configuration of the consumer to create, or expected of an existing one.
    """

    subject: str | None = None
    stream: str | None = None
    bind: str | None = None
    durable: str | None = None
    queue: str | None = None
    pull: bool = False
    config: ConsumerConfig = field(default_factory=ConsumerConfig)

    @property
    def consumer(self) -> str | None:
        """Name of the consumer to look up; None for a new ephemeral one."""
        return self.bind or self.durable


def validate_request(request: SubscribeRequest) -> SubscribeRequest:
    """Reject contradictory arguments, in ADR-15's order; return the completed request.

    A queue group without a consumer or durable name uses its own name as the durable name.
    Otherwise each member would create its own consumer and receive all messages.

    Raises:
        QueueStatusError: heartbeats or flow control for a queue group.
        SubscribeError: neither subject nor stream; a pull subscription with ack policy "none" or
            "all"; any other contradiction. The message names the argument to change.
    """
    config = request.config
    queue = request.queue or config.deliver_group
    if queue and (config.idle_heartbeat or config.flow_control):
        raise QueueStatusError(
            f"could not subscribe in queue group {queue!r}: idle_heartbeat or flow_control is set, "
            f"and the server would send its statuses to random members; remove both"
        )
    if not request.subject and not request.stream:
        raise SubscribeError(
            "could not subscribe: neither subject nor stream is set; set one of them"
        )
    if request.pull and config.ack_policy in ("none", "all"):
        raise SubscribeError(
            f"could not subscribe: ack_policy is {config.ack_policy!r}, expected 'explicit' for a "
            f"pull subscription; change ack_policy"
        )
    _validate_names(request)
    durable = request.durable or config.durable_name
    if durable and config.durable_name and durable != config.durable_name:
        raise SubscribeError(
            f"could not subscribe: durable is {durable!r} and durable_name is "
            f"{config.durable_name!r}; set one of them"
        )
    if durable and request.bind and durable != request.bind:
        raise SubscribeError(
            f"could not subscribe: bind is {request.bind!r} and durable is {durable!r}; set one of "
            f"them"
        )
    if queue and config.deliver_group and queue != config.deliver_group:
        raise SubscribeError(
            f"could not subscribe: queue is {queue!r} and deliver_group is "
            f"{config.deliver_group!r}; set one of them"
        )
    if request.pull:
        _validate_pull(request, queue)
    elif config.flow_control and not config.idle_heartbeat:
        raise SubscribeError(
            "could not subscribe: flow_control is set without idle_heartbeat; set idle_heartbeat "
            "to at least 0.1 s"
        )
    if (
        request.subject
        and config.filter_subject
        and request.subject != config.filter_subject
        and not config.filter_subjects
    ):
        raise SubscribeError(
            f"could not subscribe: subject is {request.subject!r} and filter_subject is "
            f"{config.filter_subject!r}; set one of them"
        )
    if config.filter_subject and config.filter_subjects:
        raise SubscribeError(
            "could not subscribe: filter_subject and filter_subjects are both set; set one of them"
        )
    if queue and not durable and not request.bind:
        durable = _validate_name("queue (as the durable name)", queue)
    return replace(request, durable=None if request.bind else durable, queue=queue)


def _validate_names(request: SubscribeRequest) -> None:
    # Names and subjects become part of the subjects of requests. A request with an invalid one
    # would not receive a response.
    config = request.config
    for field_name in ("stream", "bind", "durable"):
        if (name := getattr(request, field_name)) is not None:
            _validate_name(field_name, name)
    if config.durable_name:
        _validate_name("durable_name", config.durable_name)
    if request.queue == "":
        raise SubscribeError(
            "could not subscribe: queue is '', not a valid name of a queue group; set a name or "
            "None"
        )
    for field_name, group in (("queue", request.queue), ("deliver_group", config.deliver_group)):
        if group and re.search(r"\s", group):
            raise SubscribeError(
                f"could not subscribe: {field_name} is {group!r}, not a valid name of a queue "
                f"group; remove whitespace"
            )
    if request.subject == "":
        raise SubscribeError(
            "could not subscribe: subject is '', not a valid subject; set a subject or None"
        )
    for field_name, subject in (
        ("subject", request.subject),
        ("deliver_subject", config.deliver_subject),
        ("filter_subject", config.filter_subject),
        *(("filter_subjects", subject) for subject in config.filter_subjects or ()),
    ):
        if subject and not _is_subject(subject):
            raise SubscribeError(
                f"could not subscribe: {field_name} is {subject!r}, not a valid subject; use "
                f"tokens separated by '.', with '>' only at the end and without whitespace"
            )


def _validate_name(field_name: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SubscribeError(
            f"could not subscribe: {field_name} is {name!r}, not a valid name; remove spaces and "
            f"the characters . * > / \\"
        )
    return name


def _is_subject(subject: str) -> bool:
    tokens = subject.split(".")
    return all(tokens) and not re.search(r"\s", subject) and ">" not in tokens[:-1]


def validate_ordered(config: ConsumerConfig) -> None:
    """Reject a configuration that an ordered subscription does not accept.

    Raises:
        SubscribeError: the message names the field to change.
    """
    if unsupported := sorted(config.given().keys() - _ORDERED_FIELDS):
        raise SubscribeError(
            f"could not subscribe: an ordered subscription creates its own consumer and does not "
            f"accept {', '.join(unsupported)}; remove them"
        )
    # The server would reject this for a consumer. But the start of an ordered subscription is
    # resolved in build_range_request.
    policy = config.deliver_policy
    for start, needed in (
        ("opt_start_seq", "by_start_sequence"),
        ("opt_start_time", "by_start_time"),
    ):
        if bool(getattr(config, start)) != (policy == needed):
            raise SubscribeError(
                f"could not subscribe: deliver_policy is {policy!r} and {start} is "
                f"{getattr(config, start)!r}; deliver_policy {needed!r} requires {start}, "
                f"set both or neither"
            )


def _validate_pull(request: SubscribeRequest, queue: str | None) -> None:
    if queue:
        raise SubscribeError(
            "could not subscribe: queue is set for a pull subscription, expected no queue group; "
            "use the same durable in all members, they share its messages"
        )
    push_only = {"deliver_subject", "flow_control", "idle_heartbeat", "rate_limit_bps"}
    if unsupported := sorted(push_only & request.config.given().keys()):
        raise SubscribeError(
            f"could not subscribe: a pull subscription does not accept {', '.join(unsupported)}; "
            f"remove them"
        )


def build_consumer_config(
    request: SubscribeRequest, name: str, deliver_subject: str | None
) -> dict[str, Any]:
    """Build the configuration of the consumer to create (ADR-15, "Creating the JS Consumer").

    Args:
        request: a validated request.
        name: the consumer's name; also the durable name if the request has one.
        deliver_subject: the inbox, used if the request has no deliver subject; None for pull.
    """
    config = request.config.json()
    config["name"] = name
    if request.durable:
        config["durable_name"] = request.durable
    if request.subject and not request.config.filter_subjects:
        config["filter_subject"] = request.subject
    config.setdefault("ack_policy", "explicit")
    if not request.pull:
        config.setdefault("deliver_subject", deliver_subject)
        if request.queue:
            config["deliver_group"] = request.queue
    return config


def verify_consumer(request: SubscribeRequest, info: ConsumerInfo) -> None:
    """Compare an existing consumer with the request (ADR-15, "Push Consumer active …").

    Args:
        request: a validated request.
        info: the consumer.

    Raises:
        DuplicateSubscriptionError: it is bound, and has no queue group.
        DeliverGroupError: its deliver group is not the requested queue.
        SubjectMismatchError: its filter is not the requested subject.
        ConsumerModeError: a push consumer for a pull subscription, or a pull consumer for a push
            subscription.
        ConsumerDiffersError: another difference from the requested configuration.
        QueueStatusError: it has flow control or heartbeats, and a queue was requested.
    """
    if not request.pull:
        _validate_deliver_group(request, info)
    _validate_filter(request, info)
    push = bool(info.config.get("deliver_subject"))
    if request.pull and push:
        raise ConsumerModeError(
            f"could not subscribe: {_label(info)} is a push consumer, expected a pull consumer; "
            f"call subscribe"
        )
    if not request.pull and not push:
        raise ConsumerModeError(
            f"could not subscribe: {_label(info)} is a pull consumer, expected a push consumer; "
            f"call subscribe_pull"
        )
    if changed := differences(request.config, info.config):
        raise ConsumerDiffersError(
            f"could not subscribe: {_label(info)} exists with another configuration: "
            f"{'; '.join(changed)}; subscribing does not change a consumer, update it or change "
            f"config"
        )
    if request.queue and info.config.get("flow_control"):
        raise QueueStatusError(
            f"could not subscribe: {_label(info)} has flow control, which queue groups do not "
            f"support; use a consumer without it"
        )
    if request.queue and info.config.get("idle_heartbeat"):
        raise QueueStatusError(
            f"could not subscribe: {_label(info)} has heartbeats, which queue groups do not "
            f"support; use a consumer without them"
        )


def _validate_deliver_group(request: SubscribeRequest, info: ConsumerInfo) -> None:
    group = info.config.get("deliver_group")
    if info.push_bound and not group and not request.queue:
        raise DuplicateSubscriptionError(
            f"could not subscribe: {_label(info)} already has a subscription and accepts one only; "
            f"close it, or use a queue group"
        )
    if not request.queue and group:
        raise DeliverGroupError(
            f"could not subscribe: {_label(info)} has the deliver group {group!r}, expected no "
            f"deliver group; subscribe with queue={group!r}"
        )
    if request.queue and group and group != request.queue:
        raise DeliverGroupError(
            f"could not subscribe: {_label(info)} has the deliver group {group!r}, expected "
            f"{request.queue!r}; change queue"
        )
    if request.queue and not group:
        raise DeliverGroupError(
            f"could not subscribe: {_label(info)} was created without a deliver group, expected "
            f"{request.queue!r}; use another consumer or subscribe without queue"
        )


def _validate_filter(request: SubscribeRequest, info: ConsumerInfo) -> None:
    config, existing = request.config, info.filters
    expected = config.filter_subjects or ((config.filter_subject,) if config.filter_subject else ())
    if not expected and request.subject and existing:
        expected = (request.subject,)
    if expected and frozenset(expected) != existing:
        raise SubjectMismatchError(
            f"could not subscribe: {_label(info)} has the filter {_format_filters(existing)}, "
            f"expected {_format_filters(frozenset(expected))}; change subject or use another "
            f"consumer"
        )


def _format_filters(filters: frozenset[str]) -> str:
    return ", ".join(sorted(filters)) or "for the whole stream"


def _label(info: ConsumerInfo) -> str:
    return f"consumer {info.name!r} of stream {info.stream!r}"
