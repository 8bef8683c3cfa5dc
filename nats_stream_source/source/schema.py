"""The columns that Spark is told of before anything is read: ``source.rows`` makes them."""

from __future__ import annotations

KV_DDL = (
    "bucket STRING, key STRING, value BINARY, revision BIGINT, created TIMESTAMP, "
    "operation STRING, delta BIGINT, initial BOOLEAN, stream_created TIMESTAMP"
)
