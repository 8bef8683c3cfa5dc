"""Runs the command as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.paths import ROOT

COMMAND = (sys.executable, "-m", "nats_stream_source")


def command(*words: str, status: int = 0, **environment: str) -> tuple[str, str]:
    """Run the command; its standard output and standard error."""
    done = subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # without a terminal
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def objects(text: str) -> list[dict[str, object]]:
    """The JSON objects of the lines of ``text``."""
    return [json.loads(line) for line in text.splitlines()]
