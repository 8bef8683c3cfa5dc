"""The one Spark session of a test run: local, small, in UTC, with Delta Lake."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession


def delta_session() -> SparkSession:
    """A session on two local cores whose MERGEs take about a second.

    Delta's default of 50 partitions for a table's snapshot, and Spark's 200 for a shuffle, are
    made for clusters: on two cores they are nearly all of a small MERGE's time.
    """
    # Here, since tests on other versions of Spark load this module where Delta Lake is not.
    from delta import configure_spark_with_delta_pip

    # Workers would start from the first `python3` on the PATH, without the packages of this one.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    scratch = Path(tempfile.mkdtemp(prefix="spark-"))
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("nats-stream-source tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.databricks.delta.snapshotPartitions", "2")
        # Every MERGE is a new plan, and compiling it takes longer than running it on a few rows.
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config(
            "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
    )
    spark = configure_spark_with_delta_pip(builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark
