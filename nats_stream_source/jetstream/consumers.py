"""Consumers: the info of one, and one that exists for a few requests.

The response to the creation of a consumer has facts that no other request returns: how many
messages match from a sequence on, where a deliver policy starts, and which server serves it.

The consumers of an ordered reader live longer than a block: ``ordered/consumer.py`` deletes them,
on the next connection if the first one was lost.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nats_stream_source.aio.tasks import run_to_completion
from nats_stream_source.errors import NatsSourceError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.json_fields import integer, object_, string

_INACTIVE_THRESHOLD = 5_000_000_000  # nanoseconds


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


def unacknowledged_config(filters: Sequence[str], inactive_threshold: int) -> dict[str, Any]:
    """The fields of every consumer of the package's own reads; the threshold in nanoseconds."""
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


@contextlib.asynccontextmanager
async def temporary_consumer(
    jetstream: JetStream,
    stream: str,
    purpose: str,
    filters: Sequence[str] = (),
    **config: Any,
) -> AsyncIterator[ConsumerInfo]:
    """Create a consumer without acks in memory, and delete it at the end of the block.

    It is deleted after an error and a cancellation too, and after a creation without a response. If
    the deletion fails, the server removes it after its ``inactive_threshold``.

    Args:
        purpose: a word of the consumer's name.
        filters: subjects; none for the whole stream.
        config: further fields of the configuration, as the server expects them.
    """
    name = f"{jetstream.connection.settings.consumer_prefix}-{purpose}-{uuid.uuid4().hex[:12]}"
    config = {"name": name, **unacknowledged_config(filters, _INACTIVE_THRESHOLD), **config}
    try:
        yield ConsumerInfo.parse(await jetstream.add_short_lived_consumer(stream, config))
    finally:
        with contextlib.suppress(NatsSourceError):
            await run_to_completion(jetstream.delete_consumer(stream, name))
