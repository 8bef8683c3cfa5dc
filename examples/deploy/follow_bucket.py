"""Follow a bucket into a Delta table, in the Spark that starts this program.

Run: spark-submit follow_bucket.py BUCKET TABLE CHECKPOINT [--option NAME=VALUE]...

The server and the credentials are in the environment: NATS_URL, and NATS_CREDS (the path of a
credentials file) or NATS_CREDENTIALS_CONTENT (its text).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from pyspark.sql import SparkSession

from nats_stream_source import register
from nats_stream_source.delta import configure, follow

VARIABLES = {
    "NATS_URL": "servers",
    "NATS_CREDS": "credentials",
    "NATS_CREDENTIALS_CONTENT": "credentialsContent",
}
"""Options of the source that are read from the environment."""


def parser() -> argparse.ArgumentParser:
    """The arguments of the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bucket")
    parser.add_argument("table", help="path or URI, or a name in the catalog")
    parser.add_argument("checkpoint")
    parser.add_argument("--engine", default="auto", choices=("auto", "driver", "spark"))
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--option", action="append", default=[], help="of nats_kv: NAME=VALUE")
    parser.add_argument("--storage-option", action="append", default=[], help="of delta-rs")
    parser.add_argument("--prometheus", type=int)
    return parser


def main(
    arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ
) -> None:
    """Follow until the query ends; an error of the query is the error of the program."""
    given = parser().parse_args(arguments)
    spark = configure(SparkSession.builder).getOrCreate()
    register(spark)
    variables = VARIABLES.items()
    options = {option: environment[name] for name, option in variables if name in environment}
    options |= dict(pair.split("=", 1) for pair in given.option)
    changes = spark.readStream.format("nats_kv").options(**options, bucket=given.bucket).load()
    query = follow(
        changes,
        given.table,
        checkpoint=given.checkpoint,
        once=given.once,
        engine=given.engine,
        storage_options=dict(pair.split("=", 1) for pair in given.storage_option) or None,
        prometheus=given.prometheus,
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
