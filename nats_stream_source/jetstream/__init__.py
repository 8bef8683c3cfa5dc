"""The JetStream layer: five design documents of NATS over nats-py's connection. No Spark in here.

What a program uses is named here; see docs/jetstream.md. The modules are used by their own names
inside the package.
"""

from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.connect import connect
from nats_stream_source.jetstream.direct_get import DirectGet
from nats_stream_source.jetstream.entry import Entry
from nats_stream_source.jetstream.key_value import KeyValue, ReadOnlyKeyValue
from nats_stream_source.jetstream.kv_config import KeyValueConfig
from nats_stream_source.jetstream.message import JsMessage
from nats_stream_source.jetstream.object_store import ObjectStore
from nats_stream_source.jetstream.publish import PubAck, Publisher
from nats_stream_source.jetstream.subscribe import ConsumerConfig, subscribe
from nats_stream_source.jetstream.watch import Watch

__all__ = [
    "ConsumerConfig",
    "DirectGet",
    "Entry",
    "JetStream",
    "JsMessage",
    "KeyValue",
    "KeyValueConfig",
    "ObjectStore",
    "PubAck",
    "Publisher",
    "ReadOnlyKeyValue",
    "StoredMessage",
    "Watch",
    "connect",
    "subscribe",
]
