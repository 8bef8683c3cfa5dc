"""The decisions of the subscribe workflow (ADR-15), without any I/O.

A :class:`SubscribeRequest` says what a caller wants. In this order:

1. :func:`check_request`: what contradicts itself is refused before anything is sent.
2. :func:`check_consumer`: a consumer that exists is held against what was asked for.
3. :func:`new_consumer`: else the configuration of the consumer to create.

The server would refuse some of this too, but late, by a number, and some of it never: it gives the
second member of a "queue group" without a shared consumer all messages again.
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

_NAME = re.compile(r"[^\s.*>/\\]+")  # what servers take as the name of a stream or consumer

_ORDERED = {
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
    """What a subscription is asked to be (ADR-15, "Configuration").

    Attributes:
        subject: what to receive; may have wildcards. Also leads to the stream, if none is named.
        stream: the stream's name.
        bind: the name of a consumer that exists; it is never created.
        durable: the name of a durable consumer, created if it does not exist.
        queue: the queue group to be a member of.
        pull: a pull subscription; else a push one.
        ordered: an ordered consumer; ephemeral, without acks.
        config: the configuration of the consumer to create, or to find.
    """

    subject: str | None = None
    stream: str | None = None
    bind: str | None = None
    durable: str | None = None
    queue: str | None = None
    pull: bool = False
    ordered: bool = False
    config: ConsumerConfig = field(default_factory=ConsumerConfig)

    @property
    def consumer(self) -> str | None:
        """The name of the consumer to look up; None for a new ephemeral one."""
        return self.bind or self.durable


def check_request(request: SubscribeRequest) -> SubscribeRequest:
    """Refuse what cannot be, in ADR-15's order; return the request with its names filled in.

    A queue group without a consumer or durable name gets its own name as the durable name:
    otherwise each member would make a consumer for itself and receive everything.

    Raises:
        QueueStatusError: heartbeats or flow control for a queue group.
        SubscribeError: neither subject nor stream; a pull subscription with ack policy "none" or
            "all"; anything else that contradicts itself. The text says what to change.
    """
    config = request.config
    queue = request.queue or config.deliver_group
    if queue and (config.idle_heartbeat or config.flow_control):
        raise QueueStatusError(
            f"queue group {queue!r}: idle_heartbeat and flow_control are not for queue groups, "
            f"since the server would send them to random members: leave them out"
        )
    if not request.subject and not request.stream:
        raise SubscribeError("neither a subject nor a stream: name one of them")
    if request.pull and config.ack_policy in ("none", "all"):
        raise SubscribeError(
            f"ack_policy {config.ack_policy!r} is not for pull subscriptions: use 'explicit'"
        )
    _check_names(request)
    durable = request.durable or config.durable_name
    if durable and config.durable_name and durable != config.durable_name:
        raise SubscribeError(f"two durable names: {durable!r} and {config.durable_name!r}")
    if durable and request.bind and durable != request.bind:
        raise SubscribeError(
            f"bind names the consumer {request.bind!r} and durable {durable!r}: give one of them"
        )
    if queue and config.deliver_group and queue != config.deliver_group:
        raise SubscribeError(
            f"queue is {queue!r} and deliver_group {config.deliver_group!r}: give one of them"
        )
    if request.ordered:
        _check_ordered(request)
    if request.pull:
        _check_pull(request, queue)
    elif config.flow_control and not config.idle_heartbeat:
        raise SubscribeError("flow_control needs idle_heartbeat, at least 0.1 s")
    if (
        request.subject
        and config.filter_subject
        and request.subject != config.filter_subject
        and not config.filter_subjects
    ):
        raise SubscribeError(
            f"subject is {request.subject!r} and filter_subject {config.filter_subject!r}: give "
            f"one of them"
        )
    if config.filter_subject and config.filter_subjects:
        raise SubscribeError("filter_subject and filter_subjects exclude each other")
    if queue and not durable and not request.bind:
        durable = _checked_name("queue (as the durable name)", queue)
    return replace(request, durable=None if request.bind else durable, queue=queue)


def _check_names(request: SubscribeRequest) -> None:
    # Names and subjects become part of subjects that the client sends to: what is wrong here would
    # be a request that nobody answers.
    config = request.config
    for what in ("stream", "bind", "durable"):
        if (name := getattr(request, what)) is not None:
            _checked_name(what, name)
    if config.durable_name:
        _checked_name("durable_name", config.durable_name)
    if request.queue == "":
        raise SubscribeError("queue: '' is no name of a queue group")
    for what, group in (("queue", request.queue), ("deliver_group", config.deliver_group)):
        if group and re.search(r"\s", group):
            raise SubscribeError(f"{what}: {group!r} is no name of a queue group")
    if request.subject == "":
        raise SubscribeError("subject: '' is no subject")
    for what, subject in (
        ("subject", request.subject),
        ("deliver_subject", config.deliver_subject),
        ("filter_subject", config.filter_subject),
        *(("filter_subjects", subject) for subject in config.filter_subjects or ()),
    ):
        if subject and not _is_subject(subject):
            raise SubscribeError(f"{what}: {subject!r} is no subject")


def _checked_name(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SubscribeError(f"{what}: {name!r} is no name: no spaces and none of . * > / \\")
    return name


def _is_subject(subject: str) -> bool:
    tokens = subject.split(".")
    return all(tokens) and not re.search(r"\s", subject) and ">" not in tokens[:-1]


def _check_ordered(request: SubscribeRequest) -> None:
    wrong = [what for what in ("bind", "durable", "queue", "pull") if getattr(request, what)]
    wrong += sorted(request.config.given().keys() - _ORDERED)
    if wrong:
        raise SubscribeError(
            f"an ordered subscription makes and remakes a consumer of its own, so these cannot be "
            f"chosen: {', '.join(wrong)}"
        )
    # The server would say so of a consumer; but where this one starts is decided here.
    policy = request.config.deliver_policy
    for start, needed in (
        ("opt_start_seq", "by_start_sequence"),
        ("opt_start_time", "by_start_time"),
    ):
        if bool(getattr(request.config, start)) != (policy == needed):
            raise SubscribeError(
                f"deliver_policy is {policy!r} and {start} {getattr(request.config, start)!r}: "
                f"{needed!r} and {start} go together"
            )


def _check_pull(request: SubscribeRequest, queue: str | None) -> None:
    if queue:
        raise SubscribeError(
            "a pull subscription has no queue group: all that use one consumer share its messages"
        )
    wrong = {"deliver_subject", "flow_control", "idle_heartbeat", "rate_limit_bps"}
    if found := sorted(wrong & request.config.given().keys()):
        raise SubscribeError(f"not for pull subscriptions: {', '.join(found)}")


def new_consumer(
    request: SubscribeRequest, name: str, deliver_subject: str | None
) -> dict[str, Any]:
    """The configuration of the consumer to create (ADR-15, "Creating the JS Consumer").

    Args:
        request: a checked one.
        name: the consumer's name; also the durable name where the request has one.
        deliver_subject: the inbox, where the request names no subject; None for pull.
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


