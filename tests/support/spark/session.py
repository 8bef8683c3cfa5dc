"""Spark sessions for tests: on this machine, small, in UTC; and the one of a test run."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

# On a few rows, Java's second compiler and its parallel garbage collector take half of the CPU
# time.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

LOCAL = {
    "spark.ui.enabled": "false",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
"""For every driver: it is reached at the loopback interface."""

SMALL = {
    **LOCAL,
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
}

# Delta's default of 50 partitions for a table's snapshot, and Spark's 200 for a shuffle, are made
# for clusters: on two cores they are nearly all of a small MERGE's time.
_DELTA = {
    **SMALL,
    "spark.databricks.delta.snapshotPartitions": "2",
    # Every MERGE is a new plan, and compiling it takes longer than running it on a few rows.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


@functools.cache
def _home() -> Path:
    """Spark's directory without the archive of its Python part.

    Spark lets its workers import from there first, and Python keeps no bytecode of an archive: each
    worker would compile what it imports, which takes three times as long as all else at its start.
    """
    home = Path(tempfile.mkdtemp(prefix="spark-home-"))
    atexit.register(shutil.rmtree, home)
    for part in ("bin", "jars"):
        (home / part).symlink_to(Path(pyspark.__file__).parent / part)
    return home


def configured(settings: Mapping[str, str], master: str = "local[2]") -> SparkSession.Builder:
    """A builder with these settings, whose workers run this Python."""
    # Workers start often: they load bytecode where there is some, and keep what they compile.
    os.environ.setdefault("SPARK_HOME", str(_home()))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Else from the first `python3` on the PATH, without the packages of this one.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder


def program_environment(directory: Path) -> dict[str, str]:
    """This process's environment, for a program that starts a small Spark session itself.

    On a few rows most of the time is start-up and compilation: Spark does not generate code, Java
    compiles with its fast compiler only, and Python workers load bytecode (see :func:`_home`).
    """
    directory.mkdir()
    settings = {
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    lines = "".join(f"{name} {value}\n" for name, value in settings.items())
    (directory / "spark-defaults.conf").write_text(lines)
    environment = {"SPARK_CONF_DIR": str(directory), "SPARK_HOME": str(_home()), **os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def delta_session(
    settings: Mapping[str, str] | None = None, master: str = "local[2]"
) -> SparkSession:
    """A session on two local cores whose MERGEs take about a second, with the jar of spark-avro.

    Args:
        settings: more of them; the warehouse is a temporary directory unless it is among them.
    """
    # Here, since tests on other versions of Spark load this module where Delta Lake is not.
    from delta import configure_spark_with_delta_pip

    given = {**_DELTA, "spark.app.name": "nats-stream-source tests", **(settings or {})}
    if "spark.sql.warehouse.dir" not in given:
        given["spark.sql.warehouse.dir"] = str(Path(tempfile.mkdtemp(prefix="spark-"), "warehouse"))
    packages = [f"org.apache.spark:spark-avro_2.13:{pyspark.__version__}"]
    spark = configure_spark_with_delta_pip(configured(given, master), packages).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark
