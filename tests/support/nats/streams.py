"""Streams on a real server, for tests; those of buckets: :mod:`tests.support.nats.buckets`."""

from __future__ import annotations

from typing import Any

from tests.support.nats.buckets import api


def create_stream(url: str, name: str, *subjects: str, **config: Any) -> dict[str, Any]:
    """Create a stream of ``subjects``, or of ``<name>.>``; the server's response."""
    wanted = {"name": name, "subjects": list(subjects) or [f"{name}.>"], **config}
    return api(url, f"STREAM.CREATE.{name}", wanted)


def stream_state(url: str, name: str) -> dict[str, Any]:
    """``state`` of the stream: ``first_seq``, ``last_seq``, ``messages``, …"""
    state: dict[str, Any] = api(url, f"STREAM.INFO.{name}")["state"]
    return state