def check_consumer(request: SubscribeRequest, info: ConsumerInfo) -> None:
    """Hold a consumer that exists against what was asked for (ADR-15, "Push Consumer active …").

    Args:
        request: a checked one.
        info: the consumer.

    Raises:
        DuplicateSubscriptionError: it is bound, and no queue group.
        DeliverGroupError: its deliver group is not the queue that was asked for.
        SubjectMismatchError: its filter is not the subject.
        ConsumerModeError: a push consumer for a pull subscription, or the other way round.
        ConsumerDiffersError: another difference to what the caller gave.
        QueueStatusError: it has flow control or heartbeats and a queue was asked for.
    """
    if not request.pull:
        _check_group(request, info)
    _check_filter(request, info)
    push = bool(info.config.get("deliver_subject"))
    if request.pull and push:
        raise ConsumerModeError(
            f"{_named(info)} is a push consumer: a pull subscription cannot use it"
        )
    if not request.pull and not push:
        raise ConsumerModeError(f"{_named(info)} is a pull consumer: ask with pull=True")
    if found := differences(request.config, info.config):
        raise ConsumerDiffersError(
            f"{_named(info)} exists and subscribing does not change it: {'; '.join(found)}"
        )
    if request.queue and info.config.get("flow_control"):
        raise QueueStatusError(f"{_named(info)} has flow control, not supported in queue groups")
    if request.queue and info.config.get("idle_heartbeat"):
        raise QueueStatusError(f"{_named(info)} has heartbeats, not supported in queue groups")


def _check_group(request: SubscribeRequest, info: ConsumerInfo) -> None:
    group = info.config.get("deliver_group")
    if info.push_bound and not group and not request.queue:
        raise DuplicateSubscriptionError(
            f"{_named(info)} has a subscription already, and it is for one only"
        )
    if not request.queue and group:
        raise DeliverGroupError(
            f"{_named(info)} was created for the queue group {group!r}: ask with that queue"
        )
    if request.queue and group and group != request.queue:
        raise DeliverGroupError(
            f"{_named(info)} was created for the queue group {group!r}, not {request.queue!r}"
        )
    if request.queue and not group:
        raise DeliverGroupError(
            f"{_named(info)} was created without a deliver group: no queue group can use it"
        )


def _check_filter(request: SubscribeRequest, info: ConsumerInfo) -> None:
    config, there = request.config, info.filters
    asked = config.filter_subjects or ((config.filter_subject,) if config.filter_subject else ())
    if not asked and request.subject and there:
        asked = (request.subject,)
    if asked and frozenset(asked) != there:
        raise SubjectMismatchError(
            f"{_named(info)} has the filter {_listed(there)}, not {_listed(frozenset(asked))}"
        )


def _listed(filters: frozenset[str]) -> str:
    return ", ".join(sorted(filters)) or "of the whole stream"


def _named(info: ConsumerInfo) -> str:
    return f"consumer {info.name!r} of stream {info.stream!r}"
