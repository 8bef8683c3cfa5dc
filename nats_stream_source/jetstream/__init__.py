"""The JetStream layer: five design documents of NATS over nats-py's connection. No Spark in here.

What a program uses is named here; see docs/jetstream.md. The modules are used by their own names
inside the package. A name's module is imported when the name is first used: Spark starts several
processes for a query, which need few of them, and each would pay for all.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "ConsumerConfig": "subscribe",
    "DirectGet": "direct_get",
    "Entry": "entry",
    "JetStream": "api",
    "JsMessage": "message",
    "KeyValue": "key_value",
    "KeyValueConfig": "kv_config",
    "ObjectStore": "object_store",
    "PubAck": "publish",
    "Publisher": "publish",
    "ReadOnlyKeyValue": "key_value",
    "StoredMessage": "api",
    "Watch": "watch",
    "connect": "connect",
    "subscribe": "subscribe",
}


class _Package(ModuleType):
    """This package: names that are imported when they are used."""

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        setattr(self, name, found)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        # The import system sets every imported module here, and would hide the functions that
        # ``connect`` and ``subscribe`` are named after.
        if name not in _MODULES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
