"""The process of Debezium's engine: `PostgresToJetStream.java`, built by Maven."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from examples.postgres.local_postgres import DATABASE, USER, LocalPostgres, MissingProgramError

_HERE = Path(__file__).parent
TARGET = _HERE.parent.parent / "build/postgres-engine"
"""The directory that the engine is built in, unless another is given."""

_READY = "publishing to stream"


def build(target: Path) -> Path:
    """Compile the engine and fetch its jars into a directory, and return the directory.

    Raises:
        MissingProgramError: Java or Maven was not found, or an artefact could not be fetched.
        RuntimeError: the engine does not compile.
    """
    for program in ("java", "mvn"):
        if shutil.which(program) is None:
            raise MissingProgramError(f"{program} was not found: install Java 17 and Maven")
    command = [
        "mvn",
        "-q",
        "-B",
        "-f",
        str(_HERE / "pom.xml"),
        f"-Dtarget={target.absolute()}",
        "compile",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "COMPILATION ERROR" in done.stdout:
        raise RuntimeError(f"the engine does not compile: {done.stdout[-3000:]}")
    if done.returncode != 0:
        raise MissingProgramError(f"Maven could not build the engine: {done.stdout[-1000:]}")
    return target


class Engine:
    """Starts the engine for tables of a Postgres server, and keeps what it prints in a file."""

    def __init__(
        self, target: Path, postgres: LocalPostgres, nats: str, scratch: Path, tables: str
    ) -> None:
        self._target = target
        self._settings = scratch / "engine.properties"
        self.log = scratch / "engine.log"
        settings = {
            "nats.url": nats,
            "nats.stream": "SHOP",
            "database.hostname": "127.0.0.1",
            "database.port": postgres.port,
            "database.user": USER,
            "database.password": "unused",
            "database.dbname": DATABASE,
            "topic.prefix": "shop",
            "table.include.list": tables,
        }
        lines = (f"{name}={value}\n" for name, value in settings.items())
        self._settings.write_text("".join(lines))

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process; its end, also an error's, is the caller's to see."""
        classpath = f"{self._target / 'classes'}:{self._target / 'lib'}/*"
        with self.log.open("ab") as log:
            return subprocess.Popen(
                ["java", "-Xmx256m", "-cp", classpath, "PostgresToJetStream", str(self._settings)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for_stream(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process has created the stream; raises RuntimeError if it ended."""
        while _READY not in self.log.read_text(errors="replace"):
            if process.poll() is not None:
                raise RuntimeError(f"the engine ended: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)
