"""The Spark session of the benchmarks: local, on all cores, without tuning for either source."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import SparkSession

_SETTINGS = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.numRecentProgressUpdates": "100000",
}

_DEADLINE = 30.0  # seconds for the JVM to end


@contextmanager
def spark_session(
    jars: Sequence[Path] = (),
    configure: Callable[[SparkSession.Builder], SparkSession.Builder] = lambda builder: builder,
) -> Iterator[SparkSession]:
    """A session with ``jars`` on its class path; ``configure`` adds other settings."""
    # By default Spark starts workers with the python3 on the PATH, which lacks the packages.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as scratch:
        builder = SparkSession.builder.appName("benchmarks").master("local[*]")
        builder = builder.config("spark.sql.warehouse.dir", f"{scratch}/warehouse")
        for name, value in _SETTINGS.items():
            builder = builder.config(name, value)
        if jars:
            builder = builder.config("spark.jars", ",".join(str(jar) for jar in jars))
        spark = configure(builder).getOrCreate()
        gateway = SparkContext._gateway
        assert gateway is not None
        try:
            yield spark
        except Py4JJavaError as error:
            # The text of the error is in the JVM, which ends now.
            raise RuntimeError(str(error)) from None
        finally:
            spark.stop()
            # Wait for the JVM, so that its CPU time is counted.
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(_DEADLINE)
            SparkContext._gateway = SparkContext._jvm = None
