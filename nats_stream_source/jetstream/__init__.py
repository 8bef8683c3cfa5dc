"""A JetStream client for asyncio programs: five design documents of NATS over nats-py's connection.

This module names the public API, see docs/jetstream.md; inside the package, modules are imported by
their own names. The layer does not depend on Spark. The module of a name is imported when the name
is first used: Spark starts several processes per query, which need few of these modules, and each
process would spend time on importing all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nats_stream_source.deferred import deferred

if TYPE_CHECKING:
    from nats_stream_source.jetstream.api import (
        JetStream as JetStream,
        StoredMessage as StoredMessage,
        connect as connect,
    )
    from nats_stream_source.jetstream.direct_get.client import DirectGet as DirectGet
    from nats_stream_source.jetstream.kv.config import KeyValueConfig as KeyValueConfig
    from nats_stream_source.jetstream.kv.entry import Entry as Entry
    from nats_stream_source.jetstream.kv.reader import ReadOnlyKeyValue as ReadOnlyKeyValue
    from nats_stream_source.jetstream.kv.store import KeyValue as KeyValue
    from nats_stream_source.jetstream.kv.watch import Watch as Watch
    from nats_stream_source.jetstream.object_store.store import ObjectStore as ObjectStore
    from nats_stream_source.jetstream.publish.batch_publisher import (
        BatchPublisher as BatchPublisher,
        FastIngestPublisher as FastIngestPublisher,
        MessageColumns as MessageColumns,
        Rejection as Rejection,
    )
    from nats_stream_source.jetstream.publish.publisher import (
        PubAck as PubAck,
        Publisher as Publisher,
    )
    from nats_stream_source.jetstream.subscriptions.message import JsMessage as JsMessage
    from nats_stream_source.jetstream.subscriptions.subscribe import (
        ConsumerConfig as ConsumerConfig,
        subscribe as subscribe,
        subscribe_ordered as subscribe_ordered,
        subscribe_pull as subscribe_pull,
    )
else:
    __all__, __getattr__ = deferred(
        __name__,
        {
            "jetstream.api": "JetStream StoredMessage connect",
            "jetstream.direct_get.client": "DirectGet",
            "jetstream.kv.config": "KeyValueConfig",
            "jetstream.kv.entry": "Entry",
            "jetstream.kv.reader": "ReadOnlyKeyValue",
            "jetstream.kv.store": "KeyValue",
            "jetstream.kv.watch": "Watch",
            "jetstream.object_store.store": "ObjectStore",
            "jetstream.publish.batch_publisher": (
                "BatchPublisher FastIngestPublisher MessageColumns Rejection"
            ),
            "jetstream.publish.publisher": "PubAck Publisher",
            "jetstream.subscriptions.message": "JsMessage",
            "jetstream.subscriptions.subscribe": (
                "ConsumerConfig subscribe subscribe_ordered subscribe_pull"
            ),
        },
    )
