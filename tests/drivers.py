"""Spark drivers in processes of their own, which run ``point_driver.py``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def driver(request: Path, asked: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """The driver; at the end it, its JVM and its workers are killed, as with their machine."""
    request.write_text(json.dumps(asked))
    program = Path(__file__).with_name("point_driver.py")
    with request.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(program), str(request)],
            start_new_session=True,  # so that all of them are in the group that is killed
            stdout=log,
            stderr=log,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
