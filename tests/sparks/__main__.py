"""Run the tests marked ``sparks`` on every supported Spark, on a cluster and over Spark Connect.

Usage:
    python tests/sparks                        all PLACES
    python tests/sparks 4.0 connect            these
    python tests/sparks 4.3 -- -x -k replay    further arguments for pytest

``4.0`` to ``4.3`` are ``local[2]``, with the package on the path. ``standalone`` is a master and
two worker processes of the newest Spark; ``spark-submit`` starts the driver, and the package is
nowhere but in the archive that it ships. ``connect`` is a Spark Connect server, of the newest Spark
too, with the package on its path. The environments come from ``environments.py``. Ends with 1 when
a place failed, and shows what pytest said about it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cluster import connect_server, standalone
from environments import ROOT, VERSIONS, python

NEWEST = "4.3"
PLACES = (*VERSIONS, "standalone", "connect")
_RUN_DEADLINE = 1200  # seconds for one place's tests; more is a hang
_PYTEST = (
    *("-q", "-m", "sparks", "-p", "no:cacheprovider"),
    *("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")),
)


SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.executor.memory": "512m",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
}


def run(place: str, arguments: list[str]) -> tuple[bool, str]:
    """Run the tests in ``place``: whether they passed, and what pytest said."""
    executable = python(place if place in VERSIONS else NEWEST)
    environment = {**_environment(), "PYSPARK_PYTHON": str(executable)}
    if place in VERSIONS:
        environment |= {"PYTHONPATH": str(ROOT), "SPARK_PLACE": "local"}
        return _done([str(executable), "-m", "pytest", *_PYTEST, *arguments], environment)
    find = [str(executable), "-c", "import pyspark; print(*pyspark.__path__)"]
    found = subprocess.run(find, check=True, capture_output=True, text=True, env=environment)
    home = Path(found.stdout.strip())
    environment |= {"SPARK_HOME": str(home), "SPARK_PLACE": place}
    with tempfile.TemporaryDirectory(prefix="sparks-") as name:
        directory = Path(name)
        if place == "connect":
            return _over_connect(executable, directory, environment, arguments)
        return _on_a_cluster(home, directory, environment, arguments)


def _on_a_cluster(
    home: Path, directory: Path, environment: dict[str, str], arguments: list[str]
) -> tuple[bool, str]:
    """The tests as a driver that ``spark-submit`` starts, the package from an archive."""
    archive = directory / "nats_stream_source.zip"
    program = [sys.executable, "-m", "nats_stream_source.archive", str(archive)]
    subprocess.run(program, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    with standalone(home, directory, environment=environment) as cluster:
        command = [
            *(str(home / "bin" / "spark-submit"), "--master", cluster.url),
            *("--py-files", str(archive)),
            *(part for pair in SETTINGS.items() for part in ("--conf", "=".join(pair))),
            *(str(ROOT / "tests" / "sparks" / "driver.py"), *_PYTEST, *arguments),
        ]
        groups = {worker.name: worker.process.pid for worker in cluster.workers}
        environment |= {"SPARK_WORKERS": ",".join(f"{name}={pid}" for name, pid in groups.items())}
        # The planner's process has no other way to it (docs/cluster.md).
        environment["PYTHONPATH"] = str(archive)
        # Not in the checkout: Spark's processes have their working directory on their path.
        return _done(command, environment, directory)


def _over_connect(
    executable: Path, directory: Path, environment: dict[str, str], arguments: list[str]
) -> tuple[bool, str]:
    """The tests as a client; the server has the package on its path."""
    environment = {**environment, "PYTHONPATH": str(ROOT)}
    with connect_server(Path(environment["SPARK_HOME"]), directory, SETTINGS, environment) as url:
        environment["SPARK_SERVER"] = url
        return _done([str(executable), "-m", "pytest", *_PYTEST, *arguments], environment)


def _environment() -> dict[str, str]:
    """The environment, without what would lead to another Spark or to the checkout."""
    ours = ("PYTHONPATH", "SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    return {name: value for name, value in os.environ.items() if name not in ours}


def _done(
    command: list[str], environment: dict[str, str], directory: Path = ROOT
) -> tuple[bool, str]:
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_RUN_DEADLINE,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        return False, f"{text}\nnot done after {_RUN_DEADLINE} s"
    return done.returncode == 0, done.stdout.rstrip()


def main(arguments: list[str]) -> int:
    """Run as the module's text says; the process's exit code."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    places, further = arguments[:split] or PLACES, arguments[split + 1 :]
    if unknown := set(places) - set(PLACES):
        print(f"{' '.join(sorted(unknown))}: not one of {' '.join(PLACES)}", file=sys.stderr)
        return 2
    further = further or [str(Path(__file__).parent)]
    lines, failed = [], False
    for place in places:
        began = time.monotonic()
        passed, text = run(place, further)
        failed = failed or not passed
        if not passed:
            print(f"Spark {place}\n{text}\n", flush=True)
        word = "passed" if passed else "FAILED"
        said = [line for line in text.splitlines() if " passed" in line or " failed" in line]
        last = said[-1].strip("= ") if said else ""
        lines.append(f"Spark {place:10} {word}  {time.monotonic() - began:4.0f} s  {last}")
        print(lines[-1], flush=True)
    if failed:
        print("\n".join(["", *lines]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
