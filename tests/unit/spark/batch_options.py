"""Options of batch reads, columns and times for the tests of pushed filters."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from nats_stream_source.options import (
    KvOptions,
    Mode,
    StreamOptions,
    kv_options,
    stream_options,
)

SERVERS = {"servers": "nats://127.0.0.1:4222"}
KEY = ("key",)
CREATED = ("created",)
NOON = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
NOON_NS = 1_795_262_400_000_000_000
MICRO = timedelta(microseconds=1)


def kv(**given: str) -> KvOptions:
    """Parse options of a batch read of bucket ``b``."""
    return kv_options({**SERVERS, "bucket": "b", **given}, Mode.BATCH)


def stream(**given: str) -> StreamOptions:
    """Parse options of a batch read of stream ``S``."""
    return stream_options({**SERVERS, "stream": "S", **given}, Mode.BATCH)
