"""Async tests: each has its own event loop, which reports connections that the test left open."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.event_loop import deadline

ROOT = Path(__file__).parents[3]

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


async def test_connection_left_open_without_references(port):
    loop = asyncio.get_running_loop()
    await loop.create_connection(asyncio.Protocol, "127.0.0.1", port)


async def test_task_left_that_closes_its_connection(port):
    async def hold():
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        connected.set()
        try:
            await asyncio.Event().wait()
        finally:
            writer.close()

    connected = asyncio.Event()
    left.append(asyncio.create_task(hold()))
    await connected.wait()


async def test_connection_closed(port):
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()


def test_connections_are_all_closed():
    assert left[0].get_extra_info("socket").fileno() == -1
    assert left[1].cancelled()
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
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rE", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    errors = [line.split(" - ")[0] for line in lines if line.startswith("ERROR ")]
    assert errors == [
        "ERROR test_leaks.py::test_connection_left_open",
        "ERROR test_leaks.py::test_connection_left_open_without_references",
    ]
    assert done.stdout.count("AssertionError: the test left connections open") >= 2
    assert lines[-1].strip("= ").startswith("5 passed, 2 errors"), done.stdout


async def test_deadline_cancels_block() -> None:
    with pytest.raises(TimeoutError, match=r"longer than 0\.01 s"):
        async with deadline(0.01):
            await asyncio.Event().wait()
