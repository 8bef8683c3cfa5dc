"""Servers of the tests of object stores."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.object_store.store import ObjectStore
from tests.integration.jetstream.object_store.stores import opened_store
from tests.support.nats.buckets import api


@pytest.fixture
async def url(shared_server: NatsServer, request: pytest.FixtureRequest) -> str:
    """A server with an empty store ``b``."""
    if "OBJ_b" in (api(shared_server.url, "STREAM.NAMES").get("streams") or ()):
        api(shared_server.url, "STREAM.DELETE.OBJ_b")
    async with opened_store(shared_server.url) as store:
        await ObjectStore.create(store.jetstream, "b")
    return shared_server.url


@pytest.fixture
async def store(url: str) -> AsyncIterator[ObjectStore]:
    """The store ``b`` on a connection of its own."""
    async with opened_store(url) as store:
        yield store
