"""A server whose configuration changes while it runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from nats_stream_source.embedded import NatsServer


class ChangingServer:
    """A server with the user ``me``; started by ``with self.server``."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "users.conf"
        self.write()
        self.server = NatsServer(config=self._path, store=directory / "store")

    def write(self, password: str = "right", permissions: str = "", more: str = "") -> None:
        """Write the configuration that the server reads at its next start."""
        user = f'{{ user: me, password: "{password}", permissions: {{ {permissions} }} }}'
        self._path.write_text(f"{more}\nauthorization {{ users: [ {user} ] }}\n")

    def change(self, **to: str) -> None:
        """Let the server read another configuration."""
        self.write(**to)
        os.kill(self.server.pid, signal.SIGHUP)
