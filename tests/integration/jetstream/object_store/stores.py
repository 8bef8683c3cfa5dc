"""Open object stores and count what they leave in the stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.object_store.store import ObjectStore
from tests.support.nats.buckets import api

MEGABYTE = bytes(range(256)) * 4096


@asynccontextmanager
async def opened_store(
    url: str, bucket: str = "b", request_timeout: float = 2.0, **settings: Any
) -> AsyncIterator[ObjectStore]:
    async with connect(url, request_timeout=request_timeout, **settings) as jetstream:
        yield ObjectStore(jetstream, bucket)


def left(url: str, stream: str = "OBJ_b") -> dict[str, int]:
    """How many messages each subject of the store has."""
    answer = api(url, f"STREAM.INFO.{stream}", {"subjects_filter": ">"})
    return answer["state"].get("subjects") or {}
