"""Async tests: each has its own event loop, which reports connections that the test left open."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.program import ran

CONFTEST = "from tests.conftest import pytest_asyncio_loop_factories\n"

MODULE = '''
"""Tests that leave connections and tasks."""

import asyncio
import socket

import pytest

left = []


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


async def test_connection_left_open(port):
    left.append((await asyncio.open_connection("127.0.0.1", port))[1])


def test_connections_are_all_closed():
    assert left[0].get_extra_info("socket").fileno() == -1
'''


def test_connection_left_open_is_error_of_its_test(tmp_path: Path) -> None:
    """The connection is closed, so that no later test gets a warning for it."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_leaks.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\n"
        "asyncio_mode = auto\n"
        "asyncio_default_fixture_loop_scope = function\n"
        "filterwarnings = error\n"
    )
    words = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rE", tmp_path)
    done = ran(*words, cwd=tmp_path, status=1, PYTHONPATH=str(ROOT))
    lines = done.stdout.splitlines()
    errors = [line.split(" - ")[0] for line in lines if line.startswith("ERROR ")]
    assert errors == ["ERROR test_leaks.py::test_connection_left_open"]
    assert "AssertionError: the test left connections open" in done.stdout
    assert lines[-1].strip("= ").startswith("2 passed, 1 error"), done.stdout
