"""Fast ingest in the fault tests: publishers, and the responses of servers on their way."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from nats_stream_source.jetstream.publish.column_publisher import ColumnPublisher
from nats_stream_source.jetstream.publish.fast_ingest_publisher import FastIngestPublisher
from tests.faults.writing.publishing import AtPubAck, PubAcks, publish_all, publishing
from tests.support.nats.streams import create_stream
from tests.support.proxy.fault_proxy import Proxy, subject_of

FLOW = 500
"""Messages that a server acknowledges together at most."""


def create_fast(url: str, name: str, **config: Any) -> None:
    """A stream with the subjects ``<name>.>`` that accepts fast ingest."""
    create_stream(url, name, allow_batched=True, **config)


def fast_publishing(
    servers: str, stream: str, **settings: Any
) -> AbstractAsyncContextManager[ColumnPublisher]:
    """A publisher with fast ingest on a connection of its own."""
    return publishing(servers, stream, kind=FastIngestPublisher, **settings)


publish_all_fast = partial(publish_all, kind=FastIngestPublisher)


def is_response(frame: bytes) -> bool:
    """Whether a frame of the server is a response to a message of a batch."""
    return frame.startswith((b"MSG ", b"HMSG ")) and subject_of(frame).endswith(".$FI")


def response_of(frame: bytes) -> dict[str, Any]:
    """The JSON object of a response."""
    response: dict[str, Any] = json.loads(frame.partition(b"\r\n")[2])
    return response


def responses(proxy: Proxy, kind: str) -> list[dict[str, Any]]:
    """The responses of a kind that passed: ``ack``, ``gap``, ``err``, ``count``, ``error``."""
    found = [response_of(frame) for frame in proxy.seen if is_response(frame)]
    return [
        one for one in found if one.get("type", kind) == kind and (kind in one or "type" in one)
    ]


class Responses(PubAcks):
    """The responses with these numbers, counted from 1 over all connections."""

    matches = staticmethod(is_response)


class AtResponse(AtPubAck):
    """Call ``act`` when the response with this number comes; the response is lost."""

    matches = staticmethod(is_response)
