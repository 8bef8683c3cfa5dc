"""Decisions of the subscribe workflow (ADR-15), without I/O.

The workflow calls, in this order:

1. :func:`validate_request`: rejects contradictory arguments before any request is sent.
2. :func:`verify_consumer`: compares an existing consumer with the request.
3. :func:`build_consumer_config`: otherwise builds the configuration of the consumer to create.

Checked here is what the server accepts and does not do (without a shared consumer it delivers all
messages again to the second member of a "queue group"), and what would not reach it. The server
rejects the other contradictions of a configuration (:class:`ApiError`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from nats_stream_source.errors import (
    ConsumerDiffersError,
    ConsumerModeError,
    DeliverGroupError,
    DuplicateSubscriptionError,
    QueueStatusError,
    SubjectMismatchError,
    SubscribeError,
)
from nats_stream_source.jetstream.consumers import ConsumerInfo
from nats_stream_source.jetstream.times import nanoseconds

_DURATIONS = frozenset(("ack_wait", "idle_heartbeat", "inactive_threshold", "max_expires"))
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
class ConsumerConfig:
    """A consumer's configuration (ADR-15, "Configuration"); None for the server's default.

    Durations (``ack_wait``, ``backoff``, ``idle_heartbeat``, ``inactive_threshold``,
    ``max_expires``) are seconds, ``opt_start_time`` is RFC 3339, ``rate_limit_bps`` bits per
    second. The fields at the end are newer than the document.
    """

    ack_policy: str | None = None
    ack_wait: float | None = None
    deliver_group: str | None = None
    deliver_policy: str | None = None
    deliver_subject: str | None = None
    description: str | None = None
    durable_name: str | None = None
    filter_subject: str | None = None
    flow_control: bool | None = None
    idle_heartbeat: float | None = None
    max_ack_pending: int | None = None
    max_deliver: int | None = None
    max_waiting: int | None = None
    opt_start_seq: int | None = None
    opt_start_time: str | None = None
    rate_limit_bps: int | None = None
    replay_policy: str | None = None
    sample_freq: str | None = None

    backoff: tuple[float, ...] | None = None
    filter_subjects: tuple[str, ...] | None = None
    headers_only: bool | None = None
    inactive_threshold: float | None = None
    max_batch: int | None = None
    max_bytes: int | None = None
    max_expires: float | None = None
    mem_storage: bool | None = None
    metadata: Mapping[str, str] | None = None
    num_replicas: int | None = None

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.given().items())
        return f"ConsumerConfig({given})"

    def given(self) -> dict[str, Any]:
        """The fields that were set, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def json(self) -> dict[str, Any]:
        """The fields that were set, as the server expects them: durations in nanoseconds."""
        result = self.given()
        for name in _DURATIONS & result.keys():
            result[name] = _ns(result[name])
        if self.backoff is not None:
            result["backoff"] = [_ns(step) for step in self.backoff]
        if self.filter_subjects is not None:
            result["filter_subjects"] = list(self.filter_subjects)
        if self.metadata is not None:
            result["metadata"] = dict(self.metadata)
        return result


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


@dataclass(frozen=True, slots=True)
class SubscribeRequest:
    """The arguments of a subscription, see :func:`subscribe`; ``pull`` for a pull subscription."""

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
        SubscribeError: any other contradiction. The message names the argument to change.
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
    if request.pull and config.deliver_subject:
        raise SubscribeError(
            "could not subscribe: deliver_subject is set, which creates a push consumer; remove "
            "it, or call subscribe"
        )
    _validate_names(request)
    durable = _agreed(durable=request.durable, durable_name=config.durable_name)
    _agreed(bind=request.bind, durable=durable)
    _agreed(queue=request.queue, deliver_group=config.deliver_group)
    if not config.filter_subjects:
        _agreed(subject=request.subject, filter_subject=config.filter_subject)
    if queue and not durable and not request.bind:
        _validate_name("queue (as the durable name)", queue)
        durable = queue
    return replace(request, durable=None if request.bind else durable, queue=queue)


def _agreed(**given: str | None) -> str | None:
    """The one value that arguments of the same meaning have."""
    values = {name: value for name, value in given.items() if value}
    if len(set(values.values())) > 1:
        observed = " and ".join(f"{name} is {value!r}" for name, value in values.items())
        raise SubscribeError(f"could not subscribe: {observed}; set one of them")
    return next(iter(values.values()), None)


