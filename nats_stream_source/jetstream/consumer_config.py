"""A consumer's configuration as a user writes it, and what the server says of a consumer. Pure.

Field names are the server's own. What was not given is None and is not sent: the server fills it
in. So "what the user gave" stays known, and can be compared with a consumer that exists already
(ADR-15, "Other checks").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nats_stream_source.jetstream.answer import number, table, text
from nats_stream_source.jetstream.times import nanoseconds

_DURATIONS = frozenset(("ack_wait", "idle_heartbeat", "inactive_threshold", "max_expires"))


@dataclass(frozen=True, slots=True)
class ConsumerConfig:
    """A consumer's configuration (ADR-15, "Configuration"); None for what the server shall choose.

    Durations (``ack_wait``, ``backoff``, ``idle_heartbeat``, ``inactive_threshold``,
    ``max_expires``) are seconds, ``opt_start_time`` is RFC 3339, ``rate_limit_bps`` bits per
    second. The newer fields, which the document does not have, stand at the end.
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
        """The fields that were given, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def json(self) -> dict[str, Any]:
        """What was given, as the server wants it: durations in nanoseconds."""
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
class ConsumerInfo:
    """What ``CONSUMER.INFO`` says of a consumer.

    Attributes:
        stream, name: whose it is.
        config: the server's own configuration object.
        push_bound: whether somebody subscribes to the deliver subject of a push consumer.
        consumer_seq, stream_seq: the last delivered ones; 0 before the first.
        num_pending: how many messages match and were not delivered yet.
        leader: the server that leads it in a cluster; None outside.
    """

    stream: str
    name: str
    config: dict[str, Any]
    push_bound: bool
    consumer_seq: int
    stream_seq: int
    num_pending: int
    leader: str | None

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> ConsumerInfo:
        """From the API's JSON object; ProtocolError when it is none of a consumer."""
        return cls(
            stream=text(answer, "stream_name"),
            name=text(answer, "name"),
            config=table(answer, "config"),
            push_bound=bool(answer.get("push_bound")),
            consumer_seq=number(answer, "delivered", "consumer_seq", default=0),
            stream_seq=number(answer, "delivered", "stream_seq", default=0),
            num_pending=number(answer, "num_pending", default=0),
            leader=text(answer, "cluster", "leader", default="") or None,
        )

    @property
    def filters(self) -> frozenset[str]:
        """Its filter subjects; none for the whole stream."""
        one, many = self.config.get("filter_subject"), self.config.get("filter_subjects")
        return frozenset([one] if one else many or ())

    @property
    def heartbeat(self) -> float | None:
        """Seconds between idle heartbeats of a push consumer; None without."""
        interval = self.config.get("idle_heartbeat")
        return interval / 1e9 if interval else None

    @property
    def acks(self) -> bool:
        """Whether deliveries are to be acknowledged."""
        return bool(self.config.get("ack_policy", "none") != "none")


# Checked by rules of their own, or not at all: a deliver subject is the one thing that may differ.
_APART = frozenset(
    ("deliver_group", "deliver_subject", "durable_name", "filter_subject", "filter_subjects")
)


def differences(given: ConsumerConfig, existing: Mapping[str, Any]) -> list[str]:
    """What was given and is otherwise in a consumer that exists, in words (ADR-15).

    A number, text or list that is empty or zero counts as not given, since the server takes it so.
    Of ``metadata`` only the given keys are compared: the server adds its own.
    """
    found = []
    for name, wanted in given.json().items():
        if name in _APART or (not wanted and not isinstance(wanted, bool)):
            continue
        there = existing.get(name)
        if name == "metadata":
            there = {key: (there or {}).get(key) for key in wanted}
        elif name == "opt_start_time" and there:
            wanted, there = nanoseconds(wanted), nanoseconds(there)
        elif isinstance(wanted, bool):
            there = bool(there)
        elif name == "ack_wait" and given.backoff:
            continue  # the server puts the first backoff in its place
        if wanted != there:
            found.append(f"{name} is {there!r}, not {wanted!r}")
    return found
