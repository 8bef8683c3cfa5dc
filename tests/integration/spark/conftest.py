"""Names of streams and buckets, the requests of a test, and the end of its connections."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.spark.runner import close_cached_runners

_names = (f"S{i}" for i in itertools.count())


@pytest.fixture(autouse=True)
def no_kept_connections() -> Iterator[None]:
    """Close the connections that tasks keep for the next one."""
    yield
    close_cached_runners()


@pytest.fixture
def name() -> str:
    return next(_names)


@pytest.fixture
def bucket(name: str) -> str:
    return name


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subjects of the JetStream requests, up to now."""
    subjects: list[str] = []
    original = JetStream.call

    async def noted(jetstream: JetStream, subject: str, request: Any = None) -> Any:
        subjects.append(subject)
        return await original(jetstream, subject, request)

    monkeypatch.setattr(JetStream, "call", noted)
    return subjects
