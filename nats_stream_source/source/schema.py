"""The columns that Spark is told of before anything is read: ``source.rows`` makes them."""

from __future__ import annotations

KV_DDL = (
    "bucket STRING, key STRING, value BINARY, revision BIGINT, created TIMESTAMP, "
    "operation STRING, delta BIGINT, initial BOOLEAN, stream_created TIMESTAMP"
)

STREAM_DDL = (
    "stream STRING, subject STRING, data BINARY, sequence BIGINT, timestamp TIMESTAMP, "
    "stream_created TIMESTAMP"
)

HEADERS_DDL = "headers MAP<STRING, ARRAY<STRING>>"
"""The column that the option ``includeHeaders`` adds, the last one."""


def kv_ddl(*, include_headers: bool = False) -> str:
    """The columns of ``nats_kv``."""
    return f"{KV_DDL}, {HEADERS_DDL}" if include_headers else KV_DDL


def stream_ddl(*, include_headers: bool = False) -> str:
    """The columns of ``nats_stream``."""
    return f"{STREAM_DDL}, {HEADERS_DDL}" if include_headers else STREAM_DDL
