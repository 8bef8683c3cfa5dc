"""The configuration and the info of a consumer. Pure.

The field names are the server's. A field that is not set is None and is not sent: the server sets
its default. So the fields that the user set are known, and can be compared with an existing
consumer (ADR-15, "Other checks").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nats_stream_source.jetstream.json_fields import integer, object_, string
from nats_stream_source.jetstream.times import nanoseconds

_DURATIONS = frozenset(("ack_wait", "idle_heartbeat", "inactive_threshold", "max_expires"))


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


def unacknowledged_config(filters: Sequence[str], inactive_threshold: int) -> dict[str, Any]:
    """The fields that every consumer of the package's own reads has.

    Args:
        filters: subjects; none for the whole stream.
        inactive_threshold: nanoseconds.
    """
    return {
        "ack_policy": "none",
        # A server sets the limit of the stream (consumer_limits) where the field is absent, and
        # then refuses the consumer, since it does not have acks (10082).
        "max_ack_pending": -1,
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": inactive_threshold,
        **({"filter_subjects": list(filters)} if len(filters) > 1 else {}),
        **({"filter_subject": filters[0]} if len(filters) == 1 else {}),
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """The response to ``CONSUMER.INFO``.

    Attributes:
        stream, name: the stream and the name of the consumer.
        config: the server's configuration object.
        push_bound: whether the deliver subject of a push consumer has a subscriber.
        stream_seq: the sequence of the last delivered message; 0 before the first.
        num_pending: number of matching messages that were not delivered yet.
        leader: name of the consumer leader; None outside of a cluster.
    """

    stream: str
    name: str
    config: dict[str, Any]
    push_bound: bool
    stream_seq: int
    num_pending: int
    leader: str | None

    @classmethod
    def parse(cls, response: Mapping[str, Any]) -> ConsumerInfo:
        """From the API's JSON object; raises ProtocolError if a field is missing or invalid."""
        return cls(
            stream=string(response, "stream_name"),
            name=string(response, "name"),
            config=object_(response, "config"),
            push_bound=bool(response.get("push_bound")),
            stream_seq=integer(response, "delivered", "stream_seq", default=0),
            num_pending=integer(response, "num_pending", default=0),
            leader=string(response, "cluster", "leader", default="") or None,
        )

    @property
    def label(self) -> str:
        """The consumer and its stream, for messages."""
        return f"consumer {self.name!r} of stream {self.stream!r}"

    @property
    def filters(self) -> frozenset[str]:
        """The filter subjects; empty for the whole stream."""
        one, many = self.config.get("filter_subject"), self.config.get("filter_subjects")
        return frozenset([one] if one else many or ())

    @property
    def heartbeat(self) -> float | None:
        """Seconds between idle heartbeats of a push consumer; None without heartbeats."""
        interval = self.config.get("idle_heartbeat")
        return interval / 1e9 if interval else None

    @property
    def acks(self) -> bool:
        """Whether deliveries must be acknowledged."""
        return bool(self.config.get("ack_policy", "none") != "none")


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
