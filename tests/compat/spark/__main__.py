"""Run the tests marked ``sparks`` on every supported Spark, on a cluster and over Spark Connect.

Usage:
    python -m tests.compat.spark                        all PLACES
    python -m tests.compat.spark 4.0 connect            these
    python -m tests.compat.spark 4.3 -- -x -k replay    further arguments for pytest

``4.0`` to ``4.3`` are ``local[2]``, with the package on the path. ``standalone`` is a master and
two worker processes of the newest Spark; ``spark-submit`` starts the driver, and the package is
nowhere but in the archive that it ships. ``connect`` is a Spark Connect server, of the newest Spark
too, with the package on its path. The environments come from ``environments.py``. Ends with 1 when
a place failed, and shows pytest's output for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.compat.matrix import Outcome, divided, in_turn, outcome
from tests.compat.spark.environments import ROOT, VERSIONS, python
from tests.support.spark.daemons import connect_server, standalone
from tests.support.spark.session import SMALL

NEWEST = "4.3"
PLACES = (*VERSIONS, "standalone", "connect")
_RUN_DEADLINE = 1200  # seconds for one place's tests; more is a hang
_PYTEST = (
    *("-q", "-m", "sparks", "-p", "no:cacheprovider"),
    *("--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")),
)

SETTINGS = {**SMALL, "spark.executor.memory": "512m"}
_CLUSTER_SETTINGS = {
    **SETTINGS,
    # A running Spark cannot switch it on. No task is that slow but in the test of it.
    "spark.speculation": "true",
    "spark.speculation.multiplier": "1000000",
}


def run(place: str, arguments: list[str]) -> Outcome:
    """Run the tests in ``place``: whether they passed, and pytest's output."""
    executable = python(place if place in VERSIONS else NEWEST)
    environment = {**_environment(), "PYSPARK_PYTHON": str(executable)}
    if place in VERSIONS:
        environment |= {"PYTHONPATH": str(ROOT), "SPARK_PLACE": "local"}
        command = [str(executable), "-m", "pytest", *_PYTEST, *arguments]
        return outcome(command, environment, _RUN_DEADLINE)
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
) -> Outcome:
    """The tests as a driver that ``spark-submit`` starts, the package from an archive."""
    archive = directory / "nats_stream_source.zip"
    program = [sys.executable, "-m", "nats_stream_source.zip_package", str(archive)]
    subprocess.run(program, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    with standalone(home, directory, environment=environment) as cluster:
        command = [
            *(str(home / "bin" / "spark-submit"), "--master", cluster.url),
            *("--py-files", str(archive)),
            *(part for pair in _CLUSTER_SETTINGS.items() for part in ("--conf", "=".join(pair))),
            *(str(Path(__file__).with_name("driver.py")), *_PYTEST, *arguments),
        ]
        groups = {worker.name: worker.process.pid for worker in cluster.workers}
        environment |= {"SPARK_WORKERS": ",".join(f"{name}={pid}" for name, pid in groups.items())}
        # The planner's process has no other way to it (docs/cluster.md).
        environment["PYTHONPATH"] = str(archive)
        # Not in the checkout: Spark's processes have their working directory on their path.
        return outcome(command, environment, _RUN_DEADLINE, directory)


def _over_connect(
    executable: Path, directory: Path, environment: dict[str, str], arguments: list[str]
) -> Outcome:
    """The tests as a client; the server has the package on its path."""
    environment = {**environment, "PYTHONPATH": str(ROOT)}
    with connect_server(Path(environment["SPARK_HOME"]), directory, SETTINGS, environment) as url:
        environment["SPARK_SERVER"] = url
        command = [str(executable), "-m", "pytest", *_PYTEST, *arguments]
        return outcome(command, environment, _RUN_DEADLINE)


def _environment() -> dict[str, str]:
    """The environment, without what would lead to another Spark or to the checkout."""
    ours = ("PYTHONPATH", "SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    return {name: value for name, value in os.environ.items() if name not in ours}


def main(arguments: list[str]) -> int:
    places, further = divided(arguments)
    if unknown := set(places) - set(PLACES):
        print(f"{' '.join(sorted(unknown))}: not one of {' '.join(PLACES)}", file=sys.stderr)
        return 2
    further = further or [str(Path(__file__).parent)]
    return in_turn("Spark", places or PLACES, lambda place: run(place, further))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
