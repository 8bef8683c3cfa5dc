"""Limits: of an account for the size of messages, and of streams for consumers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import create_bucket
from tests.support.nats.streams import create_stream

CONSUMER_LIMITS = (
    {"max_ack_pending": 100},
    {"inactive_threshold": 1_000_000_000},
    {"max_ack_pending": 100, "inactive_threshold": 1_000_000_000},
)
"""``consumer_limits`` of a stream, below the defaults of consumers."""

_CONFIG = """
jetstream {}
accounts { A {
  jetstream: enabled
  users: [ { user: me, password: pw } ]
  limits { max_payload: 1000 }
} }
no_auth_user: me
"""


@contextlib.contextmanager
def limited_server() -> Iterator[str]:
    """The URL of a server with the bucket ``b``, the stream ``S``, and messages of 1,000 bytes."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "server.conf")
        config.write_text(_CONFIG)
        with NatsServer(config=config) as server:
            create_bucket(server.url, "b")
            create_stream(server.url, "S", allow_batched=True)
            yield server.url
