"""A process whose Spark merges one entry into a table, as Delta Lake commits.

``python -m tests.faults.delta.spark_writer "ENDPOINT TABLE KEY REVISION"``; the endpoint of an
object store, or ``disk``.
"""

from __future__ import annotations

import sys

import pyspark
from pyspark.sql import SparkSession

from nats_stream_source.delta import configure, merge
from nats_stream_source.spark.session import delta_artifact
from tests.integration.delta.merge_model import SCHEMA, put

# pyspark's jars have the version of Hadoop that hadoop-aws must have.
_HADOOP = {"4.2": "3.5.0"}


def main() -> None:
    endpoint, table, key, revision = sys.argv[1].split()
    packages = delta_artifact()
    if endpoint != "disk":
        hadoop = _HADOOP[".".join(pyspark.__version__.split(".")[:2])]
        packages += f",org.apache.hadoop:hadoop-aws:{hadoop}"
    settings = {
        "endpoint": endpoint,
        "endpoint.region": "us-east-1",
        "path.style.access": "true",
        "access.key": "test",
        "secret.key": "test",
        "connection.expect.continue": "false",
    }
    builder = configure(SparkSession.builder.master("local[2]"), delta=True, small_machine=True)
    builder = builder.config("spark.jars.packages", packages).config("spark.ui.enabled", "false")
    for name, value in settings.items():
        builder = builder.config(f"spark.hadoop.fs.s3a.{name}", value)
    spark = builder.getOrCreate()
    batch = spark.createDataFrame([put(key, int(revision)).row()], SCHEMA)
    merge(batch, table, engine="spark", upkeep=None)
    print("merged", flush=True)


if __name__ == "__main__":
    main()
