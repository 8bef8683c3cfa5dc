"""Follow the bucket ``fleet`` into a table until stopped; prints a line for each batch.

NATS_URL, NATS_USER and NATS_PASSWORD set the server and the credentials, LAKE the directory of the
table and the checkpoint, SINK the table's format: ``delta`` or ``parquet``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from nats_stream_source.demo import job


def main() -> None:
    """Run the query."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    lake = Path(os.environ["LAKE"])
    sink: job.Sink = "parquet" if os.environ.get("SINK") == "parquet" else "delta"
    spark = job.start_session(sink, lake / "spark.log", lake / "warehouse")
    query = job.start_query(
        spark,
        options={
            "servers": os.environ["NATS_URL"],
            "user": os.environ["NATS_USER"],
            "password": os.environ["NATS_PASSWORD"],
            "bucket": "fleet",
        },
        table=lake / "fleet",
        checkpoint=lake / "checkpoint",
        sink=sink,
    )
    reached = 0
    while not job.ended(query):
        if job.reached(query) > reached:
            reached = job.reached(query)
            print(f"the table has the bucket up to sequence {reached}", flush=True)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
