"""Run tests in one place after the other: on each version of nats-server, on each Spark."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.paths import ROOT

Outcome = tuple[bool, str]
"""Whether the tests passed, and what pytest said."""


def divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    """A command line's places, and its arguments for pytest, which follow ``--``."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:split], arguments[split + 1 :]


def outcome(
    command: list[str], environment: dict[str, str], deadline: float, directory: Path = ROOT
) -> Outcome:
    """Run a command whose process has nothing but ``environment``; at most ``deadline`` seconds."""
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        return False, f"{text}\nnot done after {deadline:g} s"
    return done.returncode == 0, done.stdout.rstrip()


def in_turn(kind: str, places: Sequence[str], run: Callable[[str], Outcome]) -> int:
    """Run the tests in each place and print how it went; a process's exit code, 1 if one failed."""
    lines, failed = [], False
    width = max(map(len, places))
    for place in places:
        began = time.monotonic()
        passed, text = run(place)
        failed = failed or not passed
        if not passed:
            print(f"{kind} {place}\n{text}\n", flush=True)
        word = "passed" if passed else "FAILED"
        said = [line for line in text.splitlines() if " passed" in line or " failed" in line]
        last = (said or text.splitlines() or [""])[-1].strip("= ")
        took = time.monotonic() - began
        lines.append(f"{kind} {place:{width}} {word}  {took:4.0f} s  {last}")
        print(lines[-1], flush=True)
    if failed:
        print("\n".join(["", *lines]))
    return int(failed)
