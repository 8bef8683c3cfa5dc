"""A Postgres server with logical replication for the example and its test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from nats_stream_source.embedded import free_port

USER = DATABASE = "postgres"


class MissingProgramError(Exception):
    """A program that the example starts is not installed."""


def server_programs() -> Path:
    """The directory of Postgres's programs.

    Raises:
        MissingProgramError: they were not found.
    """
    # Debian keeps the server's programs off the PATH.
    directories = [Path(part) for part in os.environ.get("PATH", "").split(os.pathsep) if part]
    directories += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for directory in directories:
        if all((directory / program).exists() for program in ("initdb", "pg_ctl", "psql")):
            return directory
    raise MissingProgramError("Postgres was not found: install postgresql")


class LocalPostgres:
    """One Postgres server on a free port of the loopback interface; a context manager.

    Its data is a temporary directory. Postgres refuses to run as root: then the processes have the
    user ``postgres``.
    """

    def __init__(self) -> None:
        self._programs = server_programs()
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="postgres-"))

    def __enter__(self) -> LocalPostgres:
        try:
            if os.geteuid() == 0:
                shutil.chown(self.directory, USER)
            data = str(self.directory / "data")
            self._run("initdb", "-D", data, "-U", USER, "-A", "trust", "--no-sync", "-E", "UTF8")
            options = f"-p {self.port} -h 127.0.0.1 -k {self.directory} -c wal_level=logical"
            log = str(self.directory / "log")
            self._run("pg_ctl", "-D", data, "-l", log, "-o", options, "-w", "start")
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._run("pg_ctl", "-D", str(self.directory / "data"), "-m", "immediate", "-w", "stop")
        shutil.rmtree(self.directory, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        user = ["runuser", "-u", USER, "--"] if os.geteuid() == 0 else []
        subprocess.run(
            [*user, str(self._programs / program), *arguments],
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )

    def psql(self, sql: str) -> str:
        """Run SQL, also several statements, and return what ``psql`` prints; an error raises."""
        command = [str(self._programs / "psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"]
        command += ["-h", "127.0.0.1", "-p", str(self.port), "-U", USER, DATABASE]
        # psql 15.18 fails if the end marker of a COPY does not end with a line feed.
        done = subprocess.run(
            command, input=f"{sql}\n", capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"psql failed: {done.stderr}")
        return done.stdout

    def rows(self, table: str, order: str) -> list[dict[str, Any]]:
        """All rows of a table, as JSON has them."""
        found = self.psql(f"SELECT row_to_json(t) FROM {table} t ORDER BY {order}")
        return [json.loads(line) for line in found.splitlines()]
