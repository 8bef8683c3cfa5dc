"""A session without Delta Lake: the table follows the bucket, `engine="spark"` names the jar."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nats_stream_source.embedded import NatsServer
from tests.integration.delta.kv_bucket import Bucket
from tests.integration.delta.table_content import live
from tests.support.spark.session import program_environment

PROGRAM = """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
from nats_stream_source.delta import merge, merge_changes, reconcile
servers, bucket, table = sys.argv[1:]

spark = SparkSession.builder.getOrCreate()
query = (
    spark.readStream.format("nats_kv")
    .option("servers", servers)
    .option("bucket", bucket)
    .load()
    .writeStream.foreachBatch(merge_changes(table))
    .option("checkpointLocation", table + "-checkpoint")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
print(reconcile(spark, table, bucket=bucket, servers=servers))
batch = spark.read.format("nats_kv").options(servers=servers, bucket=bucket).load()
for refused in (
    lambda: merge_changes(table, engine="spark"),
    lambda: merge(batch, "fleet"),
):
    try:
        refused()
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_plain_session_merges(shared_server: NatsServer, tmp_path: Path) -> None:
    bucket = Bucket(shared_server.url, "plain").create()
    bucket.write(("a", "PUT"), ("b", "PUT"), ("a", "DEL"), ("c", "PUT"))
    bucket.purge_subjects("c")
    table = tmp_path / "table"
    environment = {
        **program_environment(tmp_path / "conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, bucket.url, bucket.name, str(table)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert live(table) == {"b": 2}
    counts, spark, catalog = done.stdout.splitlines()[-3:]
    assert counts == "ReconcileResult(removed=0, kept=1, changed=0, last_seq=4, replaced=0)"
    assert spark.startswith(
        "ConfigurationError could not use engine='spark': the session lacks Delta's jar "
        "(io.delta:delta-spark_"
    )
    assert "`configure(SparkSession.builder, delta=True).getOrCreate()`" in spark
    assert (
        "cannot (the table is a name in the catalog), and for engine 'spark' the session" in catalog
    )
