"""Runs the command as a process."""

from __future__ import annotations

import json
import sys

from tests.support.program import ran

COMMAND = (sys.executable, "-m", "nats_stream_source")


def command(*words: str, status: int = 0, **environment: str) -> tuple[str, str]:
    """Run the command; its standard output and standard error."""
    done = ran(*COMMAND, *words, status=status, **environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, done.stderr


def objects(text: str) -> list[dict[str, object]]:
    """The JSON objects of the lines of ``text``."""
    return [json.loads(line) for line in text.splitlines()]
