"""A JetStream client for asyncio programs: five design documents of NATS over nats-py's connection.

This module names the public API, see docs/jetstream.md; inside the package, modules are imported by
their own names. The layer does not depend on Spark. The module of a name is imported when the name
is first used: Spark starts several processes per query, which need few of these modules, and each
process would spend time on importing all of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nats_stream_source.jetstream.api import JetStream, StoredMessage, connect
    from nats_stream_source.jetstream.direct_get.client import DirectGet
    from nats_stream_source.jetstream.kv.config import KeyValueConfig
    from nats_stream_source.jetstream.kv.entry import Entry
    from nats_stream_source.jetstream.kv.reader import ReadOnlyKeyValue
    from nats_stream_source.jetstream.kv.store import KeyValue
    from nats_stream_source.jetstream.kv.watch import Watch
    from nats_stream_source.jetstream.object_store.store import ObjectStore
    from nats_stream_source.jetstream.publish.batch_publisher import (
        BatchPublisher,
        FastIngestPublisher,
        MessageColumns,
        Rejection,
    )
    from nats_stream_source.jetstream.publish.publisher import PubAck, Publisher
    from nats_stream_source.jetstream.subscriptions.message import JsMessage
    from nats_stream_source.jetstream.subscriptions.subscribe import (
        ConsumerConfig,
        subscribe,
        subscribe_ordered,
        subscribe_pull,
    )

__all__ = [
    "BatchPublisher",
    "ConsumerConfig",
    "DirectGet",
    "Entry",
    "FastIngestPublisher",
    "JetStream",
    "JsMessage",
    "KeyValue",
    "KeyValueConfig",
    "MessageColumns",
    "ObjectStore",
    "PubAck",
    "Publisher",
    "ReadOnlyKeyValue",
    "Rejection",
    "StoredMessage",
    "Watch",
    "connect",
    "subscribe",
    "subscribe_ordered",
    "subscribe_pull",
]

_MODULES = {
    "BatchPublisher": "publish.batch_publisher",
    "ConsumerConfig": "subscriptions.subscribe",
    "DirectGet": "direct_get.client",
    "Entry": "kv.entry",
    "FastIngestPublisher": "publish.batch_publisher",
    "JetStream": "api",
    "JsMessage": "subscriptions.message",
    "KeyValue": "kv.store",
    "KeyValueConfig": "kv.config",
    "MessageColumns": "publish.batch_publisher",
    "ObjectStore": "object_store.store",
    "PubAck": "publish.publisher",
    "Publisher": "publish.publisher",
    "ReadOnlyKeyValue": "kv.reader",
    "Rejection": "publish.batch_publisher",
    "StoredMessage": "api",
    "Watch": "kv.watch",
    "connect": "api",
    "subscribe": "subscriptions.subscribe",
    "subscribe_ordered": "subscriptions.subscribe",
    "subscribe_pull": "subscriptions.subscribe",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
