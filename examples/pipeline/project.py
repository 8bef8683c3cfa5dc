"""The pipeline in a directory of its own, and an update of it by ``spark-pipelines``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent
SETTINGS = (
    # The next update finds the tables in this catalog; a specification cannot set static settings.
    *("--conf", "spark.sql.catalogImplementation=hive"),
    *("--conf", "spark.driver.host=127.0.0.1"),
    *("--conf", "spark.driver.bindAddress=127.0.0.1"),
    *("--conf", "spark.ui.enabled=false"),
)
_STORAGE = "file:///lake/pipeline"
_SECONDS = 900


def prepare(directory: Path) -> Path:
    """Copy the project to ``directory``, with its storage below it; returns the specification."""
    shutil.copytree(PROJECT / "transformations", directory / "transformations")
    text = (PROJECT / "spark-pipeline.yml").read_text()
    spec = directory / "spark-pipeline.yml"
    spec.write_text(text.replace(_STORAGE, (directory / "storage").as_uri()))
    return spec


def start_update(spec: Path, servers: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start ``spark-pipelines run``, in a process group of its own.

    The tables, their metastore and ``pipeline.log`` are in the directory of the specification.

    Args:
        spec: the specification.
        servers: URL of the server.
        arguments: further ones of the command.
    """
    program = Path(sys.executable).with_name("spark-pipelines")
    environment = {**os.environ, "NATS_URL": servers, "PYSPARK_PYTHON": sys.executable}
    with (spec.parent / "pipeline.log").open("ab") as output:
        return subprocess.Popen(
            ["bash", str(program), "run", "--spec", str(spec), *SETTINGS, *arguments],
            cwd=spec.parent,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def update(spec: Path, servers: str, *arguments: str) -> None:
    """Run an update to its end.

    Raises:
        RuntimeError: the update failed; the text has the end of ``pipeline.log``.
    """
    process = start_update(spec, servers, *arguments)
    try:
        status = process.wait(_SECONDS)
    finally:
        process.terminate()
    if status:
        log = (spec.parent / "pipeline.log").read_text()
        raise RuntimeError(f"the update failed with status {status}: {log[-3000:]}")
