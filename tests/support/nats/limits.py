"""Limits: of an account for the size of messages, and of streams for consumers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.support.nats.buckets import create_bucket
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import configured_server

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
    with configured_server(_CONFIG) as server:
        create_bucket(server.url, "b")
        create_stream(server.url, "S", allow_batched=True)
        yield server.url
