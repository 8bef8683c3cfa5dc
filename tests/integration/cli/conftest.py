"""The environment of the command: without the contexts and variables of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory for the files of the ``nats`` command; no variable names a server."""
    for name in os.environ:
        if name.startswith("NATS_") and name != "NATS_SERVER":  # that one is the server's binary
            monkeypatch.delenv(name)
    home = tmp_path / "config"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    return home
