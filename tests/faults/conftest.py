"""The recorded streams of the fault tests.

A module names the settings of its recorded stream in a mark::

    pytestmark = pytest.mark.recorded(kinds=KINDS, count=1500, size=1000)

- ``kinds``: the kinds to parametrise the fixture ``recorded`` with, see
  ``tests.support.recorded_stream``;
- ``count``, ``size``: the number of messages that are written, and the size of each in bytes;
- ``server``: the fixture that starts the server, ``shared_server`` unless given;
- others: keyword arguments of :meth:`RecordedStream.create`.

A test that requires other settings, or a second recorded stream, calls ``new_recorded``.
"""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.marks import mark_settings
from tests.support.recorded_stream import RecordedStream


class NewRecordedStream(Protocol):
    """Creates a recorded stream and writes ``count`` messages of ``size`` bytes to it."""

    def __call__(
        self, kind: str, count: int = 0, size: int = 0, *, hot: int = 0, **config: Any
    ) -> RecordedStream: ...


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise ``recorded`` with the kinds of the module's mark."""
    if "recorded" in metafunc.fixturenames:
        kinds = mark_settings(metafunc.definition, "recorded")["kinds"]
        metafunc.parametrize("recorded", list(kinds), indirect=True)


@pytest.fixture
def new_recorded(request: pytest.FixtureRequest) -> NewRecordedStream:
    """Create recorded streams on the server of the module's mark."""
    fixture = mark_settings(request.node, "recorded").get("server", "shared_server")
    server: NatsServer = request.getfixturevalue(fixture)

    def new(
        kind: str, count: int = 0, size: int = 0, *, hot: int = 0, **config: Any
    ) -> RecordedStream:
        recorded = RecordedStream(kind, server.url, hot=hot).create(**config)
        recorded.write(count, size)
        return recorded

    return new


@pytest.fixture
def recorded(request: pytest.FixtureRequest, new_recorded: NewRecordedStream) -> RecordedStream:
    """The recorded stream of the module's mark, of each of its kinds."""
    settings = mark_settings(request.node, "recorded")
    for name in ("kinds", "server"):
        settings.pop(name, None)
    return new_recorded(request.param, **settings)


@pytest.fixture
def recorded_messages(
    request: pytest.FixtureRequest, new_recorded: NewRecordedStream
) -> RecordedStream:
    """The recorded stream of the module's mark, of kind ``stream`` only."""
    settings = mark_settings(request.node, "recorded")
    return new_recorded("stream", settings["count"], settings.get("size", 0))