def _validate_names(request: SubscribeRequest) -> None:
    """Names and subjects become a part of requests, which would not get a response."""
    config = request.config
    for name in ("stream", "bind", "durable"):
        _validate_name(name, getattr(request, name))
    _validate_name("durable_name", config.durable_name or None)
    for name, subject in (
        ("subject", request.subject),
        ("queue", request.queue),
        ("deliver_group", config.deliver_group or None),
        ("deliver_subject", config.deliver_subject or None),
        ("filter_subject", config.filter_subject or None),
        *(("filter_subjects", subject) for subject in config.filter_subjects or ()),
    ):
        tokens = "" if subject is None else subject.split(".")
        if not all(tokens) or re.search(r"\s", subject or "") or ">" in tokens[:-1]:
            raise SubscribeError(
                f"could not subscribe: {name} is {subject!r}, not a valid subject; use tokens "
                f"separated by '.', with '>' only at the end and without whitespace"
            )


def _validate_name(argument: str, name: str | None) -> None:
    if name is not None and not _NAME.fullmatch(name):
        raise SubscribeError(
            f"could not subscribe: {argument} is {name!r}, not a valid name; remove spaces and "
            f"the characters . * > / \\"
        )


def validate_ordered(config: ConsumerConfig) -> None:
    """Raise SubscribeError for a configuration that an ordered subscription does not accept."""
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


def build_consumer_config(
    request: SubscribeRequest, name: str, deliver_subject: str | None
) -> dict[str, Any]:
    """Build the configuration of the consumer to create (ADR-15, "Creating the JS Consumer").

    ``deliver_subject`` is the inbox, used if the request has no deliver subject.
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
    """Compare an existing consumer with a validated request (ADR-15, "Push Consumer active …").

    Raises:
        DuplicateSubscriptionError: it is bound, and has no queue group.
        DeliverGroupError: its deliver group is not the requested queue.
        SubjectMismatchError: its filter is not the requested subject.
        ConsumerModeError: a push consumer for a pull subscription, or a pull consumer for a push
            subscription.
        ConsumerDiffersError: another difference from the requested configuration.
        QueueStatusError: it has flow control or heartbeats, and a queue was requested.
    """

    def refuse(kind: type[SubscribeError], problem: str) -> NoReturn:
        raise kind(
            f"could not subscribe: consumer {info.name!r} of stream {info.stream!r} {problem}"
        )

    config = request.config
    group, queue = info.config.get("deliver_group") or None, request.queue or None
    if not request.pull and info.push_bound and not group and not queue:
        refuse(
            DuplicateSubscriptionError,
            "already has a subscription and accepts one only; close it, or use a queue group",
        )
    if not request.pull and group != queue:
        refuse(
            DeliverGroupError,
            f"has the deliver group {group!r}, expected {queue!r}; subscribe with queue={group!r}, "
            f"or use another consumer",
        )
    expected = config.filter_subjects or ((config.filter_subject,) if config.filter_subject else ())
    if not expected and request.subject and info.filters:
        expected = (request.subject,)
    if expected and frozenset(expected) != info.filters:
        refuse(
            SubjectMismatchError,
            f"has the filter {', '.join(sorted(info.filters)) or 'for the whole stream'}, expected "
            f"{', '.join(sorted(expected))}; change subject or use another consumer",
        )
    is_pull = not info.config.get("deliver_subject")
    if is_pull != request.pull:
        found, wanted = ("pull", "push") if is_pull else ("push", "pull")
        call = "subscribe_pull" if is_pull else "subscribe"
        problem = f"is a {found} consumer, expected a {wanted} consumer; call {call}"
        refuse(ConsumerModeError, problem)
    if changed := differences(config, info.config):
        refuse(
            ConsumerDiffersError,
            f"exists with another configuration: {'; '.join(changed)}; subscribing does not change "
            f"a consumer, update it or change config",
        )
    for status in ("flow_control", "idle_heartbeat"):
        if queue and info.config.get(status):
            refuse(
                QueueStatusError,
                f"has {status}, which queue groups do not support; use a consumer without it",
            )


# Compared by other rules, or not at all: only the deliver subject may differ.
_NOT_COMPARED = frozenset(
    ("deliver_group", "deliver_subject", "durable_name", "filter_subject", "filter_subjects")
)


def differences(given: ConsumerConfig, existing: Mapping[str, Any]) -> list[str]:
    """The set fields that differ in an existing consumer, as messages (ADR-15).

    An integer, string or list that is zero or empty counts as not set, as in the server. Of
    ``metadata`` only the given keys are compared: the server adds its own.
    """
    result = []
    for name, expected in given.json().items():
        if name in _NOT_COMPARED or (not expected and not isinstance(expected, bool)):
            continue
        actual = existing.get(name)
        if name == "metadata":
            actual = {key: (actual or {}).get(key) for key in expected}
        elif name == "opt_start_time" and actual:
            expected, actual = nanoseconds(expected), nanoseconds(actual)
        elif isinstance(expected, bool):
            actual = bool(actual)
        elif name == "ack_wait" and given.backoff:
            continue  # the server replaces it with the first backoff
        if expected != actual:
            result.append(f"{name} is {actual!r}, not {expected!r}")
    return result
