"""Alerts from windows: a stream of measurements, and a stream of alerts that Spark writes.

``python -m examples.alerts``: an alert for each sensor whose mean over a minute is above a limit.
Its message id is that of the sensor and the minute, so the stream stores an alert once within its
duplicate window, also where Spark repeats a micro-batch after a crash.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import (
    avg,
    col,
    concat,
    concat_ws,
    from_json,
    lit,
    struct,
    to_json,
    window,
)

from examples import local

LIMIT = 80
START = datetime(2026, 11, 24, 12)


def measure(spark: SparkSession, servers: str) -> None:
    """Write five minutes of two sensors; sensor `a` is hot in the third minute."""
    measured = []
    for second in range(0, 300, 10):
        at = (START + timedelta(seconds=second)).isoformat()
        for sensor, celsius in (("a", 95 if second // 60 == 2 else 60), ("b", 70)):
            measured.append((f"heat.{sensor}", json.dumps({"at": at, "celsius": celsius})))
    (
        spark.createDataFrame(measured, "subject STRING, data STRING")
        .write.format("nats_stream")
        .options(servers=servers, stream="HEAT", subjects="heat.>", ifMissing="create")
        .mode("append")
        .save()
    )


def alerts(measured: DataFrame) -> DataFrame:
    """A message for each minute of a sensor that is too hot."""
    value = from_json(col("data").cast("string"), "at TIMESTAMP, celsius DOUBLE")
    hot = (
        measured.select("subject", value.alias("value"))
        .select("subject", "value.*")
        .withWatermark("at", "1 minute")
        .groupBy(window("at", "1 minute"), "subject")
        .agg(avg("celsius").alias("celsius"))
        .where(col("celsius") > LIMIT)
    )
    return hot.select(
        concat(lit("alert."), "subject").alias("subject"),
        concat_ws(" ", "subject", col("window.start").cast("string")).alias("msg_id"),
        to_json(struct("window", "celsius")).alias("data"),
    )


def main(spark: SparkSession, servers: str, directory: Path) -> None:
    """Read the measurements, write the alerts, and show these."""
    measure(spark, servers)
    measured = spark.readStream.format("nats_stream").options(servers=servers, stream="HEAT")
    query = (
        alerts(measured.load())
        .writeStream.format("nats_stream")
        .options(servers=servers, stream="ALERTS", subjects="alert.>", ifMissing="create")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)  # without it, alerts follow the measurements
        .start()
    )
    query.awaitTermination()
    written = spark.read.format("nats_stream").options(servers=servers, stream="ALERTS").load()
    (alert,) = written.selectExpr("subject", "string(data) AS data").collect()
    print(alert.subject, alert.data)
    assert (alert.subject, json.loads(alert.data)["celsius"]) == ("alert.heat.a", 95.0)


if __name__ == "__main__":
    local.run(main)
