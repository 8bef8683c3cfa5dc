"""Runs a program to its end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.paths import ROOT


def ran(
    *words: str | Path,
    cwd: Path = ROOT,
    status: int = 0,
    environment: Mapping[str, str] = os.environ,
    timeout: float = 600,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program without a terminal; it must end with ``status``.

    Args:
        variables: variables besides those of ``environment``.
    """
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done
