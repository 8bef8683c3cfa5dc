"""The two publishers, for fault tests that both must pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from nats_stream_source.jetstream.publish import MAX_IN_FLIGHT
from nats_stream_source.jetstream.publish.batch_publisher import BatchPublisher
from nats_stream_source.jetstream.publish.fast_ingest_publisher import FastIngestPublisher
from tests.faults.writing.fast_ingest import AtResponse, Responses
from tests.faults.writing.publishing import AtPubAck, Messages, PubAcks, publish_all
from tests.support.nats.streams import create_stream


@dataclass(frozen=True, slots=True)
class PublisherKind:
    """A publisher and the faults of its acknowledgements.

    Attributes:
        name: a part of names of streams.
        acks: drops acknowledgements by their numbers.
        at_ack: acts when the acknowledgement with a number arrives.
        middle: the number of an acknowledgement that arrives while 2,000 messages are sent.
        max_in_flight: the limit of the publisher.
    """

    name: str
    publisher: type[BatchPublisher | FastIngestPublisher]
    acks: type[PubAcks]
    at_ack: type[AtPubAck]
    middle: int
    max_in_flight: int

    def create_stream(self, url: str, name: str, **config: Any) -> None:
        """Create a stream with the subjects ``<name>.>`` that accepts both publishers."""
        create_stream(url, name, allow_batched=self.publisher is FastIngestPublisher, **config)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of ``publishing`` for this publisher."""
        return {"kind": self.publisher, "max_in_flight": self.max_in_flight}

    async def publish_all(self, servers: str, messages: Messages, **settings: Any) -> None:
        """Publish the messages on a connection of their own: each is stored."""
        await publish_all(servers, messages, **self.settings, **settings)


BATCH = PublisherKind("BATCH", BatchPublisher, PubAcks, AtPubAck, middle=500, max_in_flight=500)
FAST_INGEST = PublisherKind(
    "FAST", FastIngestPublisher, Responses, AtResponse, middle=4, max_in_flight=MAX_IN_FLIGHT
)

each_publisher = pytest.mark.parametrize("kind", [BATCH, FAST_INGEST], ids=["batch", "fast ingest"])
with_and_without_ids = pytest.mark.parametrize(
    "ids", [False, True], ids=["without ids", "with ids"]
)
