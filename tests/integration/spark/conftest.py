"""Names of streams and buckets, and the requests of a test."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nats_stream_source.jetstream.api import JetStream

_names = (f"S{i}" for i in itertools.count())


@pytest.fixture
def name() -> str:
    return next(_names)


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
