"""A small disk (tmpfs) that is there for one test, and can be made larger."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Callable[[int], None]]:
    """Mount one at ``place``; what this gives changes its size.

    Where this process may not mount anything, the test is skipped.
    """
    place.mkdir()
    mounted = _mount(f"size={megabytes}m", place)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")

    def resize(megabytes: int) -> None:
        changed = _mount(f"remount,size={megabytes}m", place)
        assert changed.returncode == 0, changed.stderr

    try:
        yield resize
    finally:
        # Spark may have a file open for a while after its query has ended.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _mount(options: str, place: Path) -> subprocess.CompletedProcess[str]:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True, text=True)
