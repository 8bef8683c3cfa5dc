"""The query that keeps a Delta table equal to a Postgres table.

Run: python -m examples.postgres.follow_table SERVERS DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

from nats_stream_source import register
from nats_stream_source.delta import configure, debezium_changes, follow

SUBJECT = "shop.public.customers"
COLUMNS = """
    id INT, name STRING, email STRING, balance DECIMAL(12,2), updated_at TIMESTAMP,
    notes STRING, phone STRING
"""


def follow_customers(spark: SparkSession, servers: str, directory: Path) -> None:
    """Start the query of ``directory/table``, and the query of the corrupt messages beside it."""
    messages = (
        spark.readStream.format("nats_stream")
        .option("servers", servers)
        .option("subject", SUBJECT)
        .load()
    )
    changes, corrupt = debezium_changes(messages, COLUMNS, keys=["id"])
    follow(
        changes,
        f"{directory}/table",
        checkpoint=f"{directory}/checkpoint",
        keys=["id"],
        sequence_by=["_lsn", "_sequence"],
        apply_as_deletes="_operation = 'd'",
        unavailable_columns="_unavailable",
        except_column_list=["_operation"],
    )
    (
        corrupt.writeStream.format("json")
        .option("path", f"{directory}/corrupt")
        .option("checkpointLocation", f"{directory}/corrupt-checkpoint")
        .trigger(processingTime="1 minute")
        .start()
    )


def main() -> None:
    """Follow until a query ends."""
    servers, directory = sys.argv[1], Path(sys.argv[2])
    builder = SparkSession.builder.master("local[2]").appName("postgres")
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
    }
    spark = configure(builder.config(map=settings)).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    follow_customers(spark, servers, directory)
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main()
