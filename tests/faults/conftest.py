"""The workloads of the fault tests.

A module names the settings of its workload in a mark::

    pytestmark = pytest.mark.workload(kinds=KINDS, count=1500, size=1000)

- ``kinds``: the kinds to parametrise the fixture ``workload`` with, see ``tests.support.workload``;
- ``count``, ``size``: the number of messages that are written, and the size of each in bytes;
- ``server``: the fixture that starts the server, ``shared_server`` unless given;
- others: keyword arguments of :meth:`Workload.create`.

A test that requires other settings, or a second workload, calls ``new_workload``.
"""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.marks import mark_settings
from tests.support.workload import Workload


class NewWorkload(Protocol):
    """Creates the stream of a workload and writes ``count`` messages of ``size`` bytes to it."""

    def __call__(
        self, kind: str, count: int = 0, size: int = 0, *, hot: int = 0, **config: Any
    ) -> Workload: ...


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise ``workload`` with the kinds of the module's mark."""
    if "workload" in metafunc.fixturenames:
        kinds = mark_settings(metafunc.definition, "workload")["kinds"]
        metafunc.parametrize("workload", list(kinds), indirect=True)


@pytest.fixture
def new_workload(request: pytest.FixtureRequest) -> NewWorkload:
    """Create workloads on the server of the module's mark."""
    fixture = mark_settings(request.node, "workload").get("server", "shared_server")
    server: NatsServer = request.getfixturevalue(fixture)

    def new(kind: str, count: int = 0, size: int = 0, *, hot: int = 0, **config: Any) -> Workload:
        workload = Workload(kind, server.url, hot=hot).create(**config)
        workload.write(count, size)
        return workload

    return new


@pytest.fixture
def workload(request: pytest.FixtureRequest, new_workload: NewWorkload) -> Workload:
    """The workload of the module's mark, of each of its kinds."""
    settings = mark_settings(request.node, "workload")
    for name in ("kinds", "server"):
        settings.pop(name, None)
    return new_workload(request.param, **settings)


@pytest.fixture
def stream_workload(request: pytest.FixtureRequest, new_workload: NewWorkload) -> Workload:
    """The workload of the module's mark, of kind ``stream`` only."""
    settings = mark_settings(request.node, "workload")
    return new_workload("stream", settings["count"], settings.get("size", 0))
